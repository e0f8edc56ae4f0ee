"""The parallel form in Triton's interpreter: outputs, states and gradients against float64 by chunks."""

from dataclasses import replace

import pytest
import torch
from gate_case import double, draw, posed

from chunkwise.engine import chunk, plan_parallel_triton
from chunkwise.spec import Gate, Rule

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = {
    "none": (Gate.NONE, dict(B=2, T=70), {}),
    "a learned head gate, three value heads a head": (Gate.HEAD, dict(n=3, K=5, V=7), {}),
    "a fixed head gate": (Gate.HEAD, dict(), dict(fixed=True)),
    "scalar, several blocks of channels": (Gate.SCALAR, dict(K=40, V=70), {}),
    "scalar, packed": (Gate.SCALAR, dict(n=2), dict(cu=[0, 0, 1, 66, 67, 100])),
    "strong gates": (Gate.SCALAR, dict(strong=30.0), {}),
    "no states": (Gate.SCALAR, dict(), dict(states=False)),
    "bfloat16": (Gate.SCALAR, dict(T=150, dtype=torch.bfloat16), {}),
    "bfloat16, packed": (Gate.NONE, dict(T=150, dtype=torch.bfloat16), dict(cu=[0, 140, 150])),
    "float16, large numbers": (Gate.HEAD, dict(T=150, dtype=torch.float16), dict(large=3000.0)),
}


def passes(plan, p, x, S0, do, dST) -> dict[str, torch.Tensor]:
    o, ST, saved = plan.forward(p, x, S0, final=dST is not None, save=True)
    d, dS0 = plan.backward(p, x, S0, saved, do, dST)
    made = {"o": o, "ST": ST, "dS0": dS0, **{f"d{n}": t for n, t in d._asdict().items()}}
    return {n: t for n, t in made.items() if t is not None}


@pytest.mark.parametrize("case", CASES)
def test_rows_meet_all_before_them(case):
    gate, sizes, how = CASES[case]
    x = draw(gate, Rule.ADD, **{"B": 1, "T": 100, "H": 1, **sizes})
    cu = torch.tensor(how["cu"], dtype=torch.int32) if "cu" in how else None
    p = replace(posed(x, gate, Rule.ADD, cu=cu), fixed="fixed" in how)
    torch.manual_seed(1)
    do, (S0, dST) = torch.randn_like(x.v) * how.get("large", 1.0), torch.randn(2, p.N, p.HV, p.K, p.V)
    if not how.get("states", True):
        S0 = dST = None
    wide = [None if t is None else t.double() for t in (S0, do, dST)]
    truth = passes(chunk, replace(posed(double(x), gate, Rule.ADD, cu=cu), fixed=p.fixed), double(x), *wide)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        made = passes(plan_parallel_triton, p, x, S0, do, dST)
    finally:
        torch.use_deterministic_algorithms(False)
    assert made.keys() <= truth.keys() and ("ST" in made) == (dST is not None)
    for name, t in made.items():
        wrong, right = (t.double() - truth[name]).norm(), truth[name].norm()
        allowed = torch.finfo(x.q.dtype).eps * right
        if name == "dg":  # fp32 sums of what all T tokens read and write, most of which may cancel
            sums = ((double(x).q, "dq"), (double(x).k, "dk"))
            allowed += torch.finfo(torch.float32).eps * sum((y * truth[d]).sum(-1).norm() for y, d in sums) * p.T
        assert wrong <= 8 * allowed, f"{name}: {wrong / right:.2e}"
