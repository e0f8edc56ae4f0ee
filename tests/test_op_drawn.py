"""Every member on shapes, packings and gates that nobody chose: drawn by hypothesis, the same ones in every run."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import DEVICE, OPS, Case, check, definition, engine, honest, ids, make

FEW = settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
size = st.integers(2, 9)  # one channel is a case of its own: what it cancels is all there is
lengths = st.lists(st.sampled_from([0, 0, 1, 2, 5, 15, 16, 17, 33]), min_size=1, max_size=5).filter(any)  # of packed sequences
gates = st.sampled_from([0.0, 1e-4, 0.1, 1.0, 30.0, 1e4])


@st.composite
def calls(draw, op):
    """A call of a member: dense or packed, its log decays of several sizes side by side, now and then a reset."""
    packed = draw(st.none() | lengths)
    rows = dict(B=draw(st.integers(1, 3)), T=draw(st.integers(1, 70))) if packed is None else dict(T=sum(packed))
    heads = dict(H=draw(st.integers(1, 2)), n=draw(st.integers(1, 4)), K=draw(size), V=draw(size))
    case = Case(**rows, **heads, chunk=draw(st.sampled_from([16, 32, 64])))
    weak, strong, share, reset = draw(gates), draw(gates), draw(st.floats(0, 1)), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 99)))

    def log_decay(g):
        g = g * torch.where(torch.rand_like(g) < share, weak, strong)
        return torch.where(torch.rand_like(g) < 0.05, -torch.inf, g) if reset else g

    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    call = make(op, case, dtype, draw(st.integers(0, 99)), log_decay=log_decay)
    if packed is not None:
        call.cu = torch.tensor([0, *packed], device=DEVICE).cumsum(0)
        call.S0 = op.draw_state(case.sizes, len(packed)).to(call.S0).requires_grad_()
    return call, draw(st.sampled_from([f.value for f in op.forms]))


@pytest.mark.parametrize("op", OPS, ids=ids)
def test_whatever_is_drawn_is_right(op):
    @FEW
    @given(calls(op))
    def right(drawn):
        call, form = drawn
        truth = definition(call)
        check(engine(call, form=form), truth, honest(call, truth), form)

    right()
