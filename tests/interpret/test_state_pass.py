"""The inverse, the scan in both directions and the packed index against the torch plan, in Triton's interpreter."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from chunkwise import draw
from chunkwise.engine import chunk, plan_triton, stages_triton, stages_triton_inverse
from chunkwise.engine import cut as cuts
from chunkwise.engine.cut import even
from chunkwise.engine.dispatch import DIGITS
from chunkwise.engine.problem import Problem, problem
from chunkwise.kernels import token
from chunkwise.spec import Gate, Rule, Streams

CELLS = [(g, r) for g in (Gate.NONE, Gate.HEAD, Gate.SCALAR) for r in (Rule.ADD, Rule.DELTA)]
cells = pytest.mark.parametrize("gate, rule", CELLS, ids=[f"{g} {r}" for g, r in CELLS])
SIZES = dict(B=2, T=37, H=2, HV=4, K=24, V=40)
LENGTHS = {"one token": 1, "one short of a chunk": 15, "a chunk": 16, "one past a chunk": 17, "ragged": 37}


def streams(gate: Gate, rule: Rule, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: int) -> Streams:
    B, T, H, HV, K, V = {**SIZES, **sizes}.values()
    torch.manual_seed(seed)
    gates = {Gate.NONE: None, Gate.HEAD: -torch.rand(HV), Gate.SCALAR: draw.log_decay(B, T, HV)}
    q, k, v, beta = draw.normal(B, T, H, K), draw.unit(B, T, H, K), draw.normal(B, T, HV, V), draw.write_strength(B, T, HV)
    return Streams(q.to(dtype), k.to(dtype), v.to(dtype), gates[gate], beta.to(dtype) if rule is Rule.DELTA else None)


def asked(x: Streams, gate: Gate, rule: Rule, C: int = 16, cu_seqlens: torch.Tensor | None = None) -> Problem:
    return problem(x, cu_seqlens, cu_seqlens, gate=gate, rule=rule, chunk=C, exact=True, scale=x.q.shape[-1] ** -0.5, precision="ieee")


def double(x: Streams) -> Streams:
    return Streams(*(None if t is None else t.double() for t in x))


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative L2 error; NaN counts as infinite."""
    e = float((got.double() - truth).norm() / truth.norm().clamp(min=1e-300))
    return e if e == e else float("inf")


def moved(x: Streams, eps: float) -> Streams:
    """The inputs, each number moved by up to half an eps: what one rounding of them would do."""
    return Streams(*(None if t is None else t * (1 + eps * (torch.rand_like(t) - 0.5)) for t in x))


def check_forward(x: Streams, gate: Gate, rule: Rule, S0: torch.Tensor | None = None, **options) -> None:
    """No worse than twice the torch plan in the same dtype, which does not round 16-bit operands on the way: hence what moving
    the inputs by a rounding does. Outputs hold NaN until they are written.
    """
    x64, eps = double(x), torch.finfo(x.q.dtype).eps
    p, p64, S64 = asked(x, gate, rule, **options), asked(x64, gate, rule, **options), None if S0 is None else S0.double()
    truth = chunk.forward(p64, x64, S64, final=True, save=False)
    near = chunk.forward(p64, moved(x64, eps), S64, final=True, save=False)
    same = chunk.forward(p, x, S0, final=True, save=False)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        got = plan_triton.forward(p, x, S0, final=True, save=False)
    finally:
        torch.use_deterministic_algorithms(False)
    for mine, torchs, moves, true in zip(got[:2], same, near, truth):
        assert error(mine, true) <= 2 * (error(torchs, true) + max(error(moves, true), eps))


@cells
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("K, V", [(20, 24), (24, 40)], ids=["pointers", "descriptors, where 16 bits wide"])
def test_forward_agrees_with_the_torch_plan(gate, rule, dtype, K, V):
    check_forward(streams(gate, rule, dtype, K=K, V=V), gate, rule, torch.randn(SIZES["B"], SIZES["HV"], K, V), C=32)


@pytest.mark.parametrize("g", [-0.1, -9.0], ids=["within a factor a token", "beyond it"])
def test_a_head_s_decays_beside_many_keys_are_factors_of_tokens(g):
    x = streams(Gate.HEAD, Rule.ADD, torch.float16, T=40, K=136)
    check_forward(x._replace(g=torch.full_like(x.g, g)), Gate.HEAD, Rule.ADD, torch.randn(SIZES["B"], SIZES["HV"], 136, SIZES["V"]))


@pytest.mark.parametrize("g", [-0.1, -1.7], ids=["within a factor a token", "beyond it"])
def test_a_head_s_decays_beside_many_keys_have_the_same_bits_in_narrow_and_wide_blocks(g, monkeypatch):
    """They stay in registers in narrow blocks of values, and are made in every chunk in wide ones."""
    x = streams(Gate.HEAD, Rule.ADD, torch.float16, B=1, HV=2, T=70, K=136)
    p, x = asked(x, Gate.HEAD, Rule.ADD, C=64), x._replace(g=torch.full_like(x.g, g))
    config, made = stages_triton.config, []
    for BV in (16, 64):
        monkeypatch.setattr(stages_triton, "config", lambda kernel, p, BV=BV: replace(config(kernel, p), BV=BV))
        o, ST, _ = plan_triton.forward(p, x, None, final=True, save=False)
        d, _ = plan_triton.backward(p, x, None, None, torch.ones_like(o), None)
        made.append([o, ST, *(t for t in d if t is not None)])
    assert len(made[0]) == 6 and all(torch.equal(a, b) for a, b in zip(*made))


@pytest.mark.parametrize("gate", [Gate.NONE, Gate.SCALAR])
def test_a_small_scale_costs_a_float16_state_no_digit(gate):
    """States are read with as much of the scale as keeps them in range: what a query has more and the scale less changes no bit."""
    x = streams(gate, Rule.ADD, torch.float16, B=1, HV=2, T=40)
    p, made = asked(x, gate, Rule.ADD), []
    for more in (1.0, 2.0**12):
        scaled = replace(p, scale=2**-7 / more)
        made.append(plan_triton.forward(scaled, x._replace(q=x.q * more), None, final=False, save=False)[0])
    assert made[0].isfinite().all() and torch.equal(*made)


@cells
@pytest.mark.parametrize("T", LENGTHS.values(), ids=LENGTHS)
def test_any_length_is_right(gate, rule, T):
    check_forward(streams(gate, rule, T=T, B=1), gate, rule)


@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("K, V", [(1, 1), (16, 70), (70, 16)])
def test_any_chunk_and_head_size_is_right(C, K, V):
    check_forward(streams(Gate.SCALAR, Rule.DELTA, B=1, T=70, H=1, HV=1, K=K, V=V), Gate.SCALAR, Rule.DELTA, C=C)


@cells
def test_packed_sequences_are_separate_ones(gate, rule):
    cu = torch.tensor([0, 5, 5, 6, 38, 38], dtype=torch.int32)
    S0 = torch.randn(5, SIZES["HV"], SIZES["K"], SIZES["V"])
    check_forward(streams(gate, rule, B=1, T=38), gate, rule, S0, cu_seqlens=cu)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_index_lists_every_chunk_once(kind):
    cu = torch.tensor([0, 0, 1, 17, 17, 81, 90], dtype=kind)
    x = streams(Gate.NONE, Rule.ADD, B=1, T=90)
    at = stages_triton.index(asked(x, Gate.NONE, Rule.ADD, cu_seqlens=cu))
    want, first = [], [0]
    for a, b in zip(cu.tolist(), cu.tolist()[1:]):
        want += [[row, min(16, b - row)] for row in range(a, b, 16)]
        first.append(len(want))
    assert at.first.tolist() == first
    assert at.chunks[: len(want)].tolist() == want
    assert at.chunks[len(want) :, 1].eq(0).all() and at.slots == len(at.chunks)


@pytest.mark.parametrize("gate", [Gate.HEAD, Gate.SCALAR])
@pytest.mark.parametrize("rule", [Rule.ADD, Rule.DELTA])
@pytest.mark.parametrize("g", [0.0, -5.0, -50.0, -1e4, -float("inf")])
def test_gates_of_any_size_are_exact(gate, rule, g):
    x = streams(gate, rule, B=1, HV=2)
    check_forward(x._replace(g=torch.full_like(x.g, g)), gate, rule)


@pytest.mark.parametrize("rule", [Rule.ADD, Rule.DELTA])
def test_small_decays_behind_a_huge_one_are_kept(rule):
    x = streams(Gate.SCALAR, rule, B=1, HV=2)
    g = x.g * 1e-3
    g[:, ::11] = -1e4
    check_forward(x._replace(g=g), Gate.SCALAR, rule, C=64)


@pytest.mark.parametrize("gate", [Gate.NONE, Gate.HEAD, Gate.SCALAR])
def test_sums_beyond_float16_are_read(gate):
    """What a state holds leaves fp16's range, what is read of it with the scale does not."""
    x = streams(gate, Rule.ADD, torch.float16, B=1, K=16)
    g = x.g if x.g is None else x.g * 0.01
    check_forward(x._replace(q=x.q * 0.1, v=x.v * 1000, g=g), gate, Rule.ADD, torch.randn(1, 4, 16, 40) * 4e4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_keys_all_alike_cost_no_accuracy(dtype):
    x = streams(Gate.NONE, Rule.DELTA, dtype, T=64, B=1)
    k = x.k[:, :1] + 0.01 * x.k
    check_forward(x._replace(k=k / k.norm(dim=-1, keepdim=True), beta=torch.full_like(x.beta, 0.99)), Gate.NONE, Rule.DELTA, C=64)


@cells
def test_strides_and_what_lies_behind_the_inputs_do_not_matter(gate, rule):
    x = streams(gate, rule)
    B, T, H, HV, K, V = SIZES.values()
    wide = torch.full((B, T + 1, 2 * H * K + HV * V), float("nan"))
    parts = [wide[:, :T, a : a + h * d].view(B, T, h, d) for a, h, d in ((0, H, K), (H * K, H, K), (2 * H * K, HV, V))]
    for part, t in zip(parts, x):
        part.copy_(t)
    turned = x.v.transpose(2, 3).contiguous().transpose(2, 3)
    p = asked(x, gate, rule)
    want = plan_triton.forward(p, x, None, final=True, save=False)
    for other in (Streams(*parts, *x[3:]), x._replace(v=turned)):
        got = plan_triton.forward(p, other, None, final=True, save=False)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@cells
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32, pointers", "float16, descriptors"])
def test_scan_keeps_the_states_chunks_meet_and_the_gradients_they_leave(gate, rule, dtype):
    x, C, T = streams(gate, rule, dtype), 16, SIZES["T"]
    p, x64 = asked(x, gate, rule), double(x)
    S0, dST = (torch.randn(p.N, p.HV, p.K, p.V) for _ in range(2))
    do = torch.randn_like(x.v)
    at = stages_triton.index(p)
    Tinv = stages_triton_inverse.inverse(p, x, at) if rule is Rule.DELTA else None
    there = stages_triton.state_pass(p, x, at, S0, T=Tinv, store=1)
    back = stages_triton.state_pass(p, x, at, dST, T=Tinv, do=do, store=1, output=rule is Rule.ADD, final=True)
    S, dS = (t.view(p.B, -1, p.HV, p.V, p.K).mT for t in (there.S, back.S))
    eps = torch.finfo(dtype).eps

    def part(a: int, b: int) -> tuple[Problem, Streams]:
        cut = Streams(*(t if t is None or t.ndim < 3 else t[:, a:b] for t in x64))
        return asked(cut, gate, rule), cut

    for c in range(S.shape[1]):
        past, state = part(0, c * C), S0.double()
        if c:
            state = chunk.forward(*past, S0.double(), final=True, save=False)[1]
        assert error(S[:, c], state) <= 8 * eps
        end = min(c * C + C, T)
        rest, gradient = part(end, T), dST.double()
        if end < T:
            state = chunk.forward(*part(0, end), S0.double(), final=True, save=False)[1]
            gradient = chunk.backward(*rest, state, None, do[:, end:].double(), gradient)[1]
        assert error(dS[:, c], gradient) <= 8 * eps
    d, dS0 = chunk.backward(asked(x64, gate, rule), x64, S0.double(), None, do.double(), dST.double())
    assert error(back.ST, dS0) <= 8 * eps
    if rule is Rule.DELTA:
        strength = 1.0 if stages_triton.scaled(p) else x.beta[..., None]  # which X has there already
        assert error(back.X * strength, d.v) <= 8 * eps


def test_no_tokens_leave_the_state_as_it_was():
    x = streams(Gate.SCALAR, Rule.DELTA, T=0)
    S0 = torch.randn(2, SIZES["HV"], SIZES["K"], SIZES["V"])
    o, ST, _ = plan_triton.forward(asked(x, Gate.SCALAR, Rule.DELTA), x, S0, final=True, save=True)
    assert o.shape == x.v.shape and torch.equal(ST, S0)


def test_an_inverse_keeps_the_digits_that_were_asked_for(monkeypatch):
    """But for "tf32", which Triton's interpreter takes for float32."""
    x = streams(Gate.NONE, Rule.DELTA, T=64, B=1, H=1, HV=1)
    p, plan = asked(x, Gate.NONE, Rule.DELTA, C=64), chunk.prepare(asked(double(x), Gate.NONE, Rule.DELTA, C=64), double(x))
    truth = plan.c.layout.join(plan.T, torch.float64)
    monkeypatch.setattr(stages_triton, "exact", lambda parts: {2: "bf16x3", 3: "ieee"}[parts])
    errors = {way: error(stages_triton_inverse.inverse(replace(p, inverse=way), x, stages_triton.index(p)), truth) for way in DIGITS}
    assert all(errors[way] < 2.0 ** -DIGITS[way] for way in ("tf32x3", "bf16x3", "bf16")) and errors["ieee"] < errors["tf32x3"]
    assert all(errors[way] > 2.0 ** -DIGITS[finer] for finer, way in (("tf32x3", "bf16x3"), ("bf16x3", "bf16")))


@pytest.mark.parametrize("rule, pieces, cu", [(Rule.ADD, 3, None), (Rule.ADD, 1, [0, 0, 18, 19, 19, 54]), (Rule.DELTA, 1, None)])
def test_states_of_every_second_chunk_are_among_those_of_every_chunk(monkeypatch, rule, pieces, cu):
    """Forwards those the even chunks meet; in reverse the gradients that odd chunks leave, and a sequence's last one."""
    monkeypatch.setattr(stages_triton, "split", lambda *sizes, **options: even(pieces))
    monkeypatch.setattr(cuts, "LONG", 8)
    T = 37 if cu is None else cu[-1]
    cu = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    x = streams(Gate.SCALAR, rule, torch.float16, B=2 if cu is None else 1, T=T, H=1, HV=1, K=16, V=16)
    p = asked(x, Gate.SCALAR, rule, cu_seqlens=cu)
    do, Tinv = torch.randn_like(x.v), stages_triton_inverse.inverse(p, x, stages_triton.index(p)) if rule is Rule.DELTA else None
    lengths = [T] * p.B if cu is None else cu.diff().tolist()
    chunks = [-(-n // 16) for n in lengths]
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    met = [a + c for a, n in zip(starts, chunks) for c in range(0, n, 2)]
    left = [a + min(c + 1, n - 1) for a, n in zip(starts, chunks) for c in range(0, n, 2)]
    at = [stages_triton.index(replace(p, C=16 * every)) for every in (1, 2)]
    carried = None
    for reverse, wanted in ((None, met), (do, left)):
        each, second = (stages_triton.state_pass(p, x, at[n - 1], None, T=Tinv, do=reverse, store=n, carried=carried) for n in (1, 2))
        assert torch.equal(second.S[: len(wanted)], each.S[wanted])
        carried = each.carried


LATER = [(Rule.ADD, -3.0), (Rule.ADD, -300.0), (Rule.ADD, float("nan")), (Rule.DELTA, -3.0), (Rule.DELTA, -300.0)]


@pytest.mark.parametrize("rule, later", LATER, ids=[f"{rule} {later}" for rule, later in LATER])
def test_gates_that_come_later_in_a_chunk_change_no_bits(rule, later):
    """Whether decays are factors of tokens or of pairs is decided for every reader by what came before it."""
    x = streams(Gate.SCALAR, rule, torch.float16, B=1, H=1, HV=2, K=16, V=16)
    p = asked(x, Gate.SCALAR, rule)
    o = plan_triton.forward(p, x, None, final=False, save=False)[0]
    for t in (5, 15, 16, 30):
        g = x.g.clone()
        g[:, t:] = later
        assert torch.equal(plan_triton.forward(p, x._replace(g=g), None, final=False, save=False)[0][:, :t], o[:, :t])


@pytest.mark.parametrize("cu", [None, [0, 0, 17, 18, 37]], ids=["dense", "packed"])
def test_inverse_leaves_what_the_scans_ask_of_each_token(cu):
    x = streams(Gate.SCALAR, Rule.DELTA, torch.float16, B=1)
    x.g[:, 20:24] = -40.0  # in log2 units 58 a token: beyond reach from the second of them on
    x.k[:, :6] *= 2  # what 1 - beta |k|^2 multiplies grows
    p = asked(x, Gate.SCALAR, Rule.DELTA, cu_seqlens=None if cu is None else torch.tensor(cu))
    at = stages_triton.index(p)
    room = stages_triton_inverse.token_room(p, at, x.q.device).fill_(float("nan"))
    stages_triton_inverse.inverse(p, x, at, None, room)
    starts = [(i, min(16, p.T - i)) for i in range(0, p.T, 16)] if cu is None else [(0, 16), (16, 1), (17, 1), (18, 16), (34, 3)]
    for left, (row, L) in zip(room.view(-1, p.HV, token.KINDS.value, 16), starts):
        g, beta = torch.zeros(p.HV, 16, dtype=torch.float64), torch.zeros(p.HV, 16)
        g[:, :L], beta[:, :L] = x.g[0, row : row + L].mT.double() / math.log(2), x.beta[0, row : row + L].mT.float()
        G = g.cumsum(1)
        near, reached = G > -100, G > -101
        rows = {
            token.BETA: beta, token.START: G.exp2(), token.END: (G[:, -1:] - G).exp2(), token.SUM: G,
            token.READ: torch.where(near, G.exp2(), 1.0), token.BACK: torch.where(reached, (-G).exp2(), 1.0),
        }  # fmt: skip
        rounded = torch.finfo(torch.float32).eps * float(G.abs().max().clamp(min=1.0))  # of a sum, in an exponent
        for kind, wanted in rows.items():
            torch.testing.assert_close(left[:, kind.value].double(), wanted.double(), rtol=rounded, atol=torch.finfo(torch.float32).tiny)
        k = x.k[0, row : row + L].double().repeat_interleave(p.HV // p.H, 1).transpose(0, 1)  # [HV, L, K]
        step = torch.eye(p.K, dtype=torch.float64) - beta[:, :L, None, None] * k[..., :, None] * k[..., None, :]
        log2 = torch.linalg.matrix_norm(step, 2).log2().sum(1) + G[:, -1]
        torch.testing.assert_close(left[:, token.LEFT.value, 0].double(), log2, rtol=rounded, atol=16 * rounded)
        made = step[:, 0]
        for t in range(1, L):
            made = step[:, t] @ made
        assert (torch.linalg.matrix_norm(made, 2).log2() + G[:, -1] <= log2 + rounded).all()


@triton.jit
def scored(sums, tokens, y, x, M, LOWER: tl.constexpr):
    """M [16, 16] of tokens whose gates have these sums, transposed unless LOWER."""
    o = tl.arange(0, 16)
    token.store_tokens(tokens, o * 0.0 + 1.0, tl.load(sums + o), o, 16, "scalar")
    b_y, b_x = (tl.load(p + o[:, None] * 16 + o[None, :]) for p in (y, x))
    b_all = tl.load(tokens + token.START * 16 + 15)
    tl.store(M + o[:, None] * 16 + o[None, :], token.token_scores(b_y, b_x, tokens, b_all, o, 16, 1.0, 16, LOWER, "ieee"))


@pytest.mark.parametrize("lower", [False, True], ids=["forwards", "reversed"])
def test_sums_of_gates_that_rise_by_a_rounding_are_factors_still(lower):
    """A card adds them in another order for each token: past a gate of 0 the sum may be the larger, and the border lie between the two."""
    border = torch.tensor(-100.0)
    G = torch.tensor([-50.0, -100.0, -100.0, *[-160.0] * 13])
    G[1], G[2] = torch.nextafter(border, -border.abs() * 2), torch.nextafter(border, border * 0)
    M, tokens = torch.empty(16, 16), torch.empty(token.KINDS.value * 16)
    scored[(1,)](G, tokens, torch.ones(16, 16), torch.ones(16, 16), M, LOWER=lower)
    pairs = 16 * (G[None, :] - G[:, None]).double().exp2().triu()
    rounded = torch.finfo(torch.float32).eps * (16 + float(G.abs().max()))  # of products, and of sums in their exponents
    torch.testing.assert_close((M.mT if lower else M).double(), pairs, rtol=rounded, atol=torch.finfo(torch.float32).tiny)
