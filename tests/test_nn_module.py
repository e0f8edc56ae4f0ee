"""The modules around the operator: convolution, norms, rotary positions, packing."""

import itertools

import pytest
import torch
from nn_agreement import agree
from torch.nn import functional as F

from chunkwise.nn import GatedMLP, GatedRMSNorm, RMSNorm, ShortConvolution, causal_conv1d, l2norm, plan_packing, rotary

OFFSETS = torch.tensor([0, 0, 1, 4, 4, 13, 16])  # empty, one token, shorter than a window, longer


CHANNELS = 32  # whole vector registers: PyTorch rounds the last few elements of a tensor otherwise


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_conv(x, weight, bias, state, activation):
    """The definition, by PyTorch's own convolution over the state and the input."""
    D, W = weight.shape
    rows = torch.cat([state, x.transpose(1, 2)], 2)
    y = F.conv1d(rows, weight.unsqueeze(1), bias, groups=D) if x.shape[1] else x.transpose(1, 2)
    y = F.silu(y) if activation else y
    return y.transpose(1, 2), rows[:, :, rows.shape[2] - (W - 1) :]


@pytest.mark.parametrize(("T", "W"), list(itertools.product([0, 1, 2, 3, 17], [1, 2, 4])))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_convolution_is_its_definition(T, W, dtype):
    x, w, b, s = (draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(2, T, 6), (6, W), (6,), (2, 6, W - 1)]))
    y, last = causal_conv1d(x, w, b, s, True, "silu")
    want, state = plain_conv(x.double(), w.double(), b.double(), s.double(), True)
    own, _ = plain_conv(x.float(), w.float(), b.float(), s.float(), True)
    honest = {"y": own.to(dtype)} if dtype != torch.float64 else None
    agree({"y": y}, {"y": want}, honest)
    assert y.dtype == dtype and torch.equal(last.double(), state)


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_convolution_is_separate_convolutions_to_the_bit(W, offsets_dtype):
    shapes = [(1, 16, CHANNELS), (CHANNELS, W), (6, CHANNELS, W - 1)]
    x, w, s = (draw(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes))
    y, last = causal_conv1d(x, w, None, s, True, "silu", OFFSETS.to(offsets_dtype))
    for n, (a, b) in enumerate(itertools.pairwise(OFFSETS.tolist())):
        alone, state = causal_conv1d(x[:, a:b], w, None, s[n : n + 1], True, "silu")
        assert torch.equal(y[:, a:b], alone) and torch.equal(last[n : n + 1], state)


def test_packed_convolution_never_reads_another_document():
    conv = ShortConvolution(CHANNELS)
    x = draw(1, 16, CHANNELS, dtype=torch.float32)
    y, last = conv(x, None, True, OFFSETS)
    spoiled = x.clone()
    spoiled[:, 1:4] = float("nan")
    z, state = conv(spoiled, None, True, OFFSETS)
    others = torch.tensor([t for t in range(16) if not 1 <= t < 4])
    assert torch.equal(y[:, others], z[:, others])
    assert torch.equal(last[[0, 1, 3, 4, 5]], state[[0, 1, 3, 4, 5]]) and z[:, 1:4].isnan().all()


def test_convolution_in_pieces_is_one_pass_to_the_bit():
    conv = ShortConvolution(CHANNELS, 4, bias=True)
    x = draw(2, 23, CHANNELS, dtype=torch.float32)
    whole, last = conv(x, None, True)
    for cuts in ([0, 1, 2, 3, 23], [0, 10, 10, 23], list(range(24))):
        state, pieces = None, []
        for a, b in itertools.pairwise(cuts):
            y, state = conv(x[:, a:b], state, True)
            pieces.append(y)
        assert torch.equal(torch.cat(pieces, 1), whole) and torch.equal(state, last)
    state = torch.zeros(2, CHANNELS, 3)
    steps = [conv.step(x[:, t], state) for t in range(23)]
    assert torch.equal(torch.stack(steps, 1), whole) and torch.equal(state, last)


@pytest.mark.parametrize("packed", [False, True])
def test_convolution_gradients_go_through_both_states(packed):
    B, N = (1, 6) if packed else (2, 2)
    x, w, b, s = (draw(*shape, seed=i).requires_grad_() for i, shape in enumerate([(B, 16, 3), (3, 4), (3,), (N, 3, 3)]))
    cu = OFFSETS if packed else None
    assert torch.autograd.gradcheck(lambda *a: causal_conv1d(*a, True, "silu", cu), (x, w, b, s))


def test_convolution_state_owns_only_its_columns():
    for D in (1, 5):
        for cu in (None, torch.tensor([0, 400, 1000])):
            _, state = ShortConvolution(D, 2)(draw(1, 1000, D, dtype=torch.float32), None, True, cu)
            assert state.untyped_storage().nbytes() == state.numel() * 4 and state.is_contiguous()


def test_convolution_takes_packed_and_dense_calls_in_turn():
    conv = ShortConvolution(5)
    x = draw(1, 16, 5, dtype=torch.float32)
    before, _ = conv(x)
    _, state = conv(x, None, True, OFFSETS)
    after, dense = conv(x, None, True)
    assert state.shape == (6, 5, 3) and dense.shape == (1, 5, 3) and torch.equal(before, after)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(x=draw(16, 5)), "x must be"),
        (dict(weight=draw(4, 4)), "weight must be"),
        (dict(bias=draw(4)), "bias must be"),
        (dict(initial_state=draw(1, 5, 4)), "initial_state must be"),
        (dict(activation="mish"), "activation must be"),
        (dict(cu_seqlens=torch.tensor([0, 9, 4, 16])), "must rise from 0 to T = 16"),
        (dict(cu_seqlens=torch.tensor([0, 15])), "must rise from 0 to T = 16"),
        (dict(cu_seqlens=torch.tensor([0, 16], dtype=torch.int16)), "int32 or int64"),
        (dict(x=draw(2, 16, 5), cu_seqlens=torch.tensor([0, 16])), "flatten"),
    ],
)
def test_convolution_refuses_by_name(change, says):
    with pytest.raises(ValueError, match=says):
        causal_conv1d(**{"x": draw(1, 16, 5), "weight": draw(5, 4), **change})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_norms_are_their_definitions(dtype):
    x, gate = draw(3, 7, 12, dtype=dtype), draw(3, 7, 12, dtype=dtype, seed=1)
    for activation, act in (("silu", F.silu), ("sigmoid", torch.sigmoid)):
        plain, gated = RMSNorm(12, 1e-5).to(dtype), GatedRMSNorm(12, 1e-5, activation).to(dtype)
        with torch.no_grad():
            for norm in (plain, gated):
                norm.weight.copy_(draw(12, seed=2))
        wide = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * plain.weight.double()
        truth = {"plain": wide, "gated": wide * act(gate.double())}
        # computed in float32 and rounded once: that is what the dtype itself allows
        agree({"plain": plain(x), "gated": gated(x, gate)}, truth, {n: t.to(torch.float32).to(dtype) for n, t in truth.items()})


def test_norms_survive_zero_rows_and_large_half_precision_values():
    assert torch.equal(l2norm(torch.zeros(3, 4)), torch.zeros(3, 4))
    assert RMSNorm(4)(torch.full((1, 4), 6e4, dtype=torch.float16)).isfinite().all()
    y = l2norm(draw(5, 8))
    agree({"length": y.norm(dim=-1)}, {"length": 1 / (1 + 1e-6 / draw(5, 8).square().sum(-1)).sqrt()})


def test_gated_norm_refuses_by_name():
    with pytest.raises(ValueError, match="activation must be"):
        GatedRMSNorm(4, activation="tanh")
    with pytest.raises(ValueError, match="gate must have"):
        GatedRMSNorm(4)(draw(2, 4), draw(3, 4))


def test_rotary_products_depend_on_distance_alone():
    q, k = draw(1, 9, 2, 8), draw(1, 9, 2, 8, seed=1)
    near, far = torch.arange(9)[None], torch.arange(9)[None] + 100_000

    def scores(q, k, positions):
        return torch.einsum("bthk,bshk->bhts", rotary(q, positions), rotary(k, positions)).flatten()

    truth, honest = {"scores": scores(q, k, near)}, {"scores": scores(q.float(), k.float(), near)}
    agree({"scores": scores(q.float(), k.float(), far)}, truth, honest)  # far positions lose nothing
    assert not torch.equal(rotary(q, near), rotary(q, far))


def test_rotary_turns_pairs_by_their_angle():
    x = draw(2, 5, 1, 4)
    positions = torch.tensor([[3, 1, 4, 1, 5], [0, 0, 7, 8, 9]])
    frequency = torch.tensor([1.0, 10000 ** (-1 / 2)], dtype=torch.float64)
    z = torch.complex(x[..., :2], x[..., 2:]) * torch.exp(1j * positions[..., None, None] * frequency)
    agree({"x": rotary(x, positions)}, {"x": torch.cat([z.real, z.imag], -1)})


def test_rotary_refuses_by_name():
    with pytest.raises(ValueError, match="must be even"):
        rotary(draw(1, 2, 1, 3), torch.arange(2)[None])
    with pytest.raises(ValueError, match="positions must be"):
        rotary(draw(1, 2, 1, 4), torch.arange(3)[None])


def test_feed_forward_is_its_definition():
    mlp, x = GatedMLP(6, 10, "gelu").double(), draw(2, 3, 6)
    want = F.linear(F.gelu(F.linear(x, mlp.gate_proj.weight)) * F.linear(x, mlp.up_proj.weight), mlp.down_proj.weight)
    assert torch.equal(mlp(x), want)


def test_padding_is_packed_and_unpacked():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    packing = plan_packing(4, 4, attention_mask=mask)
    x = draw(4, 4, 3)
    assert packing.cu_seqlens.tolist() == [0, 2, 4, 4, 7] and packing.positions.tolist() == [[0, 1, 0, 1, 0, 1, 2]]
    assert torch.equal(packing.pack(x)[0], x[mask.bool()]) and torch.equal(packing.unpack(packing.pack(x)), x * mask[..., None])
    assert packing.sequences == 4 and not packing.documents


def test_positions_that_do_not_rise_begin_documents():
    packing = plan_packing(2, 5, position_ids=torch.tensor([[0, 1, 0, 0, 1], [3, 4, 5, 6, 7]]))
    assert packing.cu_seqlens.tolist() == [0, 2, 3, 5, 10] and packing.documents
    assert packing.positions.tolist() == [[0, 1, 0, 0, 1, 3, 4, 5, 6, 7]]
    rising = plan_packing(2, 5, position_ids=torch.arange(5)[None])
    assert rising.cu_seqlens is None and rising.sequences == 2


def test_padded_positions_are_no_documents():
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    packing = plan_packing(2, 5, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert packing.cu_seqlens.tolist() == [0, 2, 7] and not packing.documents


def test_positions_go_on_from_what_was_seen():
    seen = torch.tensor([4, 7])
    assert plan_packing(2, 2, offset=seen).positions.tolist() == [[4, 5], [7, 8]]
    assert plan_packing(2, 2, attention_mask=torch.tensor([[0, 1], [1, 1]]), offset=seen).positions.tolist() == [[4, 7, 8]]
    assert plan_packing(1, 3, cu_seqlens=torch.tensor([0, 1, 3]), offset=seen).positions.tolist() == [[4, 7, 8]]


def test_offsets_win_over_an_all_ones_mask():
    packing = plan_packing(1, 6, attention_mask=torch.ones(1, 6), cu_seqlens=torch.tensor([0, 2, 6]))
    assert packing.cu_seqlens.tolist() == [0, 2, 6]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(attention_mask=torch.ones(2, 3)), "attention_mask must be"),
        (dict(attention_mask=torch.ones(1, 8)), "attention_mask must be"),
        (dict(position_ids=torch.arange(8)), "position_ids must be"),
        (dict(cu_seqlens=torch.tensor([0, 8])), "flatten"),
        (dict(offset=torch.zeros(3, dtype=torch.int64)), "holds N = 3 sequences, the call has 2"),
    ],
)
def test_packing_refuses_by_name(change, says):
    with pytest.raises(ValueError, match=says):
        plan_packing(2, 8, **change)


def test_padding_inside_packed_documents_is_refused():
    with pytest.raises(ValueError, match="remove the padding"):
        plan_packing(1, 4, attention_mask=torch.tensor([[0, 1, 1, 1]]), cu_seqlens=torch.tensor([0, 2, 4]))


@pytest.mark.parametrize("activation", ["silu", None, "gelu"])
def test_convolutions_go_by_stretches_of_tokens(monkeypatch, activation):
    """However long the stretches are: the same bits forward, the gradients of float64."""
    from chunkwise.nn import conv, tap

    def run(numbers, dtype):
        monkeypatch.setattr(tap, "STRETCH", numbers)
        gen = torch.Generator().manual_seed(0)
        leaves = [torch.randn(s, generator=gen).to(dtype).requires_grad_() for s in ((3, 84, 16), (16, 4), (16,), (3, 16, 3))]
        y, last = conv.causal_conv1d(*leaves, output_final_state=True, activation=activation)
        d = torch.autograd.grad((y, last), leaves, (torch.cos(y.detach()), torch.sin(last.detach())))
        return {"y": y.detach().flatten(0, 1), "last": last.detach().flatten(0, 1), **{f"d{i}": g.flatten() for i, g in enumerate(d)}}

    whole, truth = run(1 << 20, torch.float32), run(1 << 20, torch.float64)
    for numbers in (1, 512, 3000):
        made = run(numbers, torch.float32)
        assert torch.equal(made["y"], whole["y"]) and torch.equal(made["last"], whole["last"])
        agree(made, truth, whole)


@pytest.mark.parametrize("kind, gated, groups", [("rms", "silu", 1), ("layer", "sigmoid", 2), ("l2", None, 4), ("rms", None, 1)])
def test_norms_go_by_blocks_of_rows(monkeypatch, kind, gated, groups):
    """However many rows a block has: the same bits forward, the gradients of float64; and a gradient of the gradient."""
    from chunkwise.nn import norm

    def run(numbers, dtype, twice=False):
        monkeypatch.setattr(norm, "STRETCH", numbers)
        gen = torch.Generator().manual_seed(0)
        x, w, b, g = (torch.randn(s, generator=gen).to(dtype).requires_grad_() for s in ((3, 28, 32), (32,), (32,), (3, 28, 32)))
        leaves = [x] if kind == "l2" else [x, w, b, *([g] if gated else [])]
        weight, bias = (None, None) if kind == "l2" else (w, b)
        y = norm._norm("norm", kind, x, None, weight, bias, g if gated else None, 1e-5, groups, gated or "silu")[0]
        d = torch.autograd.grad(y, leaves, torch.cos(y.detach()), create_graph=twice)
        made = {"y": y.detach().flatten(0, 1), **{f"d{i}": z.detach().flatten() for i, z in enumerate(d)}}
        if twice:
            dd = torch.autograd.grad(sum(z.sin().sum() for z in d), leaves, allow_unused=True, materialize_grads=True)
            made |= {f"dd{i}": z.flatten() for i, z in enumerate(dd)}
        return made

    whole, truth = run(1 << 20, torch.float32), run(1 << 20, torch.float64)
    for numbers in (1, 600, 1100):
        made = run(numbers, torch.float32)
        assert torch.equal(made["y"], whole["y"])
        agree(made, truth, whole)
    again = run(1, torch.float64, twice=True)
    monkeypatch.setattr(norm, "direct", lambda tensors: False)  # PyTorch's own derivatives, of the whole
    agree(again, run(1, torch.float64, twice=True))
    agree(truth, {n: z for n, z in run(1, torch.float64, twice=True).items() if n in truth})


def test_many_gradients_of_a_norm_at_once():
    from chunkwise.nn import rms_norm

    x, w = torch.randn(5, 32).requires_grad_(), torch.randn(32).requires_grad_()
    y, some = rms_norm(x, w), torch.randn(3, 5, 32)
    at_once = torch.autograd.grad(y, (x, w), some, is_grads_batched=True, retain_graph=True)
    for i, d in enumerate(some):
        for many, one in zip(at_once, torch.autograd.grad(y, (x, w), d, retain_graph=True)):
            torch.testing.assert_close(many[i], one)
