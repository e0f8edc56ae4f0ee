"""float32 outputs and gradients by chunks side by side, in Triton's interpreter: what scans make of them, where they make them."""

from dataclasses import replace

import pytest
import torch
from gate_case import double, draw, posed

from chunkwise.engine import chunk, plan_triton, stages_triton
from chunkwise.spec import Gate, Rule

pytestmark = pytest.mark.filterwarnings("ignore")


def passes(plan, p, x, S0, do, dST) -> dict[str, torch.Tensor]:
    o, ST, saved = plan.forward(p, x, S0, final=True, save=True)
    d, dS0 = plan.backward(p, x, S0, saved, do, dST)
    return {"o": o, "ST": ST, "dS0": dS0, **{f"d{n}": t for n, t in d._asdict().items() if t is not None}}


@pytest.mark.parametrize("cu", [None, [0, 0, 1, 66, 130]], ids=["dense", "packed"])
@pytest.mark.parametrize("gate, fixed", [(Gate.NONE, False), (Gate.HEAD, True), (Gate.SCALAR, False)], ids=["none", "fixed head", "scalar"])
def test_outputs_by_chunks_are_those_of_scans(monkeypatch, gate, fixed, cu):
    x = draw(gate, Rule.ADD, B=1 if cu else 2, T=130, H=1, n=2, K=40, V=24)
    cu = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    p = replace(posed(x, gate, Rule.ADD, cu=cu), fixed=fixed)
    torch.manual_seed(1)
    do, S0, dST = torch.randn_like(x.v), *torch.randn(2, p.N, p.HV, p.K, p.V)
    truth = passes(chunk, replace(posed(double(x), gate, Rule.ADD, cu=cu), fixed=fixed), double(x), *(t.double() for t in (S0, do, dST)))
    made, eps = [], torch.finfo(torch.float32).eps
    for apart in (True, False):
        monkeypatch.setattr(stages_triton, "by_chunks", lambda p, back=False, apart=apart: apart)
        torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
        try:
            made.append(passes(plan_triton, p, x, S0, do, dST))
        finally:
            torch.use_deterministic_algorithms(False)
    for name in made[0]:
        errors = [(d[name].double() - truth[name]).norm() / truth[name].norm() for d in made]
        assert errors[0] <= 2 * (errors[1] + eps), f"{name}: {errors[0]:.2e}, by scans {errors[1]:.2e}"
