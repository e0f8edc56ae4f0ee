"""The convolution's kernels in Triton's interpreter, forward and backward, against their form in PyTorch."""

from types import SimpleNamespace

import pytest
import torch
from module_case import check, close, draw

from chunkwise.nn import ShortConvolution, causal_conv1d, causal_conv1d_update, conv
from chunkwise.nn.joint import convolve
from chunkwise.nn.launch import conv as launch

OFFSETS = torch.tensor([0, 0, 1, 4, 4, 13, 16, 16])  # empty, one token, shorter than a window, longer


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Programs of few rows and channels, so that small inputs need several of them."""
    monkeypatch.setattr(launch, "PIECE", 8)
    monkeypatch.setattr(launch, "PIECE_BACK", 8)
    monkeypatch.setattr(launch, "BLOCK", 16)
    monkeypatch.setattr(launch, "AHEAD", 4)
    monkeypatch.setattr(launch, "BACK", 2)


def both_states(cu=None, activation="silu"):
    """Outputs and final states, flat in one tensor, whose gradients therefore go through both."""

    def run(x, w, b, s):
        y, last = causal_conv1d(x, w, b, s, True, activation, cu)
        return y, last

    return run


@pytest.mark.parametrize("sizes, least", [((16, 32, 8), 8), ((16, 16), 8), ((20, 4, 8), 8), ((8, 8, 8, 8), 1)])
@pytest.mark.parametrize("cu", [None, OFFSETS], ids=["dense", "packed"])
def test_gradients_of_several_convolutions_are_read_where_they_lie(monkeypatch, sizes, least, cu):
    """Blocks of 16 and of 8 channels, and gradients put side by side: of widths without a common block, of more than three."""
    monkeypatch.setattr(launch, "LEAST", least)

    def run(x, w, b):
        convs = [SimpleNamespace(hidden_size=n, activation="silu", weight=w_n[:, None], bias=b_n)
                 for n, w_n, b_n in zip(sizes, w.split(sizes), b.split(sizes))]  # fmt: skip
        made, last = convolve(convs, x, None, True, cu)
        return *made, last

    D = sum(sizes)
    check(monkeypatch, [conv], run, draw(*((2, 11) if cu is None else (1, 16)), D), draw(D, 4, seed=1), draw(D, seed=2))


def test_several_convolutions_are_one_node_of_a_graph(monkeypatch):
    monkeypatch.setattr(launch, "LEAST", 8)
    monkeypatch.setattr(conv, "uses_kernels", lambda x: True)
    convs = [ShortConvolution(n, 4, True) for n in (16, 8)]
    run = lambda x: sum(y.sin().sum() for y in convolve(convs, x, None, False, None)[0])
    x, (weight, _) = draw(2, 9, 24).requires_grad_(), convs[0].parameters()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got, want = ((y, *torch.autograd.grad(y, [x, weight])) for y in (compiled(x), run(x)))
    assert all(map(torch.equal, got, want))
    with torch.no_grad():
        assert torch.equal(compiled(x), want[0])


@pytest.mark.parametrize("T, W", [(1, 2), (2, 4), (11, 4), (5, 8), (8, 8)])
def test_dense_with_both_states(monkeypatch, T, W):
    x, w, b, s = draw(2, T, 20), draw(20, W, seed=1), draw(20, seed=2), draw(2, 20, W - 1, seed=3)
    check(monkeypatch, [conv], both_states(), x, w, b, s)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cu", [OFFSETS, OFFSETS.int()], ids=["int64", "int32"])
def test_packed_with_both_states(monkeypatch, cu, dtype):
    x, w, b, s = (draw(*n, dtype=dtype, seed=i) for i, n in enumerate([(1, 16, 20), (20, 4), (20,), (7, 20, 3)]))
    check(monkeypatch, [conv], both_states(cu), x, w, b, s)


@pytest.mark.parametrize("activation", ["silu", None, "gelu"])
@pytest.mark.parametrize("cu", [None, OFFSETS], ids=["dense", "packed"])
def test_without_states_with_a_residual(monkeypatch, cu, activation):
    x, w, r = draw(1, 16, 20), draw(20, 3, seed=1), draw(1, 16, 20, seed=2)
    check(monkeypatch, [conv], lambda x, w, r: causal_conv1d(x, w, activation=activation, cu_seqlens=cu, residual=r)[0], x, w, r)


def test_slices_layouts_and_runs_of_numbers(monkeypatch):
    whole, w = draw(2, 9, 40), draw(20, 4, seed=1)
    check(monkeypatch, [conv], lambda x, w: causal_conv1d(x[..., 20:], w, activation="silu")[0], whole, w)
    index = torch.tensor([[0, 0, 1, 1, 1, 1, 1, -1, -1], [5, 7, 7, 7, 7, 7, 2, 2, 2]], dtype=torch.int32)
    first = lambda x, w: causal_conv1d(x, w, activation="silu", seq_idx=index, channels_first=True)[0]
    check(monkeypatch, [conv], first, draw(2, 20, 9), w)


def test_nothing_crosses_from_one_sequence_to_another(monkeypatch):
    monkeypatch.setattr(conv, "uses_kernels", lambda x: True)
    x, w = draw(1, 16, 20).requires_grad_(), draw(20, 4, seed=1)
    y, _ = causal_conv1d(x, w, None, None, False, "silu", OFFSETS)
    spoiled = x.detach().clone()
    spoiled[:, 1:4] = float("nan")
    z, last = causal_conv1d(spoiled.requires_grad_(), w, None, None, True, "silu", OFFSETS)
    others = torch.tensor([t for t in range(16) if not 1 <= t < 4])
    assert torch.equal(y[:, others], z[:, others]) and last[[0, 1, 3, 4, 5, 6]].isfinite().all()
    (a,), (b,) = (torch.autograd.grad(o, i, torch.ones_like(o)) for o, i in ((y, x), (z, spoiled)))
    assert torch.equal(a[:, others], b[:, others])
    for n, (i, j) in enumerate(zip(OFFSETS.tolist(), OFFSETS.tolist()[1:])):  # alone and packed: the same bits
        alone, state = causal_conv1d(x[:, i:j], w, None, None, True, "silu")
        assert torch.equal(alone, y[:, i:j]) and (torch.equal(state[0], last[n]) or n == 2)


@pytest.mark.parametrize("T, B", [(0, 2), (3, 0)])
def test_empty_calls(monkeypatch, T, B):
    x, w, b, s = draw(B, T, 20), draw(20, 4, seed=1), draw(20, seed=2), draw(B, 20, 3, seed=3)
    check(monkeypatch, [conv], both_states(), x, w, b, s)


@pytest.mark.parametrize("S, dense", [(3, True), (4, True), (4, False), (6, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_new_tokens_on_a_pool(monkeypatch, S, dense, dtype):
    x, w, b = draw(3, 2, 20, dtype=dtype), draw(20, 4, seed=1, dtype=dtype), draw(20, seed=2, dtype=dtype)
    pool, index = draw(5, S, 20, dtype=dtype, seed=3).transpose(1, 2), torch.tensor([4, -1, 0], dtype=torch.int32)
    pool = pool.contiguous() if dense else pool
    made = {}
    for kernels in (True, False):
        with monkeypatch.context() as m:
            m.setattr(conv, "uses_kernels", lambda x, kernels=kernels: kernels)
            state = pool.clone()  # as it lies
            made[kernels] = causal_conv1d_update(x, state, w, b, "silu", index), state
    truth = pool.double()
    want = causal_conv1d_update(x.double(), truth, w.double(), b.double(), "silu", index)
    close(made[True], (want, truth), made[False])
    assert torch.equal(made[True][1], made[False][1]) and not made[True][0][1].any()
    assert torch.equal(made[True][1][1:4], pool[1:4])
