"""Calls decided once, and one-token steps on a CPU that are taped: always the bits of a call that decides anew."""

import threading
from types import SimpleNamespace

import pytest
import torch
from oracle import OPS, Case, ids, make
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from chunkwise.engine import call, decode_torch, library
from chunkwise.engine.decode import decode
from chunkwise.engine.tape import tape
from chunkwise.spec import Rule, Streams

every = pytest.mark.parametrize("op", [op for op in OPS if op.passes is None], ids=ids)
BASIC = next(op for op in OPS if op.rule is Rule.DELTA and op.lower is Streams)


@pytest.fixture(autouse=True)
def forgetful():
    call.forget()
    yield
    call.forget()


def anew(op, x, **options):
    """The call as nobody has made it before."""
    return call._first(op, x, options, None)


def drawn(op, seed, **sizes):
    made = make(op, Case(**dict(H=2, n=2, K=5, V=6) | sizes), torch.float32, seed=seed)
    return {n: t.detach() for n, t in made.x.items()}, made.S0.detach()


def options_of(op, x):
    """Everything an op may be left to do."""
    o = {n: True for n in op.defaults if n.startswith("use_") or n == "allow_neg_eigval"}
    if "use_gate_in_kernel" in o:
        o |= {"A_log": torch.rand(x["g"].shape[2]), "dt_bias": torch.rand(x["g"].shape[2:].numel())}
    return o


def alike(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a is None and b is None) or a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


@every
def test_a_taped_step_is_the_step(op):
    for how in ("plain", "raw, values first", "no state"):
        for seed in range(4):
            x, S0 = drawn(op, seed)
            o = {} if how == "no state" else dict(initial_state=S0, output_final_state=True)
            if how == "raw, values first":
                o |= dict(options_of(op, x), state_v_first=True, initial_state=S0.mT.contiguous())
            before = {n: t.clone() for n, t in x.items()}
            alike(op(x, **o), anew(op, x, **o))
            assert all(torch.equal(x[n], t) for n, t in before.items())
    assert len(call.CALLS.by_key) == 3 and all(len(d.taped.tapes) == 1 for d in call.CALLS.by_key.values())


@pytest.mark.parametrize("guarded", [True, False], ids=["by guards", "by a key"])
def test_a_call_is_like_another_in_everything_but_numbers(guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(call, "_Guards", None)
    x, S0 = drawn(BASIC, 0)
    wide = {n: t.expand(3, *t.shape[1:]) for n, t in x.items()}
    calls = {
        "as it was": (x, dict(scale=0.5, output_final_state=True)),
        "another scale": (x, dict(scale=0.25, output_final_state=True)),
        "no state": (x, dict(scale=0.5, output_final_state=False)),
        "a state": (x, dict(scale=0.5, initial_state=S0)),
        "other strides": ({**x, "v": x["v"].mT.contiguous().mT}, dict(scale=0.5, output_final_state=True)),
        "other sizes": (wide, dict(scale=0.5, output_final_state=True)),
        "another dtype": ({n: t.double() for n, t in x.items()}, dict(scale=0.5, output_final_state=True)),
        "no gate": ({**x, "g": None}, dict(scale=0.5, output_final_state=True)),
        "one tensor twice": ({**x, "q": x["k"]}, dict(scale=0.5, output_final_state=True)),
    }
    for _ in range(3):
        for inputs, o in calls.values():
            for _ in range(2):
                alike(BASIC(inputs, **o), anew(BASIC, inputs, **o))
    grown = {n: t.clone().requires_grad_() for n, t in x.items()}
    assert BASIC(grown)[0].requires_grad and BASIC(grown)[0].requires_grad
    with torch.no_grad():
        assert not BASIC(grown)[0].requires_grad and not BASIC(grown)[0].requires_grad


def test_a_plan_is_given_memory_that_holds_the_numbers(monkeypatch):
    """Kernels read memory; PyTorch may have the negatives there, of conjugates' imaginary parts and their gradients."""
    met, ways = [], library.PLANS["chunk"]()

    def spy(name):
        real = getattr(ways, name)

        def plan(p, x, *rest, **how):
            met.extend(t.is_neg() for t in (*x, *rest) if t is not None)
            return real(p, x, *rest, **how)

        return plan

    plan = SimpleNamespace(forward=spy("forward"), backward=spy("backward"))
    monkeypatch.setitem(library.PLANS, "chunk", lambda: plan)
    x, _ = drawn(BASIC, 0, T=6)
    x = {n: t.requires_grad_() for n, t in x.items()}
    turned = {**x, "q": torch._neg_view(-x["q"])}
    assert turned["q"].is_neg() and turned["q"].stride() == x["q"].stride()
    grads = []
    for y in (x, x, turned, turned, x):
        o, S = BASIC(y, output_final_state=True)
        parts = [torch.view_as_real(torch.complex(torch.zeros_like(t), t).conj().resolve_conj()).sum() for t in (o, S)]
        grads.append(torch.autograd.grad(sum(parts), list(x.values())))
        alike(grads[-1], grads[0])
    assert met and not any(met)


def test_results_are_memory_of_their_own():
    x, S0 = drawn(BASIC, 0)
    made = [BASIC(x, initial_state=S0, output_final_state=True) for _ in range(4)]
    assert len({t.untyped_storage().data_ptr() for pair in made for t in pair}) == 8
    o, S = (t.clone() for t in made[2])
    BASIC({n: t + 1 for n, t in x.items()}, initial_state=made[2][1], output_final_state=True)
    alike(made[2], (o, S))


def test_what_differs_in_strides_type_or_grad_mode_is_decided_apart():
    x, S0 = drawn(BASIC, 0, B=2)
    wide = {n: t.repeat_interleave(2, -1)[..., ::2] for n, t in x.items()}
    still = {**x, "g": x["g"][:1, :, :1].expand(2, 1, 4)}
    double = {n: t.double() for n, t in x.items()}
    for _ in range(3):
        for y in (x, wide, still, double):
            alike(BASIC(y, initial_state=S0, output_final_state=True), anew(BASIC, y, initial_state=S0, output_final_state=True))
    learn = {n: t.clone().requires_grad_() for n, t in x.items()}
    for _ in range(3):
        o, _ = BASIC(learn)
        assert o.requires_grad and torch.autograd.grad(o.sum(), learn["q"])[0].any()
        with torch.no_grad():
            assert not BASIC(learn)[0].requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        alike(BASIC(x), anew(BASIC, x))


def test_calls_without_gradients_are_no_model_for_those_with():
    x, S0 = drawn(BASIC, 0)
    learn = {n: t.requires_grad_() for n, t in x.items()}
    with torch.no_grad():
        for _ in range(4):
            BASIC(learn)
            decode(BASIC, learn, S0)
    assert BASIC(learn)[0].requires_grad
    with pytest.raises(ValueError, match="has no gradient, and q requires one"):
        decode(BASIC, learn, S0)


def test_numbers_in_tensors_are_looked_at_every_time():
    x, _ = drawn(BASIC, 0, T=6)
    for ends in ([0, 2, 6], [0, 5, 6], [0, 0, 6]):
        alike(BASIC(x, cu_seqlens=torch.tensor(ends)), anew(BASIC, x, cu_seqlens=torch.tensor(ends)))
    for _ in range(2):
        with pytest.raises(ValueError, match="cu_seqlens must rise"):
            BASIC(x, cu_seqlens=torch.tensor([0, 5, 5]))
    for scale in (torch.tensor(1.0), torch.tensor(2.0)):
        alike(BASIC(x, scale=scale), anew(BASIC, x, scale=scale))
    for _ in range(3):
        BASIC(x, scale=0.5)
    with pytest.raises(TypeError, match="scale must be a number"):  # as a first call says
        BASIC(x, scale=torch.tensor([0.5, 0.5]))


def test_refusals_come_back():
    x, _ = drawn(BASIC, 0)
    for _ in range(3):
        with pytest.raises(TypeError, match="unexpected keyword 'sale'"):
            BASIC(x, sale=1)
        with pytest.raises(TypeError, match="q must be a tensor"):
            BASIC({**x, "q": [1, 2]})
        with pytest.raises(ValueError, match="chunk_size"):
            BASIC(x, chunk_size=17)
        BASIC(x)


def test_who_watches_sees_calls_that_were_made_before():
    """A tape hides its operators: from nobody who listens, traces, transforms or carries tangents along."""
    x, S0 = drawn(BASIC, 0)
    o = dict(initial_state=S0, output_final_state=True)
    latest = []
    for _ in range(3):
        want = BASIC(x, **o)
        latest.append(call.LATEST.get(BASIC))
    assert latest[-1] is not None and latest[-1].taped.tapes
    seen = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            seen.append(f.name())
            return f(*args, **(kwargs or {}))

    with Listener():
        got = BASIC(x, **o)
    alike(got, want)
    assert seen == ["chunkwise::forward"]
    leaf = x["v"].clone().requires_grad_()
    d = torch.autograd.grad(BASIC({**x, "v": leaf}, **o)[0].sum(), leaf)[0]
    alike([torch.func.grad(lambda v: BASIC({**x, "v": v}, **o)[0].sum())(x["v"])], [d])
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            alike(BASIC(x, **o), want)
    alike(BASIC(x, **o), want)
    with forward_ad.dual_level():
        alike(BASIC(x, **o), want)
        o, S = BASIC({**x, "v": forward_ad.make_dual(x["v"], x["v"])}, initial_state=0 * S0, output_final_state=True)
        for t in (o, S):  # linear in v alone: each is its own tangent
            assert t.is_contiguous()
            torch.testing.assert_close(forward_ad.unpack_dual(t).tangent, forward_ad.unpack_dual(t).primal)


def test_threads_do_not_share_a_tape():
    wrong, start = [], threading.Barrier(4)

    def work(seed):
        x, S0 = drawn(BASIC, seed)
        want = anew(BASIC, x, initial_state=S0, output_final_state=True)
        start.wait()
        for _ in range(50):
            got = BASIC(x, initial_state=S0, output_final_state=True)
            wrong.extend(seed for a, b in zip(got, want) if not torch.equal(a, b))

    BASIC(drawn(BASIC, 0)[0])
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_nothing_of_a_call_is_kept():
    import gc
    import weakref

    x, S0 = drawn(BASIC, 0)
    o = options_of(BASIC, x)
    for _ in range(3):
        made = BASIC(x, initial_state=S0, output_final_state=True, **o)
    seen = [weakref.ref(t) for t in (*x.values(), S0, *made, o["A_log"], o["dt_bias"])]
    del x, S0, made, o
    gc.collect()
    assert not any(ref() is not None for ref in seen)


def test_only_a_single_token_is_taped():
    """What chunks do may depend on numbers, kernels are no operators of PyTorch's, and a tape keeps all that is made on the way."""
    for T, taped in (1, True), (40, False):
        call.forget()
        x, _ = drawn(BASIC, 0, T=T)
        for _ in range(2):
            BASIC(x)
        assert [d.taped is not None for d in call.CALLS.by_key.values()] == [taped]


def test_a_call_that_looks_at_numbers_is_not_taped():
    x = torch.ones(3)
    made, again = tape(lambda t: (t * 2 if t.sum() > 0 else t,), [x])
    assert torch.equal(made[0], x * 2) and again is None
    made, again = tape(lambda t: (t * 2 + t.exp().mul_(3).view(3, 1).sum(-1),), [x])
    assert again is not None
    for y in (torch.randn(3), torch.randn(3)):
        assert torch.equal(again(y)[0], y * 2 + y.exp() * 3)


def test_parameters_without_gradients_are_known_at_once(monkeypatch):
    """As those of a layer that generates under no_grad; a call with gradients is never taken for one without."""
    x, S0 = drawn(BASIC, 0)
    o = {n: torch.nn.Parameter(t) if isinstance(t, torch.Tensor) else t for n, t in options_of(BASIC, x).items()}
    assert any(isinstance(t, torch.nn.Parameter) for t in o.values())
    pool = S0.repeat(2, 1, 1, 1)
    runs = (lambda: BASIC(x, initial_state=S0, **o)[0], lambda: decode(BASIC, x, pool, torch.tensor([1]), **o))
    for run in runs:
        with torch.no_grad():
            for _ in range(3):
                run()
            monkeypatch.setattr(call, "hashed", None)  # a call that is not known at once would look for its key
            run()
            monkeypatch.undo()
    for _ in range(3):
        assert runs[0]().requires_grad
        with torch.no_grad():
            assert not runs[0]().requires_grad


@pytest.mark.parametrize("how", ["plain", "bf16", "raw, values first", "projection"])
def test_a_taped_step_in_a_pool_is_the_step(how):
    """Two sequences whose slots lie side by side, or not; then the pool and the output of a step that decides anew."""
    decode_torch.forget()
    for seed, slots in enumerate(([3, 4], [0, 1], [4, 0], [1, 2], [-1, 2], [3, 4])):
        x, S0 = drawn(BASIC, seed, B=2)
        o = {}
        pool = torch.randn(5, *S0.shape[1:], generator=torch.Generator().manual_seed(seed))
        pool = pool.bfloat16() if how == "bf16" else pool
        if how == "raw, values first":
            o, pool = dict(options_of(BASIC, x), state_v_first=True), pool.mT.contiguous()
        if how == "projection":
            x = dict(qkv=torch.cat([x.pop(n).flatten(2) for n in "qkv"], 2), **x)
        other, index = pool.clone(), torch.tensor(slots)
        got, version = decode(BASIC, x, pool, index, **o), pool._version
        kept = dict(decode_torch.STEPS.by_key)
        decode_torch.forget()
        alike((got, pool), (decode(BASIC, x, other, index, **o), other))
        decode_torch.STEPS.by_key.update(kept)
        assert version > 0
    assert len(kept) == 1 and all(len(step.taped.tapes) == 1 for step in kept.values())


def test_a_step_still_refuses_slots_that_are_not_there():
    x, S0 = drawn(BASIC, 0)
    pool = S0.repeat(3, 1, 1, 1)
    for _ in range(3):
        decode(BASIC, x, pool, torch.tensor([2]))
        with pytest.raises(ValueError, match="slots below 3"):
            decode(BASIC, x, pool, torch.tensor([3]))
        with pytest.raises(ValueError, match="backend must be"):
            decode(BASIC, x, pool, torch.tensor([2]), backend="fast")
        with pytest.raises(ValueError, match="no gradient"):
            decode(BASIC, {**x, "q": x["q"].clone().requires_grad_()}, pool, torch.tensor([2]))


def test_a_tensor_given_twice_is_two_inputs():
    """Calls alike in all but that one tensor stood for two: each has the results of its own."""
    for op in (BASIC, next(op for op in OPS if op.name == "linear_attn")):
        x, S0 = drawn(op, 0)
        o = dict(initial_state=S0, output_final_state=True)
        for now in ({**x, "k": x["q"]}, {**x, "k": x["q"]}, x):
            alike(op(now, **o), anew(op, now, **o))


def test_steps_under_inference_mode_leave_others_alone():
    x, S0 = drawn(BASIC, 0)
    o = dict(initial_state=S0, output_final_state=True)
    with torch.inference_mode():
        for _ in range(2):
            BASIC(x, **o)
    with torch.no_grad():
        for _ in range(2):
            alike(BASIC(x, **o), anew(BASIC, x, **o))
