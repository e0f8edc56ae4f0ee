"""What has kernels besides the plain cells, whole, in Triton's interpreter against the torch plan: dplr, reads before the write, an erase
key that reads first; gates per value channel."""

import pytest
import torch
from gate_case import double, draw, posed
from test_score import near

from chunkwise.engine import chunk, plan_triton, stages_triton, stages_triton_affine
from chunkwise.engine.cut import Cut
from chunkwise.engine.stages_triton import index
from chunkwise.engine.stages_triton_affine import affine
from chunkwise.spec import Gate, Rule, Streams

AFFINE = {"dplr": (Gate.KEY, Rule.DPLR), "dplr, no gates": (Gate.NONE, Rule.DPLR), "bonus": (Gate.KEY, Rule.ADD)}
GATED = {n: c for n, c in AFFINE.items() if c[0] is Gate.KEY}
SPREAD = {"dplr, scalar": (Gate.SCALAR, Rule.DPLR), "dplr, head": (Gate.HEAD, Rule.DPLR), "bonus, scalar": (Gate.SCALAR, Rule.ADD)}
CELLS = AFFINE | SPREAD | {"value": (Gate.VALUE, Rule.ADD), "early erase": (Gate.SCALAR, Rule.DELTA)}
CASES = {
    "ragged": dict(T=20, B=1, H=1, n=2, own=True),
    "packed, empty ones, shared heads": dict(B=1, T=22, H=1, n=2, cu=[0, 0, 17, 18, 18, 22]),
    "gates that forget everything": dict(T=20, B=1, H=1, strong=1e5),
    "weak gates": dict(T=40, B=1, H=1, strong=0.02),
    "odd sizes": dict(B=1, H=1, T=66, K=72, V=20, C=64),
    "more channels than 256": dict(B=1, H=1, T=20, K=300, V=20),
    "bfloat16": dict(T=40, B=1, H=1, dtype=torch.bfloat16, C=32),
    "bfloat16, strong": dict(T=40, B=1, H=1, strong=8.0, dtype=torch.bfloat16, C=32),
    "bfloat16, strong, fewer channels than a block": dict(T=40, B=1, H=2, K=32, strong=8.0, dtype=torch.bfloat16, C=64),
    "float16, descriptors": dict(T=40, B=1, H=1, K=24, V=40, dtype=torch.float16, C=32),
}


def whole(plan, p, x: Streams, S0, do, dST) -> dict[str, torch.Tensor]:
    o, ST, saved = plan.forward(p, x, S0, final=True, save=True)
    d, dS0 = plan.backward(p, x, S0, saved, do, dST)
    return dict(o=o, ST=ST, dS0=dS0, **{n: t for n, t in d._asdict().items() if t is not None})


def compare(cell: str, *, C=16, cu=None, factor=8.0, loud=1.0, **sizes) -> None:
    gate, rule = CELLS[cell]
    cu = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    early = cell == "early erase"
    x = draw(gate, rule, bonus=cell.startswith("bonus"), erase=early, early=early, **sizes)
    p, p64 = (posed(y, gate, rule, C=C, cu=cu) for y in (x, double(x)))
    torch.manual_seed(1)
    do, S0, dST = torch.randn_like(x.v), *(torch.randn(p.N, p.HV, p.K, p.V) * loud for _ in range(2))
    truth = whole(chunk, p64, double(x), S0.double(), do.double(), dST.double())
    plain = whole(chunk, p, x, S0, do, dST)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        got = whole(plan_triton, p, x, S0, do, dST)
    finally:
        torch.use_deterministic_algorithms(False)
    assert loud == 1 or truth["g"].abs().max() > torch.finfo(torch.float16).max
    for name, t in truth.items():
        assert got[name].dtype == plain[name].dtype and got[name].shape == t.shape
        near(name, got[name], plain[name], t, dtype=x.q.dtype, factor=factor)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cell", CELLS)
def test_forward_and_backward(cell, case):
    compare(cell, **CASES[case])


@pytest.mark.parametrize("strong", [0.02, 0.3], ids=["factors", "levels"])
@pytest.mark.parametrize("cell", GATED)
def test_a_gates_gradient_beyond_float16_is_finite(cell, strong):
    """States of 1000 and as much of their gradients, which fp16 holds; products of the two it does not."""
    compare(cell, T=20, B=1, H=1, dtype=torch.float16, C=32, strong=strong, loud=1000.0)


@pytest.mark.parametrize("cell", CELLS)
def test_pieces_give_what_the_whole_gives(cell, monkeypatch):
    monkeypatch.setattr(stages_triton, "split", lambda *sizes, **options: Cut((2, 1, 2)))
    compare(cell, T=36, B=1, H=1)


@pytest.mark.parametrize("strong", [0.02, 3.0, 100.0])
@pytest.mark.parametrize("cell", GATED)
def test_chunks_hear_nothing_of_later_tokens(cell, strong):
    at, sizes = 20, dict(T=32, B=1, H=1, K=20, dtype=torch.bfloat16, bonus=cell == "bonus")
    x = draw(*GATED[cell], strong=strong, **sizes)
    p = posed(x, *GATED[cell], C=32)
    made = affine(p, x, index(p))[1]
    for later in (0.02, 3.0, 100.0):
        other = draw(*GATED[cell], strong=later, seed=1, **sizes)
        mixed = (a if a is None or a.ndim < 3 else torch.cat((a[:, :at], b[:, at:]), 1) for a, b in zip(x, other))
        again = affine(p, Streams(*mixed), index(p))[1]
        for name in ("M", "qd", "kd"):
            a, b = getattr(made, name), getattr(again, name)
            assert a is None or torch.equal(a[:, :at], b[:, :at]), name


@pytest.mark.parametrize("cell", GATED)
def test_every_share_of_rows_in_reach_gives_the_same(cell, monkeypatch):
    x = draw(*GATED[cell], T=16, B=1, H=1, strong=0.1, bonus=cell == "bonus")
    p, made = posed(x, *GATED[cell]), []
    sums = x.g.cumsum(1).abs().amax((0, 2, 3)) * 1.4427  # log2 units
    rounded = torch.finfo(torch.float32).eps * (p.K + p.T)  # products of all keys, under decays that are sums of all gates
    for value in (None, *(float(sums[i]) * 1.001 for i in (0, 5, 14, 15))):
        monkeypatch.setattr(stages_triton_affine, "reach", lambda p, value=value: value)
        made.append(affine(p, x, index(p))[1])
    for other in made[1:]:
        for a, b in zip(made[0], other):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=rounded, atol=rounded * float(a.abs().max()))


@pytest.mark.parametrize("strong", [0.02, 3.0, 100.0])
def test_gates_per_value_hear_nothing_of_later_tokens(strong):
    at, sizes = 20, dict(T=32, B=1, H=1, dtype=torch.bfloat16)
    x = draw(Gate.VALUE, Rule.ADD, strong=strong, **sizes)
    p = posed(x, Gate.VALUE, Rule.ADD, C=32)
    made, _, _ = plan_triton.forward(p, x, None, final=False, save=False)
    for later in (0.02, 3.0, 100.0):
        other = draw(Gate.VALUE, Rule.ADD, strong=later, seed=1, **sizes)
        mixed = Streams(*(a if a is None else torch.cat((a[:, :at], b[:, at:]), 1) for a, b in zip(x, other)))
        again, _, _ = plan_triton.forward(p, mixed, None, final=False, save=False)
        assert torch.equal(made[:, :at], again[:, :at]) and not torch.equal(made[:, at:], again[:, at:])


def test_an_output_has_hardly_more_than_its_own_rounding_of_a_state_it_reads():
    """The dplr rule's, of a token that writes nothing; the scale is a power of two. A state in one part costs a share of each product."""
    x = draw(Gate.KEY, Rule.DPLR, B=1, T=1, H=2, dtype=torch.float16)
    x, S0 = x._replace(g=x.g * 0, v=x.v * 0, b=x.b * 0), torch.randn(1, 2, 16, 16)
    p, eps = posed(x, Gate.KEY, Rule.DPLR), torch.finfo(torch.float16).eps
    o = plan_triton.forward(p, x, S0, final=False, save=False)[0].double()
    q, S = x.q.double() * p.scale, S0.double()
    want, size = (torch.einsum("bthk,bhkv->bthv", a, b) for a, b in ((q, S), (q.abs(), S.abs())))
    assert ((o - want).abs() <= eps * want.abs() + eps**2 * size).all()
