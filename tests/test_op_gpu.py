"""What only a GPU can show: CUDA graphs, the same bits fifty times, tensors past 2^31 numbers, a card that is not the current one."""

import threading
from dataclasses import replace

import pytest
import torch
from oracle import OP_FORMS, OPS, Case, check, definition, engine, honest, ids, make, twice

from chunkwise.engine.call import forget
from chunkwise.engine.dispatch import DIGITS
from chunkwise.engine.explain import choices
from chunkwise.reference import reference
from chunkwise.spec import Form, Gate, Rule

pytestmark = pytest.mark.gpu
DENSE = Case(B=2, T=150, H=2, n=2, K=32, V=32, chunk=64)
ROWS = {"dense": DENSE, "packed": replace(DENSE, B=1, T=300, N=7)}
every = pytest.mark.parametrize("op", OPS, ids=ids)
trained = pytest.mark.parametrize(("op", "form"), [x for x in OP_FORMS if x[1] is not Form.RECURRENT], ids=ids)
rows = pytest.mark.parametrize("row", ROWS)


def step(call, form="chunk"):
    """Outputs and the gradients of every input, made on the device alone."""
    o, S = call.op(call.x, form=form, output_final_state=True, chunk_size=call.case.chunk, **call.options)
    grads = torch.autograd.grad([o, S], list(call.leaves().values()), [torch.ones_like(o), torch.ones_like(S)], allow_unused=True)
    return [o.detach(), S.detach(), *(g for g in grads if g is not None)]


def served(op, **call):
    """Whether kernels serve every pass of a training call."""
    return all(c.backend == "triton" for c in choices(op, device="cuda", dtype=torch.bfloat16, grad=True, **call))


def captured(call, form="chunk"):
    """A training step in a graph; what a replay writes over NaN."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(call, form)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step(call, form)

    def replayed():
        for t in made:
            t.fill_(torch.nan)
        graph.replay()
        return made

    return replayed


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@rows
@trained
def test_fifty_calls_give_the_same_bits(op, form, row):
    call = make(op, ROWS[row], torch.bfloat16)
    first = step(call, form)
    assert all(equal(step(call, form), first) for _ in range(49))


@pytest.mark.parametrize("op", [op for op in OPS if op.name in ("gla", "gated_delta_rule", "rwkv7")], ids=ids)
def test_second_derivatives_of_what_kernels_compute(op):
    """First ones are the kernels', bit by bit, whether second ones are asked for or not; second ones are the definition's."""
    call = make(op, replace(DENSE, T=70), torch.bfloat16)
    options = dict(initial_state=call.S0)
    run = lambda: op(call.x, output_final_state=True, **options)
    first, again = (torch.autograd.grad(run()[0].float().sum(), list(call.x.values()), create_graph=graph) for graph in (False, True))
    assert equal(first, again) and all(d.requires_grad for d in again)
    want, plain = (twice(lambda d=d: reference(op, call.x, dtype=d, **options), call.leaves()) for d in (torch.float64, None))
    check(twice(run, call.leaves()), want, plain)


INVERTING = {(op.rule, op.gate is Gate.KEY): op for op in OPS if "inverse_precision" in op.defaults and op.passes is None}


@pytest.mark.parametrize("op", INVERTING.values(), ids=ids)
def test_an_inverse_has_the_digits_that_were_asked_for(op):
    """In float32, of keys nearly parallel: outputs are as far from the truth as those digits say, and the fewer the farther."""
    call, errors = make(op, replace(DENSE, T=70, correlated=True), torch.float32), {}
    truth = definition(call)
    for way, digits in DIGITS.items():
        with torch.no_grad():
            o, _ = call.op(call.x, output_final_state=True, chunk_size=64, inverse_precision=way, **call.options)
        errors[way] = ((o.cpu().double() - truth["o"]).norm() / truth["o"].norm()).item()
        assert errors[way] < 4 * (errors["ieee"] + 2.0**-digits), way
    assert errors["ieee"] < errors["bf16x3"] < errors["tf32"] < errors["bf16"] and errors["tf32x3"] < errors["bf16x3"]
    check(engine(call, inverse_precision="ieee"), engine(call))


@rows
@trained
def test_a_training_step_can_be_captured(op, form, row):
    if row == "packed" and not served(op, K=32, T=300, form=form):
        pytest.skip("PyTorch's stages lay packed rows out on the host")
    call = make(op, ROWS[row], torch.bfloat16)
    replayed = captured(call, form)
    with torch.no_grad():
        for t in call.leaves().values():
            t.mul_(0.5)
    assert equal(replayed(), step(call, form))


@rows
@every
def test_a_call_by_its_recipe_has_the_bits_of_its_hosts(op, row, monkeypatch):
    call = make(op, ROWS[row], torch.bfloat16)
    if not served(op, K=32, T=ROWS[row].T):
        pytest.skip("not served by kernels in every pass")
    recipe = pytest.importorskip("chunkwise.engine.recipe", reason="triton is not installed")
    by_recipe = [step(call) for _ in range(3)]  # decided anew, by its recipe's key, and without one
    assert any(isinstance(r, recipe.Recipe) for r in recipe.RECIPES.values())
    monkeypatch.setattr(recipe, "served", lambda device: False)
    forget()  # what was decided knows its recipes
    by_hosts = step(call)
    assert all(equal(some, by_hosts) for some in by_recipe)


def test_a_call_by_its_recipe_follows_its_tensors():
    """Other tensors, where others were; one that begins where kernels for starts of 16 bytes cannot read; autocast changes nothing."""
    op = max((op for op in OPS if op.passes is None and served(op, K=32, T=100)), key=lambda op: len(op.args))
    calls = [make(op, replace(DENSE, T=100), torch.bfloat16, seed=i) for i in range(3)]
    want = [step(call) for call in calls]
    for i in (0, 1, 2, 0, 2, 1):
        call = calls[i]
        junk = torch.full((1 << 20,), torch.nan, device="cuda")
        del junk
        moved = replace(call, x={n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in call.x.items()})
        assert equal(step(moved), want[i])
    with torch.autocast("cuda", torch.float16):
        assert equal(step(calls[1]), want[1])
    name, t = next((n, t) for n, t in calls[0].x.items() if t.is_floating_point())
    askew = torch.cat([t.detach().flatten()[:1], t.detach().flatten()])[1:].view_as(t).requires_grad_(t.requires_grad)
    made = step(replace(calls[0], x={**calls[0].x, name: askew}))
    assert all((a - b).norm() <= 0.05 * b.norm() for a, b in zip(made, want[0], strict=True))
    assert equal(step(calls[0]), want[0])


def test_nothing_of_a_call_by_its_recipe_is_kept():
    call = make(next(op for op in OPS if op.passes is None and served(op, K=32, T=150)), DENSE, torch.bfloat16)
    for _ in range(3):
        step(call)
    before = torch.cuda.memory_allocated()
    step(call)
    assert torch.cuda.memory_allocated() == before


def test_threads_share_recipes():
    op = min(OPS, key=lambda op: len(op.args))
    calls = [make(op, replace(DENSE, T=200), torch.bfloat16, seed=i) for i in range(4)]
    want, got = [step(call) for call in calls], [None] * len(calls)
    torch.cuda.synchronize()

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            got[i] = [step(calls[i]) for _ in range(20)][-1]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(equal(a, b) for a, b in zip(got, want))


@every
def test_lengths_share_their_kernels(op):
    """No length, batch or number of sequences costs a compilation, but for blocks as narrow as few heads want, or pieces of long ones."""
    hooks = pytest.importorskip("triton", reason="triton is not installed").knobs.runtime
    compiled = []

    def count(*, fn, **kw):
        compiled.append(fn.name)

    step(make(op, DENSE, torch.bfloat16))
    step(make(op, replace(DENSE, T=16), torch.bfloat16))
    step(make(op, ROWS["packed"], torch.bfloat16))
    before, hooks.jit_post_compile_hook = hooks.jit_post_compile_hook, count
    try:
        for i in range(12):
            step(make(op, replace(DENSE, B=1 + i % 3, T=17 + 37 * i), torch.bfloat16))
            step(make(op, replace(ROWS["packed"], T=50 + 41 * i, N=2 + i), torch.bfloat16))
    finally:
        hooks.jit_post_compile_hook = before
    assert compiled == []


@every
def test_long_sequences_have_their_own_bits_when_packed(op):
    """Cut into pieces by their own length, whatever lies beside them: outputs, states and gradients; and in a captured step."""
    ends = [0, 8200, 8300, 8300, 16700]
    if not served(op, K=32, T=ends[-1]):
        pytest.skip("not served by kernels in every pass")
    call = make(op, replace(DENSE, B=1, T=ends[-1], N=4), torch.bfloat16)
    call.cu = torch.tensor(ends, device="cuda")
    packed = step(call)
    shared = [n for n, t in call.x.items() if not op.args[n].per_token]
    names = ["o", "S", *(f"d{n}" for n in call.leaves())]
    assert len(packed) == len(names)
    for i in (0, 1, 3):
        rows = slice(ends[i], ends[i + 1])
        x = {n: (t if n in shared else t[:, rows]).detach().clone().requires_grad_() for n, t in call.x.items()}
        own = replace(call, x=x, S0=call.S0[i : i + 1].detach().clone().requires_grad_(), cu=None)
        for name, alone, t in zip(names, step(own), packed, strict=True):
            if name[1:] not in shared:
                assert torch.equal(alone, t[i : i + 1] if name in ("S", "dS0") else t[:, rows]), f"{name} of sequence {i}"
    replayed = captured(call)
    call.cu.copy_(torch.tensor([0, 50, 60, 8300, 16700]))  # other lengths, the same launches
    assert equal(replayed(), step(call))


WARPS = [op for op in OPS if op.gate is Gate.KEY or op.rule is Rule.DELTA and op.gate is Gate.NONE]  # of 256 keys, by the number of heads


@pytest.mark.parametrize("op, K", [*((op, 128) for op in OPS), *((op, 256) for op in WARPS)], ids=ids)
def test_what_the_number_of_heads_chooses_is_right_and_changes_no_bit(op, K):
    """Of 2, 20, 70 and 128 recurrences an H200 takes scans of 16 and of 64 values, deep and not, and of whole states; of 256 keys with 4
    warps and with 8: what rules choose, and what was measured there."""
    one = make(op, Case(T=200, H=1, n=2, K=K, V=K, chunk=64), torch.bfloat16)
    truth = definition(one)
    check(engine(one), truth, honest(one, truth))
    want = step(one)
    shared = [n for n in one.x if not op.args[n].axes.startswith("B")]
    names = ["o", "S", *(f"d{n}" for n in one.leaves())]
    assert len(want) == len(names)
    for B in (10, 35, 64):
        wide = {n: t if n in shared else t.expand(B, *t.shape[1:]) for n, t in one.leaves().items()}
        x = {n: t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for n, t in wide.items()}
        for name, t, alone in zip(names, step(replace(one, S0=x.pop("S0"), x=x)), want, strict=True):
            if name[1:] not in shared:
                assert torch.equal(t[:1], alone) and torch.equal(t[-1:], alone), f"{name} of {2 * B} heads"


@pytest.mark.parametrize("op", [op for op in OPS if {"q", "k", "v"} <= op.args.keys()], ids=ids)
def test_tensors_past_two_to_the_31_numbers(op):
    """The last samples of a batch whose tensors have more than 2^31 numbers are what they are alone, forward and backward."""
    B, sizes = 33, dict(B=1, T=32_768, H=16, HV=16, K=128, V=128)
    if not served(op, K=128, T=sizes["T"]):
        pytest.skip("not served by kernels: PyTorch's own operators see to this")
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 100 * 2**30:
        pytest.skip("needs 100 GiB")
    one = {n: t.to(torch.bfloat16) for n, t in op.draw(sizes, device="cuda").items()}
    whole = {n: t.expand(B, *t.shape[1:]).contiguous() if op.args[n].per_token else t for n, t in one.items()}

    def made(x):
        x = {n: t.detach().requires_grad_(n in "qkv") for n, t in x.items()}
        o, S = op(x, output_final_state=True)
        return [o.detach(), S.detach(), *torch.autograd.grad(o, [x[n] for n in "qkv"], o.detach())]

    try:
        want, got = made(one), made(whole)
    except torch.cuda.OutOfMemoryError as error:
        pytest.skip(f"needs a larger card: {str(error).split('. ')[1]}")  # its traceback would keep the tensors
    assert got[0].numel() > 2**31
    for i in (0, 16, 31, 32):
        assert all(torch.equal(g[i], w[0]) for g, w in zip(got, want))


@every
def test_a_card_that_is_not_the_current_one(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    here = make(op, DENSE, torch.bfloat16)
    moved = {n: t.detach().to("cuda:1").requires_grad_() for n, t in here.leaves().items()}
    there = replace(here, S0=moved.pop("S0"), x=moved)
    assert torch.cuda.current_device() == 0
    assert equal([t.to("cuda:0") for t in step(there)], step(here))
