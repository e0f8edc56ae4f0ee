"""A sequence scanned in pieces gives what it gives in one, in Triton's interpreter: outputs, last states, and every gradient."""

from dataclasses import replace

import pytest
import torch
import triton.language as tl
from gate_case import double, draw, posed

from chunkwise.engine import chunk, plan_triton, stages_triton, stages_triton_grad
from chunkwise.engine import cut as cuts
from chunkwise.engine.cut import WHOLE, Cut, even
from chunkwise.engine.library import _fake_forward
from chunkwise.kernels import split
from chunkwise.spec import Gate, Rule, Streams

pytestmark = pytest.mark.filterwarnings("ignore")
CELLS = [(g, r) for g in (Gate.NONE, Gate.HEAD, Gate.SCALAR, Gate.KEY) for r in (Rule.ADD, Rule.DELTA)]
LESS = [c for c in CELLS if c[0] is not Gate.HEAD]
less = pytest.mark.parametrize("gate, rule", LESS, ids=[f"{g} {r}" for g, r in LESS])  # heads' constants take the scalar gates' way
cells = pytest.mark.parametrize("gate, rule", CELLS, ids=[f"{g} {r}" for g, r in CELLS])


def both(p, x: Streams, S0, do, dST, plan) -> dict[str, torch.Tensor]:
    o, ST, saved = plan.forward(p, x, S0, final=True, save=True)
    d, dS0 = plan.backward(p, x, S0, saved, do, dST)
    named = {"o": o, "ST": ST, "dS0": None if S0 is None else dS0, **{f"d{n}": t for n, t in d._asdict().items()}}
    return {n: t for n, t in named.items() if t is not None}


def check(monkeypatch, gate, rule, cut: Cut, *, C=16, long=0, cu=None, S0=True, dST=True, **sizes) -> None:
    """No worse than twice the scan in one piece and what moving the inputs by a rounding does: a state handed on is rounded once more."""
    x = draw(gate, rule, **sizes)
    cu = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    p = posed(x, gate, rule, C=C, cu=cu)
    torch.manual_seed(1)
    do = torch.randn_like(x.v)
    S0, dST = (torch.randn(p.N, p.HV, p.K, p.V) if wanted else None for wanted in (S0, dST))
    up = lambda t: None if t is None else t.double()
    eps, x64 = torch.finfo(x.q.dtype).eps, double(x)
    moved = Streams(*(None if t is None else t * (1 + eps * (torch.rand_like(t) - 0.5)) for t in x64))
    truth, near = (both(posed(x64, gate, rule, C=C, cu=cu), y, up(S0), up(do), up(dST), chunk) for y in (x64, moved))
    monkeypatch.setattr(cuts, "LONG", long)
    launched = []
    launch = stages_triton.scan

    def noted(*args, **options):
        launched.append("ends" if options.get("ends") else "rest" if options.get("later") else "all")
        return launch(*args, **options)

    monkeypatch.setattr(stages_triton, "scan", noted)
    monkeypatch.setattr(stages_triton_grad, "ENOUGH", 1)
    made = {}
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        for way in WHOLE, cut:
            monkeypatch.setattr(stages_triton, "split", lambda *sizes, way=way, **options: way)
            made[way] = both(p, x, S0, do, dST, plan_triton)
    finally:
        torch.use_deterministic_algorithms(False)
    by_scans = rule is Rule.ADD and gate is Gate.NONE and x.q.dtype != torch.float32  # all gradients
    early = "all" if rule is Rule.ADD else "rest"  # what corrects scans for good what comes first in reverse while it seeks ends
    back = ["ends", *["all"] * 3] if by_scans else ["all", "ends", early]  # it begins with the states that were left
    assert launched == ["all"] * (4 if by_scans else 3) + ["ends", "all"] + back
    assert made[cut].keys() == made[WHOLE].keys() == truth.keys()
    for name, t in truth.items():
        size = t.norm().clamp(min=1e-30)
        error, honest, moves = ((d[name].double() - t).norm() / size for d in (made[cut], made[WHOLE], near))
        assert error <= 2 * (honest + max(moves, eps)), f"{name}: {error:.2e}, in one piece {honest:.2e}, moved {moves:.2e}"


@cells
@pytest.mark.parametrize("cut", [even(2), Cut((3, 1, 2)), even(8)], ids=["2 pieces", "3 pieces, long ends", "more pieces than chunks"])
def test_pieces_give_what_the_whole_gives(monkeypatch, gate, rule, cut):
    check(monkeypatch, gate, rule, cut, B=2 if cut.pieces == 3 else 1, T=72 if cut.pieces == 3 else 40, H=1, n=2)


@less
def test_pieces_need_no_states_from_outside(monkeypatch, gate, rule):
    check(monkeypatch, gate, rule, even(3), B=1, T=40, H=1, S0=False, dST=False)
    check(monkeypatch, gate, rule, Cut((2, 1, 1)), B=1, T=40, H=1, S0=True, dST=False)
    check(monkeypatch, gate, rule, even(4), B=1, T=40, H=1, S0=False, dST=True)


@less
def test_pieces_of_packed_sequences(monkeypatch, gate, rule):
    check(monkeypatch, gate, rule, even(3), B=1, T=99, H=1, cu=[0, 0, 49, 50, 57, 99], long=40)
    check(monkeypatch, gate, rule, even(3), B=1, T=41, H=1, cu=[0, 20, 41], long=30)


@pytest.mark.parametrize("gate, rule", [(Gate.NONE, Rule.DELTA), (Gate.SCALAR, Rule.ADD), (Gate.KEY, Rule.DELTA)])
def test_a_long_sequence_has_its_own_bits_when_packed(monkeypatch, gate, rule):
    """It is cut by its own length, whatever lies before and after it; and not at all where it is short."""
    monkeypatch.setattr(cuts, "LONG", 40)
    monkeypatch.setattr(stages_triton, "split", lambda gate, rule, T, *sizes: even(3) if T >= 40 else WHOLE)
    monkeypatch.setattr(stages_triton_grad, "ENOUGH", 1)
    ends, x = [0, 7, 7, 52, 92], draw(gate, rule, B=1, T=92, H=1)
    p = posed(x, gate, rule, cu=torch.tensor(ends, dtype=torch.int32))
    torch.manual_seed(1)
    do, S0, dST = torch.randn_like(x.v), *torch.randn(2, p.N, p.HV, p.K, p.V)
    packed = both(p, x, S0, do, dST, plan_triton)
    for i in (0, 2, 3):
        rows = slice(ends[i], ends[i + 1])
        own = Streams(*(None if t is None else t[:, rows].contiguous() for t in x))
        alone = both(posed(own, gate, rule), own, S0[i : i + 1], do[:, rows].contiguous(), dST[i : i + 1], plan_triton)
        for name, t in packed.items():
            assert torch.equal(alone[name], t[i : i + 1] if name in ("ST", "dS0") else t[:, rows]), f"{name} of sequence {i}"


@pytest.mark.parametrize("gate", [Gate.NONE, Gate.HEAD, Gate.SCALAR, Gate.KEY])
@pytest.mark.parametrize("cut", [Cut((2, 1, 1)), even(8)], ids=["3 pieces", "more pieces than chunks"])
def test_pieces_one_after_the_other_have_the_bits_of_pieces_side_by_side(monkeypatch, gate, cut):
    """What rules add is scanned as a card has room: a sample's bits ask nothing of its batch. The scale is no power of two."""
    monkeypatch.setattr(cuts, "LONG", 40)
    monkeypatch.setattr(stages_triton, "split", lambda *sizes, **options: cut)
    monkeypatch.setattr(stages_triton_grad, "ENOUGH", 1)
    x = draw(gate, Rule.ADD, B=2, T=72, H=1, n=2, K=24, V=40, dtype=torch.float16)
    p = replace(posed(x, gate, Rule.ADD), fixed=gate is Gate.HEAD)  # every gradient is the output of a scan
    torch.manual_seed(1)
    do, S0, dST = torch.randn_like(x.v), *torch.randn(2, p.N, p.HV, p.K, p.V)
    made, launched, launch = [], [], stages_triton.scan
    monkeypatch.setattr(stages_triton, "scan", lambda *args, **options: launched.append(options.get("ends")) or launch(*args, **options))
    for enough in (1000, 0):
        monkeypatch.setattr(cuts, "BUSY", enough)
        launched.clear()
        made.append(both(p, x, S0, do, dST, plan_triton))
        assert any(launched) == (enough > 0)
    for name, t in made[0].items():
        assert torch.equal(t, made[1][name]), name


@less
@pytest.mark.parametrize("K, V", [(20, 24), (24, 40)], ids=["pointers", "descriptors"])
def test_pieces_in_sixteen_bits_and_odd_sizes(monkeypatch, gate, rule, K, V):
    check(monkeypatch, gate, rule, even(2), B=1, T=70, H=1, K=K, V=V, C=32, dtype=torch.float16)


@pytest.mark.parametrize("gate, rule", [c for c in CELLS if c[0] is not Gate.NONE])
@pytest.mark.parametrize("strong", [0.0, 100.0], ids=["nothing forgotten", "all forgotten"])
def test_pieces_do_not_depend_on_the_gates(monkeypatch, gate, rule, strong):
    check(monkeypatch, gate, rule, even(3), B=1, T=40, H=1, strong=strong)


def test_only_few_long_sequences_are_cut():
    def pieces(N, T, HV, **options):
        x = Streams(*(torch.empty(N, T, HV, 128, dtype=torch.bfloat16, device="meta") for _ in range(3)))
        return stages_triton.cut(posed(x, Gate.NONE, Rule.ADD, C=64, **options)).pieces

    assert pieces(1, 32768, 32) > 1 and pieces(1, 8192, 8) > 1
    assert pieces(8, 4096, 16) == 1 and pieces(1, 512, 1) == 1
    assert pieces(1, 4096, 8) == pieces(1, 131072, 8) > 1  # a longer row may hold it
    assert pieces(64, 8192, 8) == pieces(1, 8192, 8)  # a sample's bits do not depend on its batch
    for ends in [[0, 32768], [0, 8192, 32768], [0, 1, 32768]]:  # nor on what it is packed with
        assert pieces(1, 32768, 8, cu=torch.tensor(ends)) == pieces(1, 8192, 8)


@pytest.mark.parametrize("cu", [None, [0, 10, 99]], ids=["dense", "packed"])
@less
def test_tracing_knows_how_much_is_kept(monkeypatch, gate, rule, cu):
    monkeypatch.setattr(cuts, "LONG", 40)
    monkeypatch.setattr(stages_triton, "split", lambda *sizes, **options: even(3))
    x, cu = draw(gate, rule, B=1 if cu else 2, T=99, H=1, K=16, V=20), None if cu is None else torch.tensor(cu)
    p = posed(x, gate, rule, C=16, cu=cu)
    saved = plan_triton.forward(p, x, None, final=False, save=True)[2]
    switches = (gate.value, rule.value, "triton", 16, 1.0, "ieee", False, True)
    traced = _fake_forward(*x, None, cu, None, *switches)[2]
    assert traced.shape == saved.shape and traced.dtype == saved.dtype


@pytest.mark.parametrize("cu", [None, [0, 9, 217]], ids=["dense", "packed"])
@pytest.mark.parametrize("raw", [False, True], ids=["ready", "raw"])
def test_what_a_piece_forgets_is_not_asked_and_changes_no_bit(monkeypatch, cu, raw):
    """208 tokens in pieces of 5, 3 and 5 chunks; gates of 5.8 bits a token leave nothing after two chunks."""
    monkeypatch.setattr(cuts, "LONG", 40)
    monkeypatch.setattr(stages_triton, "split", lambda *sizes: Cut((5, 3, 5)))
    x = draw(Gate.SCALAR, Rule.DELTA, B=1, T=208 if cu is None else 217, H=2, n=2, dtype=torch.float16, strong=5.0)
    x.g[..., 1] *= 0.01  # a head that keeps all
    p = posed(x, Gate.SCALAR, Rule.DELTA, cu=None if cu is None else torch.tensor(cu, dtype=torch.int32))
    p = replace(p, raw=p.raw._replace(norm=raw))
    torch.manual_seed(1)
    S0, first = torch.randn(p.N, p.HV, p.K, p.V), 0 if cu is None else cu[1]
    made = lambda x, S0: plan_triton.forward(p, x, S0, final=True, save=False)[:2]
    o, ST = made(x, S0)
    monkeypatch.setattr(split, "LOST", tl.constexpr(1e9))
    for ours, theirs in zip((o, ST), made(x, S0)):
        assert torch.equal(ours, theirs)
    monkeypatch.undo()
    monkeypatch.setattr(cuts, "LONG", 40)
    monkeypatch.setattr(stages_triton, "split", lambda *sizes: Cut((5, 3, 5)))
    x.v[:, first] = S0[-1] = float("nan")  # a mark
    o, ST = made(x, S0)
    lost = o[0, first:].isnan().all(2)  # [208, HV]
    assert lost[:80].all() and not lost[80:, [0, 2, 3]].any() and lost[:, 1].all()
    assert ST[-1].isnan().all((1, 2)).tolist() == [False, True, False, False]


def test_long_keys_may_bring_back_what_gates_forget(monkeypatch):
    """|1 - beta |k|^2| is 8 here: 3 bits a token more than the gates' 2 take away."""
    monkeypatch.setattr(cuts, "LONG", 40)
    monkeypatch.setattr(stages_triton, "split", lambda *sizes: Cut((5, 3, 5)))
    x = draw(Gate.SCALAR, Rule.DELTA, B=1, T=208, H=1, dtype=torch.float16)
    x = x._replace(k=3 * x.k, beta=torch.ones_like(x.beta), g=torch.full_like(x.g, -1.386))
    x.v[:, 0] = float("nan")
    assert plan_triton.forward(posed(x, Gate.SCALAR, Rule.DELTA), x, None, final=False, save=False)[0].isnan().all()
