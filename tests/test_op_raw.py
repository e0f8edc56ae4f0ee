"""Raw streams on a GPU: the chunk form's first kernels prepare them, where nobody asks for a gradient."""

from dataclasses import replace

import pytest
import torch
from oracle import OPS, Case, ids, make

from chunkwise.bench.measure import watched
from chunkwise.engine.prologue import NORMALIZED, prologue

pytestmark = pytest.mark.gpu
SERVED = ("delta_rule", "gated_delta_rule", "kda")
every = pytest.mark.parametrize("op", [op for op in OPS if op.name in SERVED], ids=ids)
CASES = {
    "dense, shared heads": Case(B=2, T=150, H=2, n=2, K=32, V=32, chunk=64),
    "packed": Case(T=300, H=2, K=128, V=128, N=7, chunk=64),
    "in pieces": Case(T=9000, H=2, K=128, V=128, chunk=64),
    "256 channels": Case(B=2, T=200, H=2, K=256, V=256, chunk=64),
    "odd sizes": Case(T=70, H=2, K=30, V=18, chunk=64),
}
SETTINGS = {"softplus": {}, "bounded": dict(lower_bound=-5.0), "no bias, 2 sigmoid": dict(dt_bias=None, allow_neg_eigval=True)}


def drawn(op, case, seed=0):
    """Raw streams in bfloat16, with the options that say so."""
    call = make(op, case, seed=seed)
    x = {n: t.detach() for n, t in call.x.items()}
    x |= {n: 3 * x[n] for n in NORMALIZED if n in x}
    x |= {n: torch.randn_like(x[n]) for n in ("g", "beta") if n in x}
    options = {n: True for n in op.defaults if n.startswith("use_")}
    if "g" in x:
        heads = x["g"].shape[2:]
        A_log, dt_bias = (torch.linspace(-1, 1, n, device=x["g"].device) for n in (heads[0], heads.numel()))
        options |= dict(A_log=A_log, dt_bias=dt_bias)
    where = dict(initial_state=call.S0.detach().float(), cu_seqlens=call.cu, output_final_state=True, chunk_size=64)
    return {n: t.bfloat16() for n, t in x.items()}, options, where


def said(op, options, settings):
    return {n: v for n, v in {**options, **settings}.items() if n in op.defaults}


def ready(op, x, options, dtype):
    return prologue(op.name, {n: t.to(dtype) for n, t in x.items()}, {**op.defaults, **options})


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", CASES)
@every
def test_raw_streams_are_prepared_by_their_formulas(op, case, setting):
    """No worse than twice the same kernels on streams made ready before, and a rounding."""
    x, options, where = drawn(op, CASES[case])
    options = said(op, options, SETTINGS[setting])
    got, plans = watched(lambda: op(x, **options, **where))
    assert [p["plan"] for p in plans] == ["raw"]
    assert all(torch.equal(a, b) for a, b in zip(got, op(x, **options, **where)))  # by its recipe
    plain = op(ready(op, x, options, torch.bfloat16), **where)
    wide = {**where, "initial_state": where["initial_state"].double()}
    true = op(ready(op, x, options, torch.float64), backend="torch", **wide)
    for mine, same, right in zip(got, plain, true):
        error = lambda t, right=right: (t.double() - right).norm()
        assert error(mine) <= 2 * (error(same) + torch.finfo(mine.dtype).eps * right.norm())


@every
def test_packed_rows_have_the_bits_of_dense_ones(op):
    x, options, where = drawn(op, replace(CASES["packed"], T=150, N=None))
    cu = torch.tensor([0, 0, 150], dtype=torch.int32, device=x["q"].device)
    first = torch.cat((torch.zeros_like(where["initial_state"]), where["initial_state"]))
    o, S = op(x, **options, **where)
    packed, last = op(x, **options, **{**where, "cu_seqlens": cu, "initial_state": first})
    assert torch.equal(o, packed) and torch.equal(S[0], last[1])


@pytest.mark.parametrize("case", ["dense, shared heads", "in pieces"])
@every
def test_calls_are_captured_and_follow_their_tensors(op, case):
    """Fifty with the same bits; then other numbers in the same memory, the activation's own too."""
    x, options, where = drawn(op, CASES[case])
    call = lambda: op(x, **options, **where)
    first = call()
    assert all(torch.equal(a, b) for _ in range(49) for a, b in zip(first, call()))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(first, made))
    y, other, _ = drawn(op, CASES[case], seed=1)
    for mine, theirs in zip(x.values(), y.values()):
        mine.copy_(theirs)
    for n in ("A_log", "dt_bias"):
        if n in options:
            options[n].copy_(other[n] * 0.5 - 0.2)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(call(), made)) and not torch.equal(first[0], made[0])
