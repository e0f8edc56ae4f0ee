"""The delta rules' chunk form on what layers hand over raw, in Triton's interpreter against the formulas: its hosts prepare it."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from test_recurrent import check

from chunkwise.engine import chunk, plan_triton
from chunkwise.engine.problem import problem
from chunkwise.engine.prologue import prologue
from chunkwise.engine.raw import handed
from chunkwise.spec import Gate, Rule, Streams, all_ops

RAW = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
CASES = {
    "ragged, shared heads": dict(T=40, n=2),
    "packed, empty ones": dict(T=40, cu=[0, 0, 17, 18, 18, 40]),
    "no bias, 2 sigmoid": dict(T=20, bias=False, allow_neg_eigval=True),
    "bounded gates": dict(T=36, lower_bound=-5.0),
    "strong gates": dict(T=40, strong=60.0),
    "several blocks of keys": dict(T=20, K=136, V=20),
    "keys of any size, and none": dict(T=36, loud=True),
    "float32": dict(T=36, dtype=torch.float32),
}


def draw(op, T, K, V, H, HV, strong, loud, dtype):
    r = torch.Generator().manual_seed(3)
    rand = lambda *s: torch.randn(1, T, *s, generator=r)
    x = dict(q=rand(H, K) * 3, k=rand(H, K) * 2, v=rand(HV, V), beta=rand(HV))
    if "p" in op.args:
        x["p"] = rand(H, K)
    if "g" in op.args:
        x["g"] = rand(*((HV, K) if op.gate is Gate.KEY else (HV,))) + strong
    if loud:
        x["q"][:, ::3] *= 1e4
        x["k"][:, 1::3] *= 1e-4
        x["k"][:, 5] = 0
    return {n: t.to(dtype) for n, t in x.items()}


FEW = ("packed, empty ones", "no bias, 2 sigmoid", "float32")  # where all is made ready by launches


@pytest.mark.parametrize(("name", "case"), [*product(("delta_rule", "gated_delta_rule"), CASES), *product(("kda", "comba"), FEW)])
def test_hosts_of_chunks_prepare_what_is_raw(name, case):
    op, sizes = all_ops()[name], dict(CASES[case])
    T, K, V, n = sizes.pop("T"), sizes.pop("K", 24), sizes.pop("V", 18), sizes.pop("n", 1)
    cu, bias, strong, loud = sizes.pop("cu", None), sizes.pop("bias", True), sizes.pop("strong", 0.0), sizes.pop("loud", False)
    H, HV, dtype = 2, 2 * n, sizes.pop("dtype", torch.bfloat16)
    cu = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    x = draw(op, T, K, V, H, HV, strong, loud, dtype)
    o = {**op.defaults, **{n: v for n, v in {**RAW, **sizes}.items() if n in op.defaults}}
    if "use_gate_in_kernel" in o:
        o["A_log"] = torch.linspace(-2, 1, HV)
        o["dt_bias"] = torch.linspace(-1, 1, x["g"].shape[2:].numel()) if bias else None
    elif "g" in x:
        x["g"] = -x["g"].abs()
    s, raw = handed(op, x, o)
    gate = op.gate if "g" in x else Gate.NONE
    torch.manual_seed(4)
    S0 = torch.randn(1 if cu is None else len(cu) - 1, HV, K, V)

    def posed(s):
        return problem(s, cu, cu, gate=gate, rule=Rule.DELTA, chunk=16, scale=K**-0.5, precision="ieee", exact=True)

    def formula(plan, dtype):
        y = prologue(op.name, {n: t.to(dtype) for n, t in x.items()}, o)
        s = op.lower(**y) if op.lower else Streams(**y)
        return plan.forward(posed(s), s, S0.to(torch.promote_types(dtype, torch.float32)), final=True, save=False)[:2]

    p = replace(posed(s), raw=raw)
    got = plan_triton.whole(p, s, S0, True)
    for mine, plain, true in zip(got, formula(plan_triton, dtype), formula(chunk, torch.float64)):
        check(mine, plain, true)
