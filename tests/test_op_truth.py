"""Every member in every form against its definition: outputs, states and the gradients of all inputs."""

import pytest
import torch
from oracle import CASES, OP_FORMS, check, definition, engine, honest, ids, make

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
members = pytest.mark.parametrize(("op", "form"), OP_FORMS, ids=ids)


@members
@cases
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_matches_definition(op, form, case, dtype):
    call = make(op, case, dtype)
    truth = definition(call)
    check(engine(call, form=form), truth, honest(call, truth), form)
