"""The elementwise scan: hgrn, and what members build on it."""

import pytest
import torch
from oracle import check

import chunkwise
from chunkwise.draw import offsets
from chunkwise.engine import elementwise
from chunkwise.engine.elementwise import running_max


def loop(x, g, h0):
    out = []
    for t in range(x.shape[1]):
        h0 = g[:, t].exp() * h0 + x[:, t]
        out.append(h0)
    return torch.stack(out, 1) if out else x, h0


def draw(B=2, T=150, D=7, dtype=torch.float64, strength=1.0, seed=0):
    torch.manual_seed(seed)
    x, g, h0 = torch.randn(B, T, D), strength * torch.nn.functional.logsigmoid(torch.randn(B, T, D)), torch.randn(B, D)
    return [t.to(dtype).requires_grad_() for t in (x, g, h0)]


def gradients(h, hT, leaves):
    torch.manual_seed(1)
    weights = [torch.randn(t.shape, dtype=torch.float64).to(t.dtype) for t in (h, hT)]
    d = torch.autograd.grad([h, hT], leaves, weights)
    return dict(zip(("h", "hT", "dx", "dg", "dh0"), (h.detach(), hT.detach(), *d)))


@pytest.mark.parametrize("strength", [0.0, 0.01, 1.0, 20.0, 1e4])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 150])
def test_scan_is_the_loop(T, strength):
    x, g, h0 = draw(T=T, strength=strength)
    h, hT = chunkwise.hgrn(x, g, h0, output_final_state=True)
    check(gradients(h, hT, (x, g, h0)), gradients(*loop(x, g, h0), (x, g, h0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_dtypes_are_computed_in_float32(dtype):
    x, g, h0 = draw(dtype=dtype)
    h, hT = chunkwise.hgrn(x, g, h0, output_final_state=True)
    wide = [t.detach().double().requires_grad_() for t in (x, g, h0)]
    assert h.dtype == dtype and hT.dtype == torch.float32
    truth = gradients(*loop(*wide), wide)
    single = [t.detach().float().requires_grad_() for t in (x, g, h0)]
    check(gradients(h, hT, (x, g, h0)), truth, gradients(*loop(*single), single))


def test_packed_is_separate_and_segments_carry_the_state():
    cu = offsets(150, 6, torch.Generator().manual_seed(3)).long()
    x, g, _ = draw(B=1)
    h0 = torch.randn(6, 7, dtype=torch.float64).requires_grad_()
    parts = [chunkwise.hgrn(x[:, a:b], g[:, a:b], h0[i : i + 1], True) for i, (a, b) in enumerate(zip(cu.tolist(), cu.tolist()[1:]))]
    apart = torch.cat([p for p, _ in parts], 1), torch.cat([S for _, S in parts])
    apart = gradients(*apart, (x, g, h0))
    for host in (None, cu.clone()):
        packed = chunkwise.hgrn(x, g, h0, True, cu_seqlens=cu.int(), cu_seqlens_cpu=None if host is None else host.int())
        check(gradients(*packed, (x, g, h0)), apart)
    h, S, at = [], h0[:1], (0, 1, 70, 150)
    for a, b in zip(at, at[1:]):
        o, S = chunkwise.hgrn(x[:, a:b], g[:, a:b], S, True)
        h.append(o)
    check(gradients(torch.cat(h, 1), S, (x, g, h0)), gradients(*chunkwise.hgrn(x, g, h0[:1], True), (x, g, h0)))


def test_packed_gives_the_bits_of_each_sequence_alone():
    x, g, _ = (t.detach() for t in draw(B=1, T=300, dtype=torch.float32))
    cu, h0 = torch.tensor([0, 3, 3, 133, 134, 300]), torch.randn(5, 7)
    weights = torch.randn(1, 300, 7), torch.randn(5, 7)

    def run(a, b, n, m, **packing):
        leaves = [t.clone().requires_grad_() for t in (x[:, a:b], g[:, a:b], h0[n:m])]
        h, hT = chunkwise.hgrn(*leaves, output_final_state=True, **packing)
        return h, hT, *torch.autograd.grad([h, hT], leaves, [weights[0][:, a:b], weights[1][n:m]])

    alone = [run(a, b, n, n + 1) for n, (a, b) in enumerate(zip(cu.tolist(), cu.tolist()[1:]))]
    packed = run(0, 300, 0, 5, cu_seqlens=cu)
    for name, together, apart, axis in zip(("h", "hT", "dx", "dg", "dh0"), packed, zip(*alone), (1, 0, 1, 1, 0)):
        assert torch.equal(together, torch.cat(apart, axis)), name


def test_offsets_are_never_read_on_the_host():
    x, g, h0, dh = (torch.empty(s, device="meta") for s in ((1, 300, 7), (1, 300, 7), (5, 7), (1, 300, 7)))
    cu = torch.empty(6, dtype=torch.int32, device="meta")  # has no values: who looked would fail
    h, hT = elementwise.forward(x, g, h0, cu)
    d = elementwise.backward(x, g, h0, cu, dh, hT)
    assert [t.shape for t in (h, hT, *d)] == [x.shape, h0.shape, x.shape, x.shape, h0.shape]
    with pytest.raises((RuntimeError, NotImplementedError)):
        cu.tolist()


def test_causality_batches_and_nan_are_kept_apart_to_the_bit():
    x, g, _ = (t.detach() for t in draw(B=3, T=100, dtype=torch.float32))
    h, _ = chunkwise.hgrn(x, g)
    y = x.clone()
    y[:, 71:] = float("nan")
    assert torch.equal(chunkwise.hgrn(y, g)[0][:, :71], h[:, :71])
    assert torch.equal(chunkwise.hgrn(x[1:2], g[1:2])[0], h[1:2])
    y = x.clone()
    y[1] = float("nan")
    assert torch.equal(chunkwise.hgrn(y, g)[0][::2], h[::2])
    cu = torch.tensor([0, 30, 30, 100])
    apart, _ = chunkwise.hgrn(x[:1], g[:1], cu_seqlens=cu)
    y = x[:1].clone()
    y[:, :30] = float("nan")
    assert torch.equal(chunkwise.hgrn(y, g[:1], cu_seqlens=cu)[0][:, 30:], apart[:, 30:])


def test_a_reset_forgets_everything():
    x, g, _ = (t.detach() for t in draw())
    g[:, 40] = -torch.inf
    h, _ = chunkwise.hgrn(x, g)
    check({"h": h[:, 40:]}, {"h": chunkwise.hgrn(x[:, 40:], g[:, 40:])[0]})


def test_nothing_in_nothing_out():
    x, g, h0 = draw(T=0)
    h, hT = chunkwise.hgrn(x, g, h0, output_final_state=True)
    assert h.shape == (2, 0, 7) and torch.equal(hT, h0) and (torch.autograd.grad(hT.sum(), h0)[0] == 1).all()
    assert chunkwise.hgrn(x, g)[1] is None


def test_the_operator_passes_torch_s_checks():
    x, g, h0 = draw(T=20, dtype=torch.float32)
    still = [t.detach() for t in (x, g, h0)]
    packed = [still[0][:1], still[1][:1], still[2], torch.tensor([0, 3, 20])]
    for args in ((*still, None), (*still[:2], None, None), packed):
        torch.library.opcheck(torch.ops.chunkwise.elementwise.default, args)
        h, hT = torch.ops.chunkwise.elementwise(*args)
        torch.library.opcheck(torch.ops.chunkwise.elementwise_backward.default, (*args, h, hT))
    torch.library.opcheck(torch.ops.chunkwise.running_max.default, (still[0], None, None))
    compiled = torch.compile(lambda x, g: chunkwise.hgrn(x, g)[0].square(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, g), chunkwise.hgrn(x, g)[0].square())
    x, g, h0 = draw(B=1, T=19, D=2)
    assert torch.autograd.gradcheck(lambda *z: chunkwise.hgrn(*z, output_final_state=True), (x, g, h0))


def test_running_maximum_is_each_sequence_s_own():
    x = torch.randn(1, 90, 3)
    cu = [0, 1, 40, 40, 90]
    starts = torch.tensor([max(c for c in cu[:-1] if c <= t) for t in range(90)])
    first = torch.randn(1, 90, 3) + 1
    for h0 in (None, first):
        begun = x if h0 is None else torch.maximum(x, h0[:, starts])
        want = [begun[:, a:b].cummax(1).values for a, b in zip(cu, cu[1:]) if a < b]
        assert torch.equal(running_max(x, h0, starts), torch.cat(want, 1))
    assert torch.equal(running_max(x), x.cummax(1).values)


def test_bad_input_is_refused_by_name():
    x, g, h0 = (t.detach() for t in draw())
    refusals = {
        "hgrn: x must be \\[B, T, D\\], got \\[2, 150\\]": lambda: chunkwise.hgrn(x[..., 0], g[..., 0]),
        "hgrn: g must be \\[B, T, D\\] = \\[2, 150, 7\\], got \\[2, 149, 7\\]": lambda: chunkwise.hgrn(x, g[:, 1:]),
        "hgrn: initial_state must be \\[N, D\\] = \\[2, 7\\], got \\[1, 7\\]": lambda: chunkwise.hgrn(x, g, h0[:1]),
        "hgrn: cu_seqlens packs sequences into one row": lambda: chunkwise.hgrn(x, g, cu_seqlens=torch.tensor([0, 150])),
        "hgrn: cu_seqlens must rise from 0 to T=150": lambda: chunkwise.hgrn(x[:1], g[:1], cu_seqlens=torch.tensor([0, 15])),
        "hgrn: cu_seqlens_cpu needs cu_seqlens": lambda: chunkwise.hgrn(x, g, cu_seqlens_cpu=torch.tensor([0, 150])),
        "hgrn: g is on meta, x is on cpu": lambda: chunkwise.hgrn(x, g.to("meta")),
    }
    for text, call in refusals.items():
        with pytest.raises(ValueError, match=text):
            call()
    for call in (lambda: chunkwise.hgrn(x.long(), g), lambda: chunkwise.hgrn(x, 1.0), lambda: chunkwise.hgrn(x, g, h0.long())):
        with pytest.raises(TypeError, match="hgrn: .* must be a floating tensor"):
            call()
