"""Every member in every form against its definition: outputs, states and the gradients of all inputs."""

import pytest
import torch
from oracle import CASES, OP_FORMS, OPS, Case, check, definition, engine, honest, ids, make

from chunkwise.engine import problem

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
members = pytest.mark.parametrize(("op", "form"), OP_FORMS, ids=ids)


@members
@cases
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_matches_definition(op, form, case, dtype):
    call = make(op, case, dtype)
    truth = definition(call)
    check(engine(call, form=form), truth, honest(call, truth), form)


@pytest.mark.parametrize("op", OPS, ids=ids)
@pytest.mark.parametrize("N", [None, 4], ids=["dense", "packed"])
def test_large_states_go_forward_in_short_chunks_and_back_in_long_ones(op, N, monkeypatch):
    call = make(op, Case(T=170, H=1, n=2, K=4, V=3, N=N, chunk=64))
    monkeypatch.setattr(problem, "LARGE", 1)
    monkeypatch.setattr(problem, "PART", 1)  # as many parts as there can be: their states are handed from one pass to the other
    problem.record.cache_clear()
    truth = definition(call)
    try:
        check(engine(call), truth, honest(call, truth))
    finally:
        problem.record.cache_clear()
