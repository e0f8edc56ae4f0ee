"""The norms' kernels in Triton's interpreter, forward and backward, against their form in PyTorch."""

import pytest
import torch
from module_case import check, draw

from chunkwise.nn import add_layer_norm, add_rms_norm, l2norm, layer_norm, norm, rms_norm

SIXTEEN = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("plain", [rms_norm, layer_norm])
def test_gated_norms(monkeypatch, plain, activation, dtype):
    x, gate, w, b = draw(2, 5, 3, 20, dtype=dtype), draw(2, 5, 3, 20, dtype=dtype, seed=1), draw(20, seed=2), draw(20, seed=3)
    check(monkeypatch, [norm], lambda x, g, w, b: plain(x, w, b, gate=g, activation=activation), x, gate, w, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("add", [add_rms_norm, add_layer_norm])
def test_norms_of_a_sum_hand_the_sum_on(monkeypatch, add, dtype):
    x, r, w = draw(3, 7, 24, dtype=dtype), draw(3, 7, 24, dtype=dtype, seed=1), draw(24, dtype=dtype, seed=2)
    check(monkeypatch, [norm], lambda x, r, w: add(x, r, w), x, r, w)


@pytest.mark.parametrize("groups", [1, 3])
def test_norms_of_groups_and_without_weights(monkeypatch, groups):
    x, w, b = draw(9, 30), draw(30, seed=1), draw(30, seed=2)
    check(monkeypatch, [norm], lambda x, w, b: layer_norm(x, w, b, groups=groups), x, w, b)
    check(monkeypatch, [norm], lambda x: rms_norm(x, groups=groups), x)
    check(monkeypatch, [norm], l2norm, x)


def test_many_rows_share_programs_and_strided_rows_are_read_in_place(monkeypatch):
    monkeypatch.setattr(__import__("chunkwise.nn.launch.norm", fromlist=["x"]), "PROGRAMS", 3)
    whole = draw(40, 3, 16)
    parts = lambda whole, w: rms_norm(whole[:, 1], w, gate=whole[:, 2])
    check(monkeypatch, [norm], parts, whole, draw(16, seed=1))
    check(monkeypatch, [norm], lambda x, w: rms_norm(x[:, :-1], w), draw(2, 8, 16), draw(16, seed=1))  # tokens, not heads
    check(monkeypatch, [norm], lambda x: rms_norm(x.transpose(0, 1)), draw(16, 9))


def test_empty_inputs_and_zero_rows(monkeypatch):
    check(monkeypatch, [norm], lambda x, w: rms_norm(x, w, gate=x), draw(0, 8), draw(8))
    check(monkeypatch, [norm], l2norm, torch.zeros(3, 8))


def test_sixteen_bits_beside_a_wide_residual(monkeypatch):
    x, r, w = draw(3, 7, 24, dtype=torch.bfloat16), draw(3, 7, 24, seed=1), draw(24, seed=2)
    check(monkeypatch, [norm], lambda x, r, w: add_rms_norm(x, r, w), x, r, w)
    module = norm.RMSNorm(24)

    def narrow(x, r):
        with torch.autocast("cpu", torch.bfloat16):
            return module.add(x, r)

    check(monkeypatch, [norm], narrow, x, r)
    assert [t.dtype for t in narrow(x, r)] == [torch.bfloat16, torch.float32]


def test_heads_of_a_slice_are_read_in_place(monkeypatch):
    monkeypatch.setattr(__import__("chunkwise.nn.launch.norm", fromlist=["x"]), "PROGRAMS", 6)
    heads = lambda whole: whole[..., 4:34].unflatten(-1, (3, 10))
    check(monkeypatch, [norm], lambda whole: l2norm(heads(whole)), draw(2, 7, 40))
    x, w, b = draw(2, 70, 3, 10, seed=1), draw(10, seed=2), draw(10, seed=3)
    check(monkeypatch, [norm], lambda x, whole, w, b: layer_norm(x, w, b, gate=heads(whole)), x, draw(2, 70, 40), w, b)


def test_a_norm_compiles_for_training_and_for_inference(monkeypatch):
    monkeypatch.setattr(norm, "uses_kernels", lambda x: True)
    x, r, w = (t.requires_grad_() for t in (draw(3, 7, 24), draw(3, 7, 24, seed=1), draw(24, seed=2)))
    compiled = torch.compile(add_rms_norm, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(x, r, w), add_rms_norm(x, r, w)))
    with torch.no_grad():
        assert all(map(torch.equal, compiled(x, r, w), add_rms_norm(x, r, w)))
