"""The gradient kernel in Triton's interpreter, against the torch stage of the same name."""

from dataclasses import replace

import pytest
import torch
from gate_case import double, draw, posed

from chunkwise.engine import chunk, plan_triton, stages_triton, stages_triton_grad, tune
from chunkwise.engine.problem import Problem
from chunkwise.engine.stages_triton import binary, gathered, index, scaled, state_pass
from chunkwise.engine.stages_triton_grad import grads
from chunkwise.engine.stages_triton_grad import scanned as scans
from chunkwise.engine.stages_triton_score import scores
from chunkwise.kernels.grad import passed_kernel
from chunkwise.spec import Gate, Rule, Streams

pytestmark = pytest.mark.filterwarnings("ignore")


def slots(p: Problem, S: torch.Tensor, to) -> torch.Tensor:
    """[slots, H, n, K, V] in the torch layout's order -> [slots, HV, V, K] sequence by sequence; NaN in slots that are not used."""
    at = [(i, n) for i, (_, m) in enumerate(to.steps) for n in to.order[:m]]
    first = [0]
    for m in to.chunks:
        first.append(first[-1] + m)
    out = torch.full((index(p).slots, p.HV, p.V, p.K), float("nan"), dtype=p.dtype)
    for s, (i, n) in zip(S, at):
        out[first[n] + i] = s.reshape(p.HV, p.K, p.V).mT.to(p.dtype)
    return out


def scanned(p: Problem, x: Streams, do: torch.Tensor, S0: torch.Tensor, dST: torch.Tensor, C: int) -> dict:
    """What the two scans leave to the gradient stage, made by the torch stages in float64. U with its strength where the stage wants it."""
    p = replace(p, C=C)
    plan = chunk.prepare(posed(double(x), p.gate, p.rule, C=C, cu=p.cu_seqlens), double(x))
    to = plan.c.layout
    ahead = plan.states(S0.double(), keep=True)
    back = plan.gradients(dST.double(), do.double())
    join = lambda t: None if t is None else to.join(t, p.dtype)
    U = back.X
    if U is not None and scaled(p) and x.beta is not None:
        beta = to.split(x.beta.double()[..., None], torch.float64)
        U = U * torch.where(beta.abs() < (2**-10 if p.dtype == torch.float16 else 2**-40), 1.0, beta)
    return dict(S=slots(p, ahead.met, to), dS=slots(p, back.met, to), X=join(ahead.X), U=join(U))


def staged(p: Problem, x: Streams, do: torch.Tensor, S0: torch.Tensor, dST: torch.Tensor) -> Streams:
    """Stage `grads` on what the scans leave."""
    wide = gathered(p, x)
    made, decayed = scanned(p, x, do, S0, dST, wide.C), None
    if p.gate is Gate.KEY:
        kept, _ = scores(p, x, index(p))
        decayed = scores(p, x, index(p), kept)[1]
    if p.rule is Rule.ADD:  # dv is the scan's
        made["U"] = state_pass(p, x, index(p), dST, do=do, decayed=decayed, output=True).o
    return grads(wide, x, index(wide), do, **made, decayed=decayed)


def by_scans(p: Problem, x: Streams, do: torch.Tensor, S0: torch.Tensor, dST: torch.Tensor) -> Streams:
    return scans(p, x, index(p), S0, do, dST, None)[0]


def whole(p: Problem, x: Streams, do: torch.Tensor, S0: torch.Tensor, dST: torch.Tensor) -> Streams:
    """The plan's backward pass."""
    return plan_triton.backward(p, x, S0, plan_triton.forward(p, x, S0, final=False, save=True)[2], do, dST)[0]


def check(gate: Gate, rule: Rule, *, C=16, cu=None, change=lambda x: x, fixed=False, by=None, loud=1.0, **sizes) -> None:
    """Every gradient against the torch plan in float64; honest is its own error in float32 (or a 16-bit result's rounding)."""
    x = change(draw(gate, rule, **sizes))
    cu = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    p = replace(posed(x, gate, rule, C=C, cu=cu), fixed=fixed)
    torch.manual_seed(1)
    do, S0, dST = torch.randn_like(x.v), torch.randn(p.N, p.HV, p.K, p.V) * loud, torch.randn(p.N, p.HV, p.K, p.V) * loud
    got = (by or staged)(p, x, do, S0, dST)
    truth, _ = chunk.backward(posed(double(x), gate, rule, C=C, cu=cu), double(x), S0.double(), None, do.double(), dST.double())
    plain, _ = chunk.backward(p, x, S0, None, do, dST)
    eps = torch.finfo(x.q.dtype).eps
    for name, a, b, t, given in zip(Streams._fields, got, plain, truth, x):
        assert (a is None) == (given is None or (fixed and name == "g")), name
        if a is None:
            continue
        assert a.dtype == given.dtype and a.shape == given.shape, name
        size = t.norm()
        assert loud == 1 or name != "g" or t.abs().max() > 2 * torch.finfo(torch.float16).max
        error, honest = (a.double() - t).norm() / size, (b.double() - t).norm() / size
        assert error <= 8 * (honest + eps), f"{name}: {error:.2e}, honest {honest:.2e}"


CELLS = [(g, r) for g in (Gate.NONE, Gate.HEAD, Gate.SCALAR, Gate.KEY) for r in (Rule.ADD, Rule.DELTA)]


@pytest.mark.parametrize("gate, rule", CELLS)
def test_gradients_of_a_ragged_sequence(gate, rule):
    check(gate, rule)


@pytest.mark.parametrize("gate, rule", CELLS)
def test_gradients_of_packed_sequences_with_empty_ones_and_shared_heads(gate, rule):
    check(gate, rule, B=1, T=40, H=1, n=3, cu=[0, 0, 17, 18, 18, 40])


@pytest.mark.parametrize("gate", [Gate.NONE, Gate.SCALAR])
def test_a_packed_row_s_gradients_are_its_sequences_to_the_bit(gate):
    """Of so many values, too, that they fit one program only where the copy engine brings them; packed rows are read by pointers."""
    ends, rule = [0, 9, 75], Rule.DELTA
    x = draw(gate, rule, B=1, T=75, H=1, V=136, dtype=torch.float16)
    p = posed(x, gate, rule, C=64, cu=torch.tensor(ends, dtype=torch.int32))
    torch.manual_seed(1)
    do, S0, dST = torch.randn_like(x.v), *torch.randn(2, p.N, p.HV, p.K, p.V)

    def step(p: Problem, x: Streams, S0: torch.Tensor, do: torch.Tensor, dST: torch.Tensor) -> dict[str, torch.Tensor]:
        o, ST, saved = plan_triton.forward(p, x, S0, final=True, save=True)
        d, dS0 = plan_triton.backward(p, x, S0, saved, do, dST)
        return {n: t for n, t in dict(o=o, ST=ST, dS0=dS0, **d._asdict()).items() if t is not None}

    packed = step(p, x, S0, do, dST)
    for i in range(2):
        rows = slice(ends[i], ends[i + 1])
        own = Streams(*(None if t is None else t[:, rows].contiguous() for t in x))
        alone = step(posed(own, gate, rule, C=64), own, S0[i : i + 1], do[:, rows].contiguous(), dST[i : i + 1])
        for name, t in packed.items():
            assert torch.equal(alone[name], t[i : i + 1] if name in ("ST", "dS0") else t[:, rows]), f"{name} of sequence {i}"


@pytest.mark.parametrize("K", [16, 72, 136, 130])
def test_as_many_warps_sum_a_chunk_s_gates_however_its_keys_come(K):
    """The order of sums is a matter of warps, and packed rows have the bits of dense ones."""
    x, cu = draw(Gate.SCALAR, Rule.DELTA, B=1, T=20, H=1, K=K, dtype=torch.float16), torch.tensor([0, 5, 20], dtype=torch.int32)
    packed, dense = (tune.config("inverse", posed(x, Gate.SCALAR, Rule.DELTA, C=64, cu=c)) for c in (cu, None))
    assert packed.num_warps == dense.num_warps == tune.config("token", posed(x, Gate.SCALAR, Rule.DELTA, C=64)).num_warps


@pytest.mark.parametrize("gate, rule", CELLS)
def test_gradients_in_blocks_of_odd_sizes(gate, rule):
    check(gate, rule, B=1, T=70, H=1, K=72, V=68, C=64)


@pytest.mark.parametrize("gate, rule", CELLS)
def test_gradients_in_bfloat16(gate, rule):
    check(gate, rule, dtype=torch.bfloat16, C=32)


@pytest.mark.parametrize("gate, rule", [c for c in CELLS if c[0] is not Gate.KEY])
def test_gradients_in_16_bits_of_packed_odd_shared_and_wide_heads(gate, rule):
    check(gate, rule, dtype=torch.float16, B=1, T=150, H=1, n=2, C=64, cu=[0, 65, 150])
    check(gate, rule, dtype=torch.float16, B=1, T=40, H=1, n=3, cu=[0, 0, 17, 18, 18, 40])
    check(gate, rule, dtype=torch.float16, B=1, T=70, H=1, K=72, V=68, C=64)
    check(gate, rule, dtype=torch.float16, B=2, T=70, H=1, n=2, K=72, V=72, C=64)
    check(gate, rule, dtype=torch.float16, B=1, T=40, H=1, V=136, C=32)
    check(gate, rule, dtype=torch.float16, B=1, T=40, H=1, V=136, C=64)


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("gate", [Gate.NONE, Gate.SCALAR])
def test_gradients_of_many_keys_and_values_are_made_by_chunks(gate, fixed, monkeypatch):
    for module in (stages_triton, stages_triton_grad):
        monkeypatch.setattr(module, "AT_ONCE", 16)
    sizes = dict(n=2, cu=[0, 5, 75], dtype=torch.float16) if fixed else dict(strong=5.0, dtype=torch.bfloat16)
    check(gate, Rule.ADD, by=whole, fixed=fixed, B=1, T=75, H=1, K=136, V=32, C=64, **sizes)


@pytest.mark.parametrize("gate", [Gate.NONE, Gate.HEAD, Gate.SCALAR])
def test_a_head_of_many_values_is_several_of_fewer(gate, monkeypatch):
    monkeypatch.setattr(stages_triton_grad, "AT_ONCE", 16)
    check(gate, Rule.DELTA, dtype=torch.float16, H=1, n=2, V=48, change=faint)
    check(gate, Rule.DELTA, dtype=torch.bfloat16, B=1, T=40, V=32, cu=[0, 0, 17, 18, 18, 40])
    check(gate, Rule.ADD, dtype=torch.float16, H=1, n=2, V=48)


@pytest.mark.parametrize("n", [1, 2])
def test_sums_over_heads_that_share_keys_leave_no_room_for_two_chunks_of_many_values(n):
    x = draw(Gate.SCALAR, Rule.ADD, T=1, H=1, n=n, V=136, dtype=torch.bfloat16)
    assert gathered(posed(x, Gate.SCALAR, Rule.ADD, C=64), x).C == (128 if n == 1 else 64)


@pytest.mark.parametrize("gate, strong", [(Gate.NONE, 1.0), (Gate.SCALAR, 0.05), (Gate.SCALAR, 100.0)])
def test_scans_of_many_keys_have_their_gates_made_ready(gate, strong):
    check(gate, Rule.DELTA, by=whole, dtype=torch.float16, B=1, T=75, H=1, K=136, V=24, C=64, strong=strong, cu=[0, 5, 75])


@pytest.mark.parametrize("strong", [0.05, 5.0, 100.0])
@pytest.mark.parametrize("gate, rule", [c for c in CELLS if c[0] is not Gate.NONE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_under_weak_and_strong_gates(gate, rule, strong, dtype):
    n = 16 if dtype == torch.float32 else 32  # fewer channels do not go a chunk a program
    check(gate, rule, strong=strong, dtype=dtype, B=1, H=1, K=n, V=n, C=32)


@pytest.mark.parametrize("strong", [0.05, 5.0])
@pytest.mark.parametrize("rule, erase", [(Rule.ADD, False), (Rule.DELTA, False), (Rule.DELTA, True)])
def test_gradients_of_a_chunk_a_program(rule, erase, strong):
    sizes = dict(B=1, T=70, H=1, n=2, K=40, V=36, C=64, cu=[0, 0, 17, 70])
    check(Gate.KEY, rule, dtype=torch.float16, erase=erase, strong=strong, **sizes)


def forgotten(x: Streams) -> Streams:
    """One channel is forgotten at one token, so its chunk is out of reach."""
    x.g[:, 3, :, 0] = -20.0
    return x


@pytest.mark.parametrize("sizes", [dict(K=40, V=36), dict(), dict(K=32, V=32, change=forgotten)], ids=["chunks", "blocks", "levels"])
@pytest.mark.parametrize("rule", [Rule.ADD, Rule.DELTA])
def test_a_gates_gradient_beyond_float16_is_finite(rule, sizes):
    """States of 1000 and as much of their gradients, which fp16 holds; products of the two it does not."""
    check(Gate.KEY, rule, dtype=torch.float16, B=1, T=20, H=1, C=64, strong=0.02, loud=1000.0, **sizes)


@pytest.mark.parametrize("gate, rule", [(Gate.SCALAR, Rule.ADD), (Gate.SCALAR, Rule.DELTA), (Gate.NONE, Rule.DELTA)])
@pytest.mark.parametrize("erase", [False, True], ids=["at once", "blocks"])
def test_pairs_beyond_float16_have_finite_gradients(gate, rule, erase, monkeypatch):
    """Products of a value and an output's gradient leave fp16's range; those of all that is made of them do not."""
    normal = torch.randn_like
    monkeypatch.setattr(torch, "randn_like", lambda t: normal(t) * 1000)
    sizes = dict(B=1, T=40, H=1, C=32, V=288 if erase and rule is Rule.ADD else 16, erase=erase and rule is Rule.DELTA)
    check(gate, rule, dtype=torch.float16, strong=0.1, change=lambda x: x._replace(v=x.v * 100), **sizes)


def test_what_passes_chunks_is_known_from_several(monkeypatch):
    """Nothing is forgotten, and states are much larger than what a chunk adds: the gate's gradient has less than each chunk's own rounding.
    A packed sequence asks its own chunks alone."""
    x = draw(Gate.SCALAR, Rule.ADD, B=1, T=400, H=1, dtype=torch.float16, strong=0.0)
    torch.manual_seed(1)
    do, S0, dST = torch.randn_like(x.v), *(torch.randn(4, 1, 16, 16) * 30 for _ in range(2))

    def gradient(cu: list[int] | None = None, first: int = 0, last: int = 400, i: slice = slice(0, 1)) -> torch.Tensor:
        part = Streams(*(None if t is None else t[:, first:last] for t in x))
        p = posed(part, Gate.SCALAR, Rule.ADD, cu=None if cu is None else torch.tensor(cu, dtype=torch.int32))
        saved = plan_triton.forward(p, part, S0[i], final=False, save=True)[2]
        d, _ = plan_triton.backward(p, part, S0[i], saved, do[:, first:last], dST[i])
        assert d.g is not None
        return d.g

    exact = posed(double(x), Gate.SCALAR, Rule.ADD)
    truth = chunk.backward(exact, double(x), S0[:1].double(), None, do.double(), dST[:1].double())[0].g
    several, packed = gradient(), gradient([0, 0, 170, 171, 400], i=slice(0, 4))
    assert torch.equal(packed[:, :170], gradient(last=170, i=slice(1, 2)))
    assert torch.equal(packed[:, 171:], gradient(first=171, i=slice(3, 4)))
    launch = stages_triton_grad.launch
    monkeypatch.setattr(stages_triton_grad, "launch", lambda k, *a, **on: None if k is passed_kernel else launch(k, *a, **on))
    assert (several - truth).norm() < (gradient() - truth).norm()


@pytest.mark.parametrize("large", [1e4, 1e12, float("inf")])
def test_what_passed_and_is_forgotten_says_nothing_of_later_chunks(large):
    """Of four chunks the first writes what the second reads and forgets, known to a rounding; what passes the others is exact."""
    chunks = [(0, 0, large, -150), (0, large * (1 + 2**-9), 1, -150), (1, 0, 1, -0.1), (2, 0, 0, -0.1)]  # PASSED, READ, WRITTEN, FORGOTTEN
    parts, dg = torch.tensor(chunks, dtype=torch.float32).view(4, 1, 4), torch.zeros(1, 64, 1)
    passed_kernel[(4,)](parts, dg, dg, dg, 64, 1, 1, C=16, PACKED=False)
    assert dg.eq(0).all()


@pytest.mark.parametrize("gate, names", [(Gate.KEY, "o S0 k v g"), (Gate.SCALAR, "S0 v")])
def test_a_scale_costs_operands_no_digit(gate, names):
    """A scale and its power of two give the same numbers in fp32, times the rest, which are rounded to bf16 once, where they are stored."""
    x = draw(gate, Rule.ADD, B=1, T=70, H=1, K=40, V=36, dtype=torch.bfloat16, strong=0.02)
    p = posed(x, gate, Rule.ADD, C=64)
    two, rest = binary(p)
    assert 1 < rest < 2
    torch.manual_seed(1)
    do, S0, dST = torch.randn_like(x.v), torch.randn(1, 1, p.K, p.V), torch.randn(1, 1, p.K, p.V)

    def made(p: Problem, dST: torch.Tensor) -> dict[str, torch.Tensor]:
        o, _, saved = plan_triton.forward(p, x, S0, final=False, save=True)
        d, dS0 = plan_triton.backward(p, x, S0, saved, do, dST)
        return dict(o=o, S0=dS0, **d._asdict())

    got, plain = made(p, dST), made(two, dST / rest)
    for name in names.split():
        a, b = got[name].float(), plain[name].float() * rest
        sums = torch.finfo(torch.float32).eps * p.T * a.abs().max()  # of so many tokens, rounded in fp32 as often
        assert (a - b).abs().le(a.abs() * torch.finfo(torch.bfloat16).eps + sums).all(), name


@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("gate", [Gate.NONE, Gate.SCALAR, Gate.KEY])
def test_gradients_of_an_erase_key_and_of_full_writes(gate, beta):
    check(gate, Rule.DELTA, B=1, H=1, n=2, erase=True, beta=beta)
    check(gate, Rule.DELTA, B=1, H=1, beta=beta)


def faint(x: Streams) -> Streams:
    """Among the strengths: none, some too small to divide by, one below zero."""
    beta = x.beta.clone()
    beta[:, ::3], beta[:, 1::7], beta[:, :, 0] = 0.0, 1e-5 if x.q.dtype == torch.float16 else 1e-30, -beta[:, :, 0]
    return x._replace(beta=beta)


@pytest.mark.parametrize("dtype, packed", [(torch.bfloat16, False), (torch.float16, True), (torch.float32, False)])
@pytest.mark.parametrize("gate", [Gate.NONE, Gate.SCALAR, Gate.KEY])
def test_strengths_too_small_to_divide_by_have_their_gradient(gate, dtype, packed):
    sizes = dict(T=40, cu=[0, 0, 17, 18, 18, 40]) if packed else dict(T=37)
    check(gate, Rule.DELTA, dtype=dtype, B=1, H=1, n=3, change=faint, C=32, **sizes)


@pytest.mark.parametrize("gate, rule", [(Gate.HEAD, Rule.ADD), (Gate.SCALAR, Rule.DELTA)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_that_is_a_constant_has_no_gradient(gate, rule, dtype):
    check(gate, rule, dtype=dtype, B=1, H=1, C=32, fixed=True)


@pytest.mark.parametrize("gate", [Gate.NONE, Gate.HEAD, Gate.SCALAR])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_where_no_gate_learns_every_gradient_is_the_output_of_a_scan(gate, dtype):
    options = dict(fixed=True, by=by_scans, dtype=dtype, B=1)
    check(gate, Rule.ADD, **options, T=40, H=1, n=3, cu=[0, 0, 17, 18, 18, 40])
    check(gate, Rule.ADD, **options, T=70, H=2, K=24, V=40, C=32, strong=5.0)


@pytest.mark.parametrize("kernel", ["grad_reader", "grad_far"])
def test_blocks_that_the_compiler_gets_wrong_cannot_be_chosen(kernel, monkeypatch):
    p = posed(draw(Gate.KEY, Rule.ADD, dtype=torch.bfloat16), Gate.KEY, Rule.ADD, C=64)
    assert tune.config(kernel, p).BK == 64
    monkeypatch.setitem(tune.RULES, kernel, lambda p: tune.Config(32, 64, 4, 1))
    with pytest.raises(ValueError, match=f"{kernel} cannot take blocks of 32 keys on sm_90"):
        tune.config(kernel, p)
