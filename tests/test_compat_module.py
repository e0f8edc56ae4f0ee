"""causal_conv1d's functions and fla's modules against what they are defined to compute."""

import doctest
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nn_agreement import agree
from torch.nn import functional as F

from chunkwise.compat import fla_index as index
from chunkwise.compat import fla_module as module
from chunkwise.compat import table
from chunkwise.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

B, D, T, W = 2, 6, 17, 4
DOCS = Path(__file__).parents[1] / "docs" / "compat.md"


def drawn(dtype=torch.float32, **sizes):
    torch.manual_seed(0)
    x = torch.randn(B, T, D, dtype=dtype).transpose(1, 2)  # [B, D, T], channels last, as transformers hands it over
    return x, torch.randn(D, W, dtype=dtype), torch.randn(D, dtype=dtype)


def convolved(x, weight, bias, before=None):
    before = x.new_zeros(x.shape[0], D, W - 1) if before is None else before
    return F.silu(F.conv1d(torch.cat([before, x], -1), weight[:, None], bias, groups=D))


def right(got, compute, *inputs):
    """Within the error that the definition itself makes in float32."""
    agree({"y": got}, {"y": compute(*(None if t is None else t.double() for t in inputs))}, {"y": compute(*inputs)})


def test_convolution_is_the_depthwise_causal_one():
    x, weight, bias = drawn()
    right(causal_conv1d_fn(x, weight, bias, activation="silu"), convolved, x, weight, bias)
    before = torch.randn(B, D, W - 1)
    y, state = causal_conv1d_fn(x, weight, bias, initial_states=before, return_final_states=True, activation="swish")
    right(y, convolved, x, weight, bias, before)
    assert torch.equal(state, x[:, :, -(W - 1) :])


@pytest.mark.parametrize("by", ["seq_idx", "cu_seq_lens_q"])
def test_documents_of_a_row_are_convolved_alone_and_so_are_gradients(by):
    x, weight, bias = (t.requires_grad_() for t in drawn())
    ends = [0, 2, 3, 11, T]
    document = torch.searchsorted(torch.tensor(ends[1:]), torch.arange(T), right=True).int()
    weights = torch.randn(1, D, T)
    given = {"seq_idx": document[None]} if by == "seq_idx" else {"cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32)}

    def results(y, *leaves):
        grads = torch.autograd.grad((y * weights.to(y.dtype)).sum(), leaves)
        return {"y": y.detach()} | {f"d{i}": g for i, g in enumerate(grads)}

    def apart(*leaves):
        row, w, b = leaves
        return results(torch.cat([convolved(row[:1, :, a:e], w, b) for a, e in zip(ends, ends[1:])], -1), *leaves)

    got = results(causal_conv1d_fn(x[:1], weight, bias, activation="silu", **given), x, weight, bias)
    agree(got, apart(*(t.detach().double().requires_grad_() for t in (x, weight, bias))), apart(x, weight, bias))


def test_documents_may_lie_differently_in_every_row():
    x, weight, bias = drawn()
    document = torch.stack([torch.arange(T) // 5, torch.arange(T) // 8]).int()
    y = causal_conv1d_fn(x, weight, bias, document)
    for row, size in ((0, 5), (1, 8)):
        for a in range(0, T, size):
            torch.testing.assert_close(y[row : row + 1, :, a : a + size], causal_conv1d_fn(x[row : row + 1, :, a : a + size], weight, bias))


@pytest.mark.parametrize("L", [W - 1, W, W + 3])
def test_token_by_token_equals_at_once_and_moves_the_state_in_place(L):
    x, weight, bias = drawn()
    whole, state = causal_conv1d_fn(x, weight, bias, activation="silu"), torch.zeros(B, D, L)
    kept = state.data_ptr()
    parts = [causal_conv1d_update(x[:, :, t], state, weight, bias, "silu")[..., None] for t in range(12)]
    parts.append(causal_conv1d_update(x[:, :, 12:], state, weight, bias, "silu"))
    torch.testing.assert_close(torch.cat(parts, -1), whole)
    assert state.data_ptr() == kept and torch.equal(state, x[:, :, -L:])


def test_pool_rows_are_updated_by_index():
    x, weight, _ = drawn()
    pool, rows = torch.randn(5, D, W), torch.tensor([3, 1], dtype=torch.int32)
    alone = pool[[3, 1]].clone()
    y = causal_conv1d_update(x[:, :, 0], alone, weight)
    before = pool.clone()
    assert torch.equal(causal_conv1d_update(x[:, :, 0], pool, weight, conv_state_indices=rows), y)
    assert torch.equal(pool[[3, 1]], alone) and torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda x, w: causal_conv1d_fn(x[0], w), r"x must be \[B, D, T\]"),
        (lambda x, w: causal_conv1d_fn(x, w, seq_idx=torch.zeros(B, 3).int()), r"seq_idx must be \[B, T\] = \[2, 17\]"),
        (lambda x, w: causal_conv1d_fn(x, w, seq_idx=torch.zeros(B, T).int(), return_final_states=True), "no states beside it"),
        (lambda x, w: causal_conv1d_update(x, torch.zeros(B, D, 2), w), r">= W - 1 = 3"),
        (lambda x, w: causal_conv1d_update(x, torch.zeros(B, D, 4), w, cache_seqlens=torch.zeros(B)), "cache_seqlens"),
        (lambda x, w: module.causal_conv1d(x, w, cp_context=object()), "context parallelism"),
        (lambda x, w: module.FusedRMSNormGated(4, activation="relu"), "swish"),
        (lambda x, w: module.fused_kda_gate(x), "A_log"),
        (lambda x, w: module.FusedCrossEntropyLoss(return_z_loss=True), "return_z_loss"),
        (lambda x, w: module.FusedLinearCrossEntropyLoss(use_l2warp=True), "use_l2warp"),
        (lambda x, w: index.unpad_input(x, (x,), torch.ones(B, D), 3), "q_len must be 6"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(call, said):
    x, weight, _ = drawn()
    with pytest.raises(ValueError, match=said):
        call(x, weight)


def test_short_convolution_of_fla_keeps_w_inputs_and_carries_them():
    x, layer = drawn()[0].mT, module.ShortConvolution(D, W)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {"weight": (D, 1, W)}
    whole, state = layer(x, output_final_state=True)
    right(whole, lambda x, w: convolved(x.mT, w, None).mT, x.detach(), layer.weight.detach()[:, 0])
    assert state.shape == (B, D, W) and torch.equal(state, x.mT[:, :, -W:])
    with torch.no_grad():
        y, cache = layer(x[:, :7], output_final_state=True)
        kept, parts = cache.data_ptr(), [y]
        for t in range(7, T):
            y, cache = layer(x[:, t : t + 1], cache=cache, output_final_state=True)
            parts.append(y)
    assert cache.data_ptr() == kept
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    y, cache = module.causal_conv1d_update(x[:, :1], torch.zeros(B, D, W), weight=layer.weight[:, 0], residual=x[:, :1])
    torch.testing.assert_close(y, x[:, :1] * layer.weight[:, 0, -1] + x[:, :1])


def test_norms_of_fla():
    x, g, residual = torch.randn(3, 5, D), torch.randn(3, 5, D), torch.randn(3, 5, D)
    norm = module.FusedRMSNormGated(D, eps=1e-6, activation="sigmoid")
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)

    def defined(x, g, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight * g.sigmoid()

    right(norm(x, g).detach(), defined, x, g, norm.weight.detach())
    y, total = norm(x, g, residual=residual, prenorm=True)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, norm(x + residual, g))
    half = norm(x.bfloat16(), g.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, norm(x.bfloat16().float(), g.bfloat16().float()).bfloat16())
    assert module.RMSNorm(D, elementwise_affine=False).weight is None
    right(module.l2norm(x), lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), x)


def test_losses_of_fla():
    x, weight, target = torch.randn(7, D), torch.randn(9, D), torch.tensor([0, 3, -100, 8, 2, 2, 5])
    want = F.cross_entropy(x @ weight.t(), target, label_smoothing=0.1)
    torch.testing.assert_close(module.FusedLinearCrossEntropyLoss(label_smoothing=0.1)(x, target, weight), want)
    torch.testing.assert_close(module.FusedCrossEntropyLoss(label_smoothing=0.1)(x @ weight.t(), target), want)
    capped = 5 * torch.tanh(x @ weight.t() / 5)
    got = module.FusedCrossEntropyLoss(reduction="sum", logit_softcapping=5.0, lse_square_scale=0.1)(x @ weight.t(), target)
    real = target >= 0
    torch.testing.assert_close(got, F.cross_entropy(capped, target, reduction="sum") + 0.1 * capped.logsumexp(-1)[real].square().sum())


def test_kda_gate_takes_its_newer_and_older_signature():
    H, K = 2, 3
    g, A_log, bias = torch.randn(1, 5, H, K), torch.randn(H), torch.randn(H * K)
    want = -A_log.exp()[:, None] * F.softplus(g + bias.view(H, K))
    torch.testing.assert_close(module.fused_kda_gate(g, A_log, bias), want)
    torch.testing.assert_close(module.fused_kda_gate(g.flatten(-2), A_log, K, g_bias=bias), want)
    torch.testing.assert_close(module.fused_kda_gate(g, lower_bound=-5.0), -5 * g.sigmoid())
    torch.testing.assert_close(module.fused_gdn_gate(g[..., 0], A_log), -A_log.exp() * F.softplus(g[..., 0]))


def test_index_arithmetic():
    cu = torch.tensor([0, 5, 5, 70, 71], dtype=torch.int32)
    assert index.prepare_lens(cu).tolist() == [5, 0, 65, 1]
    assert index.prepare_chunk_offsets(cu, 64).tolist() == [0, 1, 1, 3, 4]
    for host in (None, cu):
        assert index.prepare_chunk_indices(cu, 64, host).tolist() == [[0, 0], [2, 0], [2, 1], [3, 0]]
        assert index.prepare_position_ids(cu, host).tolist() == [*range(5), *range(65), 0]
        assert index.get_max_num_splits(cu, 64, host) == 2
    assert index.prepare_sequence_ids(cu)[[0, 4, 5, 69, 70]].tolist() == [0, 0, 2, 2, 3]
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    assert index.prepare_cu_seqlens_from_mask(mask).tolist() == [0, 2, 3]
    x = torch.arange(6.0).view(2, 3, 1)
    kept, (states,), where, (cu_q, cu_k), longest = index.unpad_input(x, (x,), mask, 3)
    assert kept.flatten().tolist() == [1, 2, 3] == states.flatten().tolist() and cu_q.tolist() == cu_k.tolist() == [0, 2, 3]
    assert longest == (2, 2) and torch.equal(index.pad_input(kept, where, 2, 3), x * mask[..., None])
    one, _, where, (cu_q, _), longest = index.unpad_input(x[:, :1], (x,), mask, 1)
    assert one.shape == (2, 1) and where.tolist() == [0, 1] and cu_q.tolist() == [0, 1, 2] and longest == (1, 2)


def test_the_documented_surface_is_the_one_installed():
    text = DOCS.read_text()
    assert table.update(text) == text, "python -m chunkwise.compat.table docs/compat.md"


def test_examples_of_the_documentation_run():
    pytest.importorskip("transformers", reason="transformers is not installed")
    if importlib.util.find_spec("fla") is not None:
        pytest.skip("fla is installed: the page shows what happens where it is not")
    assert len(doctest.DocTestParser().get_examples(DOCS.read_text())) > 10
    page = [sys.executable, "-m", "doctest", str(DOCS)]  # a process of its own: what is patched depends on what is imported
    assert subprocess.run(page, capture_output=True, text=True, timeout=300).stdout == ""
