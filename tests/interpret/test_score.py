"""Scores under gates per key channel in Triton's interpreter, against the torch stages; and GLA and KDA whole."""

import math

import pytest
import torch
from gate_case import double, draw, posed

from chunkwise.engine import chunk, plan_triton, stages_triton_score
from chunkwise.engine import stages_torch as oracle
from chunkwise.engine.stages_triton import index
from chunkwise.engine.stages_triton_inverse import token_room
from chunkwise.spec import Gate, Rule, Streams


@pytest.fixture
def reach(monkeypatch):
    """Sets how far the scores' exponents may be positive."""

    def to(value: float | None) -> None:
        monkeypatch.setattr(stages_triton_score, "reach", lambda p: value)

    return to


def scored(p, x: Streams) -> dict[str, torch.Tensor]:
    """What the stage makes, by name."""
    kept, decayed = stages_triton_score.scores(p, x, index(p))
    made = {**decayed._asdict(), "T": kept[1] if p.rule is Rule.DELTA else None}
    return {n: t for n, t in made.items() if t is not None}


def near(name: str, a: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, factor: float = 4) -> None:
    """The error against float64 is no more than a few of the torch plan's own, or of the inputs' rounding; decays count against 1."""
    eps, size = torch.finfo(dtype).eps, truth.numel() ** 0.5 if name == "decay" else truth.norm() + 1e-30
    error, honest = (a.double() - truth).norm() / size, (plain.double() - truth).norm() / size
    assert error <= factor * (honest + eps), f"{name}: {error:.2e}, honest {honest:.2e}"


def unchunked(p, x: Streams) -> dict[str, torch.Tensor]:
    """The torch stages' results in the kernel's layout (dense calls)."""
    c = oracle.enter(p, x, chunk.layout(p, x.q.device))
    M, join = oracle.scores(p, c), lambda t: c.layout.join(t, t.dtype)
    out = dict(M=join(M.qw if M.qk is None else M.qk), qd=join(c.key.start(c.q)), kr=join(c.key.end(c.k)))
    NC = len(c.layout.steps)
    out["decay"] = c.key.total().view(NC, p.B, p.HV, p.K).transpose(0, 1).reshape(-1, p.HV, p.K)
    if p.rule is Rule.DELTA:
        out.update(T=join(oracle.inverse(M.rw)), kd=join(c.key.start(c.k)))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strong", [0.02, 1.0, 8.0, 100.0])
@pytest.mark.parametrize("rule", [Rule.ADD, Rule.DELTA])
def test_scores_under_weak_and_strong_gates(rule, strong, dtype):
    x = draw(Gate.KEY, rule, T=40, B=2, H=1, K=20, strong=strong, dtype=dtype)
    p = posed(x, Gate.KEY, rule, C=32)
    got = scored(p, x)
    truth, plain = unchunked(posed(double(x), Gate.KEY, rule, C=32), double(x)), unchunked(p, x)
    for name in truth:
        a = got[name]
        near(name, a.exp2() if name == "decay" else a, plain[name], truth[name], a.dtype)


@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize("rule", [Rule.ADD, Rule.DELTA])
def test_every_share_of_rows_in_reach_gives_the_same_scores(rule, C, reach):
    x = draw(Gate.KEY, rule, T=C, B=1, H=1, strong=0.1)
    p = posed(x, Gate.KEY, rule, C=C)
    sums = x.g.cumsum(1).abs().amax((0, 2, 3)) * 1.4427  # log2 units
    rounded = torch.finfo(torch.float32).eps * (p.K + C)  # products of all keys, under decays that are sums of all gates
    made = []
    for value in (None, *(float(sums[i]) * 1.001 for i in (0, 1, C // 3, C // 2, C - 2, C - 1))):
        reach(value)
        made.append(scored(p, x))
    for other in made[1:]:
        for name, a in made[0].items():
            torch.testing.assert_close(a, other[name], rtol=rounded, atol=rounded * float(a.abs().max()))


@pytest.mark.parametrize("beta", [True, False])
def test_strengths_are_left_to_the_scans(beta):
    x = draw(Gate.KEY, Rule.DELTA, B=1, dtype=torch.float16, beta=beta)
    p = posed(x, Gate.KEY, Rule.DELTA, cu=torch.tensor([0, 0, 17, 18, 37]))
    room = token_room(p, index(p), x.q.device).fill_(float("nan"))
    stages_triton_score.scores(p, x, index(p), tokens=room)
    for left, (row, L) in zip(room[:, :, 0], [(0, 16), (16, 1), (17, 1), (18, 16), (34, 3)]):
        wanted = x.beta[0, row : row + L].mT.float() if beta else torch.ones(p.HV, L)
        assert torch.equal(left[:, :L], wanted) and not left[:, L:].any()


@pytest.mark.parametrize("strong", [0.02, 1.0, 2.0, 200.0])
def test_rows_in_reach_of_their_chunks_start_are_noted_for_the_gradients(strong):
    x, C = draw(Gate.KEY, Rule.ADD, T=70, B=2, H=1, K=72, strong=strong, dtype=torch.bfloat16), 64
    p = posed(x, Gate.KEY, Rule.ADD, C=C)
    kept, _ = stages_triton_score.scores(p, x, index(p))
    near = stages_triton_score.scores(p, x, index(p), kept)[1].near
    g = torch.nn.functional.pad(x.g.double().clamp(min=-104.0), (0, 0, 0, 0, 0, 58)).unflatten(1, (2, C))  # [B, chunks, C, HV, K]
    reached = (g.cumsum(2) / math.log(2)).amin(-1) >= -stages_triton_score.reach_back(p)
    assert torch.equal(near.view(2, 2, 1), reached.cummin(2).values.sum(2).to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strong", [0.02, 3.0, 8.0, 100.0])
@pytest.mark.parametrize("rule", [Rule.ADD, Rule.DELTA])
def test_scores_hear_nothing_of_later_tokens(rule, strong, dtype):
    at, sizes = 20, dict(T=32, B=1, H=1, K=20, dtype=dtype)
    x = draw(Gate.KEY, rule, strong=strong, **sizes)
    p = posed(x, Gate.KEY, rule, C=32)
    before = scored(p, x)
    for later in (0.02, 3.0, 100.0):
        other = draw(Gate.KEY, rule, strong=later, seed=1, **sizes)
        after = scored(p, Streams(*(None if a is None else torch.cat((a[:, :at], b[:, at:]), 1) for a, b in zip(x, other))))
        for name in before.keys() - {"kr", "decay"}:
            assert torch.equal(before[name][:, :at], after[name][:, :at]), name
        assert not torch.equal(before["M"][:, at:], after["M"][:, at:])


CASES = {
    "ragged": dict(T=37),
    "one token": dict(T=1, C=16),
    "packed, empty ones, shared heads": dict(B=1, T=40, H=1, n=3, cu=[0, 0, 17, 18, 18, 40]),
    "gates that forget everything": dict(T=20, strong=1e5),
    "odd sizes": dict(B=1, H=1, T=70, K=72, V=20, C=64),
    "bfloat16": dict(T=40, B=1, dtype=torch.bfloat16, C=32),
    "bfloat16, strong": dict(T=40, B=1, strong=8.0, dtype=torch.bfloat16, C=32),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", [Rule.ADD, Rule.DELTA])
def test_a_gate_per_key_forward_and_backward(rule, case):
    sizes = dict(CASES[case])
    C, cu = sizes.pop("C", 16), sizes.pop("cu", None)
    cu = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    x = draw(Gate.KEY, rule, **sizes)
    p, p64 = posed(x, Gate.KEY, rule, C=C, cu=cu), posed(double(x), Gate.KEY, rule, C=C, cu=cu)
    torch.manual_seed(1)
    do, S0, dST = torch.randn_like(x.v), torch.randn(p.N, p.HV, p.K, p.V), torch.randn(p.N, p.HV, p.K, p.V)
    results = []
    for plan, p_, x_, wide in ((plan_triton, p, x, False), (chunk, p, x, False), (chunk, p64, double(x), True)):
        s0, d, ds = (t.double() if wide else t for t in (S0, do, dST))
        o, ST, saved = plan.forward(p_, x_, s0, final=True, save=True)
        dx, dS0 = plan.backward(p_, x_, s0, saved, d, ds)
        results.append(dict(o=o, ST=ST, dS0=dS0, **{n: t for n, t in dx._asdict().items() if t is not None}))
    for name in results[2]:
        near(name, *(r[name] for r in results), dtype=x.q.dtype, factor=8)
