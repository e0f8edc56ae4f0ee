"""The kernels of raw gates and write strengths in Triton's interpreter, forward and backward, against their form in PyTorch."""

import pytest
import torch
from module_case import check, draw

from chunkwise.nn import gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bound", [None, -5.0], ids=["softplus", "bounded"])
@pytest.mark.parametrize("axes", [(3,), (3, 20)], ids=["a head", "a channel"])
def test_raw_gates(monkeypatch, axes, bound, dtype):
    x, A, bias = 8 * draw(2, 9, *axes, dtype=dtype), draw(3, seed=1), draw(torch.Size(axes).numel(), seed=2)
    check(monkeypatch, [gate], lambda x, A, bias: gate.log_decay(x, A, bias, bound), x, A, bias)
    check(monkeypatch, [gate], lambda x, A: gate.log_decay(x, A, None, bound), x, A)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_raw_write_strengths(monkeypatch, factor):
    check(monkeypatch, [gate], lambda x: gate.write_strength(x, factor), 8 * draw(2, 9, 3))


def test_gates_that_hardly_open_keep_their_digits(monkeypatch):
    x = torch.linspace(-30, 30, 61)[None, :, None]
    check(monkeypatch, [gate], lambda x, A: gate.log_decay(x, A), x, torch.zeros(1))
    truth = gate.log_decay(x.double(), torch.zeros(1, dtype=torch.float64))
    monkeypatch.setattr(gate, "uses_kernels", lambda x: True)
    assert ((gate.log_decay(x, torch.zeros(1)) - truth) / truth).abs().max() < 4 * torch.finfo(torch.float32).eps


def test_many_rows_share_programs_and_slices_are_read_in_place(monkeypatch):
    monkeypatch.setattr(__import__("chunkwise.nn.launch.gate", fromlist=["x"]), "PROGRAMS", 3)
    whole, A, bias = draw(4, 90, 40), draw(3, seed=1), draw(3 * 7, seed=2)
    part = lambda whole, A, bias: gate.log_decay(whole[..., 5:26].unflatten(-1, (3, 7)), A, bias)
    check(monkeypatch, [gate], part, whole, A, bias)
    monkeypatch.setattr(__import__("chunkwise.nn.launch.gate", fromlist=["x"]), "WIDEST", 8)
    check(monkeypatch, [gate], part, whole, A, bias)


def test_no_tokens_and_no_sequences(monkeypatch):
    check(monkeypatch, [gate], gate.log_decay, draw(2, 0, 3), draw(3))
    check(monkeypatch, [gate], gate.write_strength, draw(0, 5, 3))


def test_gradients_are_tensors_of_their_own():
    """Compiled code takes for granted that what an operator returns begins where memory of its own does."""
    from chunkwise.nn.launch import conv, gate

    x, p = torch.randn(1, 5, 6), torch.zeros(6)
    made = gate.backward(x, p, p, torch.randn(1, 5, 6), "softplus", 0.0)
    made += conv.backward(x, torch.randn(6, 4), p, None, None, None, (x,), None, True)[:3]
    assert all(t.storage_offset() == 0 for t in made)
