"""The modules on a GPU: their kernels against float64 and PyTorch's operators on a CPU, at sizes that do and do not fill the card."""

from types import SimpleNamespace

import pytest
import torch
from nn_agreement import GRADIENT, OUTPUT

from chunkwise import nn
from chunkwise.nn import gate
from chunkwise.nn.joint import convolve
from chunkwise.nn.mlp import glu_halves

pytestmark = pytest.mark.gpu
LABELS = torch.tensor([3, -100, 0, 499, 7, 8, 9] * 13)
LONG = torch.tensor([0, 0, 5, 1000, 1001, 1003, 4099])


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def conv(W=4, cu=None, act="silu", **more):
    def run(x, w, b, s):
        y, last = nn.causal_conv1d(x, w, b, s, True, act, None if cu is None else cu.to(x.device), **more)
        return y, last

    return run


def loss(reduction="mean", rows=32, labels=LABELS, **terms):
    return lambda x, w, b: nn.linear_cross_entropy(x, w, labels.to(x.device), b, reduction=reduction, rows=rows, **terms)


def several(*sizes, cu=None):
    def run(x, w, b):
        convs = [
            SimpleNamespace(hidden_size=n, activation="silu", weight=w_n[:, None], bias=b_n)
            for n, w_n, b_n in zip(sizes, w.split(sizes), b.split(sizes))
        ]
        return convolve(convs, x, None, False, None if cu is None else cu.to(x.device))[0]

    return run


def turn(start=0, **how):
    return lambda x: nn.rotary(x, torch.arange(start, start + x.shape[1], device=x.device)[None], **how)


EVERY = dict(label_smoothing=0.1, z_loss=0.01, scale=0.7, softcap=3.0)
# name: (function, shapes of its leaves)
CASES = {
    "conv": (conv(), [(2, 1111, 1000), (1000, 4), (1000,), (2, 1000, 3)]),
    "conv of width 8": (conv(), [(1, 300, 136), (136, 8), (136,), (1, 136, 7)]),
    "conv shorter than its window": (conv(act=None), [(3, 2, 513), (513, 4), (513,), (3, 513, 3)]),
    "conv, packed": (conv(cu=LONG), [(1, 4099, 520), (520, 4), (520,), (6, 520, 3)]),
    "conv, packed, of width 8": (conv(cu=LONG), [(1, 4099, 72), (72, 8), (72,), (6, 72, 7)]),
    "conv of whole blocks": (
        lambda x, w: nn.causal_conv1d(x, w, activation="silu")[0],
        [(3, 256, 1024), (1024, 4)],
    ),
    "conv of slices, with a residual": (
        lambda x, w: nn.causal_conv1d(x[..., 64:192], w, activation="silu", residual=x[..., :128])[0],
        [(2, 257, 192), (128, 3)],
    ),
    "conv of several": (several(768, 768, 1024), [(2, 600, 2560), (2560, 4), (2560,)]),
    "conv of several, packed": (several(384, 128, cu=LONG), [(1, 4099, 512), (512, 4), (512,)]),
    "conv, runs of numbers": (
        lambda x, w: nn.causal_conv1d(
            x, w, activation="silu", channels_first=True, seq_idx=(torch.arange(258, device=x.device).view(2, 129) // 50).int()
        )[0],
        [(2, 64, 129), (64, 4)],
    ),
    "gated norm": (lambda x, g, w: nn.rms_norm(x, w, gate=g), [(2, 900, 4, 128), (2, 900, 4, 128), (128,)]),
    "norm gated by heads in wider rows": (
        lambda x, g, w: nn.rms_norm(x, w, gate=g[..., 16:528].unflatten(-1, (4, 128))), [(2, 900, 4, 128), (2, 900, 800), (128,)]
    ),
    "gated norm of few rows": (lambda x, g, w: nn.layer_norm(x, w, gate=g, activation="sigmoid"), [(3, 100), (3, 100), (100,)]),
    "norm of a sum": (lambda x, r, w, b: nn.add_layer_norm(x, r, w, b), [(700, 2048), (700, 2048), (2048,), (2048,)]),
    "wide norm": (lambda x, w: nn.rms_norm(x, w), [(300, 8192), (8192,)]),
    "norm of groups": (lambda x, w: nn.rms_norm(x, w, groups=6), [(500, 768), (768,)]),
    "norm of a sum in two dtypes": (lambda x, r, w: nn.add_rms_norm(x, r.to(torch.promote_types(r.dtype, torch.float32)), w),
                                    [(700, 2048), (700, 2048), (2048,)]),
    "length": (nn.l2norm, [(3, 1000, 7, 100)]),
    "length of heads in wider rows": (lambda x: nn.l2norm(x[..., 16:528].unflatten(-1, (4, 128))), [(2, 1000, 800)]),
    "raw gate": (lambda x, A, b: gate.log_decay(8 * x[..., 1:7], A, b), [(3, 2000, 12), (6,), (6,)]),
    "raw gate of channels": (lambda x, A, b: gate.log_decay(8 * x, A, b), [(2, 900, 5, 128), (5,), (640,)]),
    "bounded gate": (lambda x, A: gate.log_decay(x, A, None, -5.0), [(2, 900, 3, 100), (3,)]),
    "write strength": (lambda x: gate.write_strength(8 * x, 2.0), [(3, 2000, 6)]),
    "rotary": (turn(), [(2, 1000, 5, 128)]),
    "rotary, far and interleaved": (turn(3_000_000, interleaved=True, theta=5e5), [(1, 70, 2, 100)]),
    "swiglu": (nn.swiglu, [(333, 777), (333, 777)]),
    "swiglu of halves": (glu_halves, [(333, 4096)]),
    "swiglu of narrow halves": (glu_halves, [(333, 1536)]),
    "loss": (loss(), [(91, 128), (500, 128), (500,)]),
    "loss, every term, of each row": (loss("none", **EVERY), [(91, 128), (500, 128), (500,)]),
    "loss, all labels ignored": (loss(labels=torch.full((91,), -100), z_loss=0.1), [(91, 128), (500, 128), (500,)]),
    "loss of logits": (lambda z: nn.cross_entropy(z, LABELS.to(z.device), **EVERY), [(91, 5003)]),
}


def with_gradients(function, leaves, device, dtype):
    leaves = [t.to(device, dtype).requires_grad_() for t in leaves]
    made = function(*leaves)
    made = list(made) if isinstance(made, tuple) else [made]
    upstream = [torch.stack([draw(*t.shape, seed=50 + i)] * 2, -1)[..., 0].to(t) for i, t in enumerate(made)]
    return [t.cpu() for t in (*made, *torch.autograd.grad(made, leaves, upstream))], len(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_right_and_repeat_themselves(name, dtype):
    function, shapes = CASES[name]
    leaves = [draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    got, outputs = with_gradients(function, leaves, "cuda", dtype)
    again, _ = with_gradients(function, leaves, "cuda", dtype)
    own, _ = with_gradients(function, leaves, "cpu", dtype)
    truth, _ = with_gradients(function, leaves, "cpu", torch.float64)
    for i, (g, a, o, t) in enumerate(zip(got, again, own, truth)):
        assert torch.equal(g, a) and g.dtype == o.dtype and g.isfinite().all(), i
        eps = max(torch.finfo(dtype).eps if i >= outputs else 0, torch.finfo(g.dtype).eps)
        allowed = (OUTPUT if i < outputs else GRADIENT) * ((o.double() - t).norm() + eps * t.abs().max() * t.numel() ** 0.5)
        wrong = (g.double() - t).norm()
        assert wrong <= allowed, f"result {i}: error {wrong:.3e}, {allowed:.3e} allowed"


def test_more_one_token_sequences_than_a_grid_axis_holds():
    N, D = 65_600, 32
    x, w, s = (t.cuda() for t in (draw(1, N, D), draw(D, 4, seed=1), draw(N, D, 3, seed=2)))
    cu = torch.arange(N + 1, device="cuda", dtype=torch.int32)
    y, last = nn.causal_conv1d(x, w, None, s, True, "silu", cu)
    h = N // 2
    for part in (slice(0, h), slice(h, N)):
        half, state = nn.causal_conv1d(x[:, part], w, None, s[part], True, "silu", cu[: h + 1])
        assert torch.equal(half, y[:, part]) and torch.equal(state, last[part])
    stepped = s.clone()
    assert torch.equal(nn.causal_conv1d_update(x[0], stepped, w, None, "silu"), y[0]) and torch.equal(stepped, last)


def test_runs_of_numbers_end_where_the_rows_do():
    """Behind rows and numbers lies what would show: causal-conv1d has read past them where T is no multiple of its tile."""
    w = draw(64, 4, seed=1).cuda()
    for T in (63, 64, 65, 129, 257, 4099):
        room = torch.full((T * 64 + 4096,), float("nan"), device="cuda")
        numbers = torch.full((T + 512,), 7, dtype=torch.int32, device="cuda")
        x, runs = room[: T * 64].view(1, T, 64), numbers[:T].view(1, T)
        x.copy_(draw(1, T, 64))
        runs.copy_((torch.arange(T) // 50)[None])
        made = []
        for rows in (x, x.clone()):
            rows = rows.detach().requires_grad_()
            y = nn.causal_conv1d(rows, w, activation="silu", seq_idx=runs)[0]
            made.append((y.detach(), *torch.autograd.grad(y.square().sum(), rows)))
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*made))


def test_beyond_two_to_the_31_elements():
    x = torch.randn(1, 262_145, 8192, device="cuda", dtype=torch.bfloat16)
    w = draw(8192, 4, dtype=torch.bfloat16).cuda()
    y, _ = nn.causal_conv1d(x, w, activation="silu")
    part, _ = nn.causal_conv1d(x[:, -1003:], w, activation="silu")
    assert torch.equal(y[:, -1000:], part[:, -1000:])
    del y, part
    y = nn.rms_norm(x, w[:, 0])
    assert torch.equal(y[:, -100:], nn.rms_norm(x[:, -100:], w[:, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_the_whole_and_skip_negative_slots(dtype):
    x, w, b = (draw(*n, dtype=dtype, seed=i).cuda() for i, n in enumerate([(3, 9, 300), (300, 4), (300,)]))
    whole, last = nn.causal_conv1d(x, w, b, None, True, "silu")
    pool = torch.full((5, 300, 4), float("nan"), dtype=dtype, device="cuda")
    pool[[4, 0, 2], :, 1:] = 0
    index = torch.tensor([4, 0, 2], device="cuda")
    pieces = [nn.causal_conv1d_update(x[:, a:b], pool, w, b_, "silu", index) for a, b, b_ in ((0, 1, b), (1, 5, b), (5, 9, b))]
    assert torch.equal(torch.cat(pieces, 1), whole) and torch.equal(pool[index][..., 1:], last)
    before = pool.clone()
    skipped = nn.causal_conv1d_update(x[:, 0], pool, w, b, "silu", torch.tensor([-1, -1, -1], device="cuda"))
    assert not skipped.any() and torch.equal(pool[index], before[index])


def test_nothing_waits_for_the_device_and_everything_compiles():
    x, w, k = (draw(*n, dtype=torch.bfloat16, seed=i).cuda().requires_grad_() for i, n in enumerate([(1, 128, 64), (64, 64), (64, 4)]))
    cu, target = torch.tensor([0, 100, 128], device="cuda"), torch.randint(0, 64, (1, 128), device="cuda")
    at = torch.arange(128, device="cuda")[None]

    def all_of(x, w, k):
        y, _ = nn.causal_conv1d(x, k, activation="silu", cu_seqlens=cu)
        y, h = nn.add_rms_norm(y, x, k[:, 0])
        y = nn.swiglu(nn.rotary(y.view(1, 128, 2, 32), at).flatten(2), h)
        return nn.linear_cross_entropy(y, w, target)

    def step(f):
        made = f(x, w, k)
        return [made.detach(), *torch.autograd.grad(made, (x, w, k))]

    eager = step(all_of)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(all_of)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    whole = torch.compile(all_of, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(eager, step(whole)))
    with torch.no_grad():
        assert torch.equal(whole(x, w, k), eager[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_tensors_need_not_be_on_the_current_device():
    x, w = draw(2, 70, 64), draw(64, 4, seed=1)
    function = lambda x, w: nn.rms_norm(nn.causal_conv1d(x, w, activation="silu")[0], w[:, 0])
    with torch.cuda.device(0):
        near, far = (with_gradients(function, [x, w], device, torch.float32)[0] for device in ("cuda:0", "cuda:1"))
    assert all(torch.equal(a, b) for a, b in zip(near, far))
