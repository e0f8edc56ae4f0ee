"""What the modules fuse: norms of sums and of groups, gates, residuals of convolutions, causal_conv1d's conventions, steps on pools."""

import doctest
from pathlib import Path

import pytest
import torch
from nn_agreement import agree
from torch.nn import functional as F

from chunkwise.nn import (
    GatedLayerNorm,
    GatedMLP,
    GroupNorm,
    LayerNorm,
    RMSNorm,
    ShortConvolution,
    add_layer_norm,
    add_rms_norm,
    causal_conv1d,
    causal_conv1d_update,
    glu,
    l2norm,
    layer_norm,
    rms_norm,
    rotary,
    swiglu,
)


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_layer_and_group_norms_are_pytorchs():
    x, w, b = draw(5, 7, 12), draw(12, seed=1), draw(12, seed=2)
    agree({"y": layer_norm(x, w, b)}, {"y": F.layer_norm(x, (12,), w, b)})
    agree({"y": layer_norm(x.flatten(0, 1), w, b, groups=3)}, {"y": F.group_norm(x.flatten(0, 1), 3, w, b)})
    agree({"y": rms_norm(x, w, groups=1)}, {"y": F.rms_norm(x, (12,), w, 1e-5)})
    norm = GroupNorm(3, 12, bias=True, rms=True).double()
    with torch.no_grad():
        norm.weight.copy_(w), norm.bias.copy_(b)
    parts = [F.rms_norm(p, (4,), None, 1e-5) for p in x.chunk(3, -1)]
    agree({"y": norm(x)}, {"y": torch.cat(parts, -1) * w + b})
    assert set(LayerNorm(12, bias=True).state_dict()) == {"weight", "bias"} and set(LayerNorm(12).state_dict()) == {"weight"}


@pytest.mark.parametrize("add, plain", [(add_rms_norm, rms_norm), (add_layer_norm, layer_norm)])
def test_norms_of_a_sum_are_norms_of_the_sum_to_the_bit(add, plain):
    x, r, w = (draw(*n, dtype=torch.bfloat16, seed=i) for i, n in enumerate([(3, 8), (3, 8), (8,)]))
    y, h = add(x, r, w)
    assert torch.equal(h, x + r) and torch.equal(y, plain(x + r, w))
    wide, sum_ = add(x, r.float(), w)
    assert wide.dtype == sum_.dtype == torch.float32 and torch.equal(sum_, x + r.float())
    norm = RMSNorm(8)
    assert all(torch.equal(a, b) for a, b in zip(norm.add(x, r), add_rms_norm(x, r, norm.weight)))


def test_a_gate_multiplies_the_norm():
    x, g = draw(4, 6), draw(4, 6, seed=1)
    norm = GatedLayerNorm(6, activation="sigmoid").double()
    agree({"y": norm(x, g)}, {"y": F.layer_norm(x, (6,)) * torch.sigmoid(g)})
    assert torch.equal(rms_norm(x, gate=g, activation="swish"), rms_norm(x, gate=g))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: rms_norm(x, draw(5)), ValueError, "weight must be"),
        (lambda x: layer_norm(x, bias=draw(5)), ValueError, "bias must be"),
        (lambda x: rms_norm(x, groups=4), ValueError, "groups must divide"),
        (lambda x: rms_norm(x, eps=-1e-6), ValueError, "eps must be at least 0, got -1e-06"),
        (lambda x: l2norm(x, float("nan")), ValueError, "l2norm: eps must be at least 0, got nan"),
        (lambda x: rms_norm(x, gate=x[:1]), ValueError, "gate must have"),
        (lambda x: rms_norm(x, gate=x, activation="gelu"), ValueError, "activation must be"),
        (lambda x: add_rms_norm(x, x[:1]), ValueError, "residual must have"),
        (lambda x: add_rms_norm(x, x.long()), TypeError, "residual must be a floating"),
        (lambda x: rms_norm(x.long()), TypeError, "x must be a floating"),
        (lambda x: GroupNorm(4, 6), ValueError, "groups must divide"),
        (lambda x: glu(x, x[:1]), ValueError, "b must be like a"),
        (lambda x: glu(x, x, "mish"), ValueError, "activation must be"),
        (lambda x: rotary(x, torch.arange(3)[None]), ValueError, "x must be"),
        (lambda x: rotary(x[None, None], torch.zeros(1, 1)), TypeError, "positions must be a tensor of integers"),
        (lambda x: rotary(x[None, None], torch.arange(1)[None], -1.0), ValueError, "theta must be"),
    ],
)
def test_modules_refuse_by_name(call, error, says):
    with pytest.raises(error, match=says):
        call(draw(3, 6))


def test_interleaved_pairs_turn_as_halves_do():
    x, at = draw(2, 5, 3, 8), torch.arange(5)[None]
    apart = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    turned = rotary(x, at, interleaved=True)
    assert torch.equal(torch.cat([turned[..., ::2], turned[..., 1::2]], -1), rotary(apart, at))


def test_gated_units_are_their_definition():
    a, b = draw(3, 5), draw(3, 5, seed=1)
    assert (
        torch.equal(swiglu(a, b), F.silu(a) * b) and torch.equal(glu(a, b, "gelu"), F.gelu(a) * b) and torch.equal(glu(a, b, None), a * b)
    )
    mlp = GatedMLP(6, 10).double()
    x = draw(2, 6)
    assert torch.equal(mlp(x), mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x))))


def test_a_residual_is_added_after_the_activation():
    x, w, r = draw(2, 7, 5), draw(5, 3, seed=1), draw(2, 7, 5, seed=2)
    agree({"y": causal_conv1d(x, w, activation="silu", residual=r)[0]}, {"y": causal_conv1d(x, w, activation="silu")[0] + r})


def test_runs_of_numbers_are_packed_sequences():
    x, w, b = (draw(*n, seed=i).requires_grad_() for i, n in enumerate([(2, 5, 9), (5, 4), (5,)]))  # [B, D, T]
    index = torch.tensor([[0, 0, 1, 1, 1, 1, 1, -1, -1], [5, 7, 7, 7, 7, 7, 2, 2, 2]], dtype=torch.int32)
    y, _ = causal_conv1d(x, w, b, activation="silu", seq_idx=index, channels_first=True)
    rows = x.transpose(1, 2).reshape(1, 18, 5)
    packed, _ = causal_conv1d(rows, w, b, activation="silu", cu_seqlens=torch.tensor([0, 2, 7, 9, 10, 15, 18]))
    want = packed.view(2, 9, 5).masked_fill((index < 0)[..., None], 0).transpose(1, 2)
    u = draw(2, 5, 9, seed=8)
    got, truth = ({"y": o, **{f"d{i}": g for i, g in enumerate(torch.autograd.grad(o, (x, w, b), u))}} for o in (y, want))
    agree(got, truth, {n: t * (1 + 4 * torch.finfo(t.dtype).eps) for n, t in truth.items()})
    assert y.shape == x.shape and not y[0, :, 7:].any()


@pytest.mark.parametrize("S", [3, 4])
def test_steps_on_a_pool_are_the_whole_and_skip_negative_slots(S):
    conv = ShortConvolution(32, 4, bias=True).requires_grad_(False)
    x = draw(3, 9, 32, dtype=torch.float32)
    whole, last = conv(x, None, True)
    pool = torch.full((5, 32, S), float("nan"))  # junk in a slot is nobody's business until the slot is begun
    pool[[4, 0, 2]] = 0
    step = lambda x, index: causal_conv1d_update(x, pool, conv.weight[:, 0], conv.bias, "silu", index)
    index = torch.tensor([4, 0, 2])
    made = torch.cat([step(x[:, :1], index), step(x[:, 1:6], index), step(x[:, 6], index)[:, None], step(x[:, 7:], index)], 1)
    assert torch.equal(made, whole) and torch.equal(pool[index][..., S - 3 :], last) and pool[[1, 3]].isnan().all()
    before = pool.clone()
    partly = step(x[:, 0], torch.tensor([-1, 0, -1]))
    assert not partly[[0, 2]].any() and partly[1].any() and torch.equal(pool[[2, 4]], before[[2, 4]])
    torch.library.opcheck(torch.ops.chunkwise.causal_conv1d_update.default, (x, last.clone(), conv.weight[:, 0], None, None, "silu"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(x=draw(3)), "x must be"),
        (dict(weight=draw(4, 4)), "weight must be"),
        (dict(bias=draw(4)), "bias must be"),
        (dict(state=draw(3, 5, 2)), "state must be"),
        (dict(state=draw(4, 5, 3)), "state must hold"),
        (dict(state_indices=torch.zeros(2, dtype=torch.int64)), "state_indices must be"),
        (dict(weight=draw(5, 4).requires_grad_()), "no gradient"),
        (dict(activation="mish"), "activation must be"),
    ],
)
def test_steps_refuse_by_name(change, says):
    with pytest.raises(ValueError, match=says):
        causal_conv1d_update(**{"x": draw(3, 5), "state": draw(3, 5, 3), "weight": draw(5, 4), **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(residual=draw(1, 16, 4)), "residual must be"),
        (dict(seq_idx=torch.zeros(1, 15, dtype=torch.int32)), "seq_idx must be"),
        (dict(seq_idx=torch.zeros(1, 16, dtype=torch.int32), output_final_state=True), "no states"),
    ],
)
def test_the_convolutions_other_arguments_are_refused_by_name(change, says):
    with pytest.raises(ValueError, match=says):
        causal_conv1d(**{"x": draw(1, 16, 5), "weight": draw(5, 4), **change})


def test_the_documents_examples_run():
    torch.manual_seed(0)
    failed, tried = doctest.testfile(str(Path(__file__).parents[1] / "docs" / "modules.md"), module_relative=False)
    assert tried and not failed


@pytest.mark.parametrize("T", [0, 1, 2, 5])
def test_a_convolution_of_few_tokens_or_none_reads_nothing_unwritten(T):
    x, state, w = (torch.randn(s).requires_grad_() for s in ((2, T, 6), (2, 6, 3), (6, 4)))
    torch.use_deterministic_algorithms(True)  # what is not written holds NaN
    try:
        y, last = causal_conv1d(x, w, initial_state=state, activation="silu", output_final_state=True)
        (y.sum() + last.sum()).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(t.grad.isnan().any() for t in (x, state, w)) and (T > 0 or (state.grad == 1).all())
