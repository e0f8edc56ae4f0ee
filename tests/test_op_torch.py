"""Members inside PyTorch: tracing, operator checks, finite differences, autocast, checkpointing, functional transforms."""

import pytest
import torch
import torch._dynamo.testing
from oracle import DEVICE, OP_FORMS, OPS, Case, check, definition, engine, ids, make, operator_checks, same, twice
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import chunkwise
from chunkwise.reference import reference

every = pytest.mark.parametrize("op", OPS, ids=ids)
composed = pytest.mark.parametrize("op", [op for op in OPS if op.name in ("gla", "precond_gated_delta_rule")], ids=ids)
single = pytest.mark.parametrize("op", [op for op in OPS if op.lower is not None], ids=ids)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@every
def test_compiles_whole_with_any_length(op):
    def layer(x, S0):
        o, S = op(x, initial_state=S0, output_final_state=True)
        return o * 2, S

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (64, 65, 200):
        call = make(op, Case(B=2, T=T, H=2, n=2, K=16, V=8, chunk=64), torch.float32)
        got, want = (torch.autograd.grad([t.sum() for t in f(call.x, call.S0)], list(call.leaves().values())) for f in (compiled, layer))
        for name, a, b in zip(call.leaves(), got, want):
            assert torch.equal(a, b), name


def test_one_tensor_is_several_arguments_of_a_compiled_call():
    """Dynamo would refuse it: an autograd.Function is given no tensor twice."""
    x, g = torch.randn(1, 20, 2, 8, requires_grad=True), torch.randn(1, 20, 2).sigmoid().log()
    call = lambda x: chunkwise.gated_delta_rule(x, x, x, g, g.exp(), use_qk_l2norm_in_kernel=False)[0]
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), call(x))
    got, want = (torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, call))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("op, form", OP_FORMS, ids=ids)
def test_what_one_mode_keeps_serves_the_others(op, form):
    """Heads that no other test has: what is kept between calls is made under the first mode."""
    fake = FakeTensorMode()
    for heads, mode in ((11, torch.inference_mode()), (13, fake)):
        call = make(op, Case(T=9, H=heads, K=3, V=3))
        plain = {n: t.detach() for n, t in call.x.items()}
        faked = {n: fake.from_tensor(t) for n, t in plain.items()}
        with mode:
            op(faked if mode is fake else plain, form=form.value)
        got = engine(call, form=form.value)
        same(got, definition(call), form.value)
        with fake:
            assert op(faked, form=form.value)[0].shape == got["o"].shape


@every
def test_a_packed_call_compiles_once(op):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, cu: op(x, cu_seqlens=cu)[0], fullgraph=True, dynamic=True, backend=counter)
    for T, N in ((40, 3), (41, 4), (64, 5), (90, 2)):
        call = make(op, Case(T=T, H=2, K=8, V=7, N=N), torch.float32)
        assert torch.equal(compiled(call.x, call.cu), op(call.x, cu_seqlens=call.cu)[0])
    assert counter.frame_count <= 2


@single
@pytest.mark.parametrize("plan", ["chunk", "recurrent"])
@pytest.mark.parametrize("packed", [False, True])
def test_operator_checks(op, packed, plan):
    if op.passes is not None:
        pytest.skip("its passes run the operators of other members")
    call = make(op, Case(T=20, H=2, n=2, K=6, V=5, N=3 if packed else None), torch.float32)
    x = op.lower(**call.x, **op.settings)
    gate = "none" if x.g is None else op.gate.value
    operator_checks((*x, call.S0, call.cu), gate, op.rule.value, plan)


def test_traced_calls_ask_for_no_gradient_of_a_gate_that_has_none():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.chunkwise.backward.default:
                seen.append((args, args[-1] is True))
            return func(*args, **(kwargs or {}))

    q, k, v = (torch.randn(1, 20, 2, 4, requires_grad=True) for _ in range(3))
    g = -torch.rand(1, 20, 2, requires_grad=True).abs()
    for call in (lambda: chunkwise.retention(q, k, v), lambda: chunkwise.simple_gla(q, k, v, g), lambda: chunkwise.linear_attn(q, k, v)):
        want = torch.autograd.grad(call()[0].sum(), (q, k, v))
        with Watch():
            got = torch.autograd.grad(call()[0].sum(), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert [fixed for _, fixed in seen] == [True, False, False]
    torch.library.opcheck(torch.ops.chunkwise.backward.default, [t.detach() if isinstance(t, torch.Tensor) else t for t in seen[0][0]])


@every
def test_gradients_are_finite_differences(op):
    call = make(op, Case(T=19, H=1, n=2, K=3, V=2))
    names = list(call.x)
    assert torch.autograd.gradcheck(
        lambda S0, *x: op(dict(zip(names, x)), initial_state=S0, output_final_state=True, chunk_size=16),
        (call.S0, *call.x.values()),
        fast_mode=True,
    )


@every
def test_autocast_changes_nothing(op):
    call = make(op, Case(B=2, T=40, H=2, K=8, V=16), torch.float32)
    want = engine(call)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        got = engine(call)
    for name, t in want.items():
        assert torch.equal(got[name], t), name


@every
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(op, reentrant):
    call = make(op, Case(T=40, H=2, n=2, K=6, V=5, N=3), torch.float32)
    names = list(call.x)
    run = lambda cu, *x: op(dict(zip(names, x)), cu_seqlens=cu)[0]
    plain = run(call.cu, *call.x.values())
    again = checkpoint(run, call.cu, *call.x.values(), use_reentrant=reentrant)
    assert torch.equal(plain, again)
    d = [torch.autograd.grad(o.square().sum(), list(call.x.values())) for o in (plain,)]
    again.square().sum().backward()
    for name, g in zip(names, d[0]):
        assert torch.equal(call.x[name].grad, g), name


@every
def test_functional_gradients(op):
    call = make(op, Case(T=20, H=2, K=4, V=4))
    x = {n: t.detach() for n, t in call.x.items()}
    got = torch.func.grad(lambda x: op(x)[0].square().sum())(x)
    want = torch.autograd.grad(op(call.x)[0].square().sum(), list(call.x.values()))
    for name, g in zip(x, want):
        assert torch.equal(got[name], g), name


@every
def test_only_wanted_gradients_are_returned(op):
    call = make(op, Case(T=20, H=2, K=4, V=4))
    for name in call.x:
        x = {n: t.detach().requires_grad_(n == name) for n, t in call.x.items()}
        o, S = op(x, output_final_state=True)
        (o.sum() + S.sum()).backward()
        assert x[name].grad is not None and all(t.grad is None for n, t in x.items() if n != name)


@every
def test_only_the_state_may_be_used(op):
    call = make(op, Case(T=40, H=2, K=4, V=4))
    _, S = op(call.x, initial_state=call.S0, output_final_state=True, chunk_size=16)
    only = torch.autograd.grad(S.square().sum(), list(call.leaves().values()), allow_unused=True)
    o, S = op(call.x, initial_state=call.S0, output_final_state=True, chunk_size=16)
    both = torch.autograd.grad((o * 0).sum() + S.square().sum(), list(call.leaves().values()))
    for name, a, b in zip(call.leaves(), only, both):
        assert torch.equal(torch.zeros_like(b) if a is None else a, b), name


@every
def test_second_derivatives(op):
    """Backward passes run on kernels and in place; what differentiates them is another form of the forward pass."""
    call = make(op, Case(T=35, H=1, n=2, K=4, V=3, N=3))
    run = lambda f, **o: twice(lambda: f(initial_state=call.S0, cu_seqlens=call.cu, **o), call.leaves())
    got = run(lambda **o: op(call.x, output_final_state=True, chunk_size=16, **o))
    want = run(lambda **o: reference(op, call.x, **o))
    single = run(lambda **o: reference(op, call.x, dtype=torch.float32, **o))  # which errs as float64 does, but for the two roundings
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    check(got, want, {n: t + (single[n] - t) * ratio for n, t in want.items()})


@composed
def test_second_derivatives_through_what_is_computed_again(op):
    call = make(op, Case(T=20, H=2, K=4, V=4))
    run = lambda *x: op(dict(zip(call.x, x)))[:1]
    again = lambda *x: checkpoint(run, *x, use_reentrant=False)
    made, want = (twice(lambda f=f: f(*call.x.values()), call.x) for f in (again, run))
    assert all(torch.equal(made[n], want[n]) for n in want)


@composed
def test_transforms_of_transforms(op):
    """The gradient of a gradient, inside autograd too, many at once, many inputs at once: as of the definition."""
    func = torch.func
    call = make(op, Case(T=9, K=3, V=2))
    name, t = next((n, t.detach()) for n, t in call.x.items())
    x = {n: t.detach() for n, t in call.x.items()}
    v = torch.linspace(-1, 1, t.numel()).to(t).view_as(t)
    ours, theirs = (lambda z: op({**x, name: z})[0]), (lambda z: reference(op, {**x, name: z})[0])

    def results(f):
        loss = lambda z: f(z).sin().sum()
        once = func.grad(loss)
        leaf = t.clone().requires_grad_()
        made = f(leaf).sin()
        many = torch.stack([torch.full_like(made, w) for w in (1.0, -2.0, 0.5)])
        yield func.grad(lambda z: (once(z) * v).sum())(t)
        yield torch.autograd.grad((once(leaf) * v).sum(), leaf)[0]
        yield func.jacrev(f)(t)
        yield func.jacrev(once)(t)
        yield func.hessian(loss)(t)
        yield func.vmap(once)(torch.stack([t, 2 * t]))
        yield torch.autograd.grad(made, leaf, many, is_grads_batched=True, retain_graph=True)[0]
        (d,) = torch.autograd.grad(made, leaf, many, is_grads_batched=True, create_graph=True)
        yield torch.autograd.grad(d.sin().sum(), leaf)[0]
        (d,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        (d,) = torch.autograd.grad((d * v).sum(), leaf, create_graph=True)
        yield torch.autograd.grad((d * v).sum(), leaf)[0]

    same(*({f"d{i}": d for i, d in enumerate(results(f))} for f in (ours, theirs)))


def test_a_compiled_gradient_is_not_differentiated_silently():
    q, k, v = (torch.randn(1, 9, 1, 4, requires_grad=True) for _ in range(3))
    o = torch.compile(lambda q: chunkwise.linear_attn(q, k, v)[0], backend="aot_eager", fullgraph=True)(q)
    (d,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        (d.sum() + q.sum()).backward()


@every
def test_tangents_go_along(op):
    """Forward mode, of all inputs and both states: by PyTorch's own operators."""
    call = make(op, Case(T=35, H=1, n=2, K=4, V=3, N=3))
    at = {n: t.detach() for n, t in call.leaves().items()}
    gen = torch.Generator().manual_seed(5)
    along = {n: torch.randn(t.shape, generator=gen, dtype=torch.float64).to(t) for n, t in at.items()}

    def carried(f, dtype=torch.float64, **o):
        run = lambda z: f({n: z[n] for n in call.x}, initial_state=z["S0"], cu_seqlens=call.cu, **o)
        (o, S), (do, dS) = torch.func.jvp(run, ({n: t.to(dtype) for n, t in at.items()},), ({n: t.to(dtype) for n, t in along.items()},))
        return {"o": o.double(), "final state": S.double(), "do": do.double(), "dS": dS.double()}

    want, single = (carried(lambda x, **o: reference(op, x, dtype=None, **o), dtype) for dtype in (torch.float64, torch.float32))
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    got = carried(lambda x, **o: op(x, output_final_state=True, chunk_size=16, **o))
    check(got, want, {n: t + (single[n] - t) * ratio for n, t in want.items()})


@every
def test_states_are_dense_as_tracing_is_told(op):
    """Whatever the strides of the state given: compiled code relies on it."""
    call = make(op, Case(B=2, T=3, H=2, K=4, V=6), torch.float32)
    S0 = call.S0.detach().mT.contiguous().mT
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            call_whole = torch.compile(lambda x, S: op(x, initial_state=S, output_final_state=True), fullgraph=True, backend="aot_eager")
            made, told = op(call.x, initial_state=S0, output_final_state=True)[1], call_whole(call.x, S0)[1]
            assert torch.equal(made, told) and (op.passes is not None or made.is_contiguous())
