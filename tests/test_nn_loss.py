"""Cross entropy of logits and of a head whose logits are never stored: values, gradients, memory, a vocabulary split over processes."""

import pytest
import torch
from nn_agreement import agree
from torch import multiprocessing
from torch.nn import functional as F

from chunkwise.nn import cross_entropy, linear_cross_entropy

N, D, V = 21, 12, 29
EVERYTHING = dict(label_smoothing=0.1, z_loss=0.01, scale=0.7, softcap=3.0)


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(dtype=torch.float64, n=N, d=D, v=V):
    x, w, b = (draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(n, d), (v, d), (v,)]))
    target = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(3))
    target[2::7] = -100
    return x, w, b, target


def definition(x, w, b, target, reduction="mean", label_smoothing=0.0, z_loss=0.0, scale=1.0, softcap=0.0, ignore=-100):
    """By PyTorch's own functions, on logits that are stored."""
    z = F.linear(x, w, b)
    s = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    loss = F.cross_entropy(s, target, label_smoothing=label_smoothing, reduction="none", ignore_index=ignore)
    loss = loss + z_loss * s.logsumexp(-1).square() * (target != ignore)
    return loss if reduction == "none" else loss.sum() / ((target != ignore).sum().clamp(min=1) if reduction == "mean" else 1)


def with_gradients(loss_of, *leaves, dtype=None):
    leaves = [t.detach().to(t.dtype if dtype is None else dtype).requires_grad_() for t in leaves]
    loss = loss_of(*leaves)
    upstream = draw(*loss.shape, seed=8).to(loss.dtype)
    d = torch.autograd.grad(loss, leaves, upstream)
    return {"loss": loss.detach(), **{f"d{i}": g for i, g in enumerate(d)}}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("terms", [{}, EVERYTHING], ids=["plain", "every term"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_losses_are_their_definition_with_any_incoming_gradient(reduction, terms, dtype):
    x, w, b, target = inputs(dtype)
    plain = lambda *leaves: definition(*leaves, target, reduction, **terms)
    truth, own = with_gradients(plain, x, w, b, dtype=torch.float64), None
    if dtype != torch.float64:
        own = with_gradients(plain, x, w, b)
    for rows in (1, 8, 100):
        fused = with_gradients(lambda x, w, b: linear_cross_entropy(x, w, target, b, reduction=reduction, rows=rows, **terms), x, w, b)  # noqa: B023
        agree(fused, truth, own)
    scored = with_gradients(lambda x, w, b: cross_entropy(F.linear(x, w, b), target, reduction=reduction, **terms), x, w, b)
    agree(scored, truth, own)
    assert scored["loss"].dtype == torch.promote_types(dtype, torch.float32) and scored["d0"].dtype == dtype


def test_the_weight_gradients_error_does_not_grow_with_the_number_of_blocks():
    x, w, _, target = inputs(torch.bfloat16, n=512, d=16, v=64)
    truth = with_gradients(lambda x, w: definition(x, w, None, target), x, w, dtype=torch.float64)["d1"]
    errors = []
    for blocks in (1, 8, 64):
        d = with_gradients(lambda x, w: linear_cross_entropy(x, w, target, rows=512 // blocks), x, w)["d1"]  # noqa: B023
        errors.append(((d.double() - truth).norm() / truth.norm()).item())
    assert max(errors) < 5e-3 and errors[2] <= 1.01 * errors[0], errors


def test_ignored_rows_and_empty_batches_are_nothing():
    x, w, b, target = inputs()
    for y in (torch.full_like(target, -100), target[:0]):
        for reduction in ("mean", "sum"):
            made = with_gradients(lambda *t: linear_cross_entropy(t[0], t[1], y, t[2], reduction=reduction, rows=4), x[: len(y)], w, b)  # noqa: B023
            assert all(not t.any() for t in made.values())
    y = torch.where(target < 0, 0, target)
    last = torch.cat([y[:16], torch.zeros_like(y[16:])])  # ignore index 0; a last block of nothing else
    got = with_gradients(lambda *t: linear_cross_entropy(t[0], t[1], last, t[2], rows=8, ignore_index=0), x, w, b)
    agree(got, with_gradients(lambda *t: definition(*t, last, ignore=0), x, w, b))
    spoiled = x.clone()
    spoiled[2::7] = float("nan")
    z = F.linear(spoiled, w, b).requires_grad_()
    loss = cross_entropy(z, target)
    loss.backward()
    assert torch.equal(loss, cross_entropy(F.linear(x, w, b), target)) and not z.grad[2::7].any() and z.grad.isfinite().all()


def test_losses_keep_leading_axes_and_strides():
    x, w, b, target = inputs()
    wide = torch.stack([x, -x], -1).view(3, 7, D, 2)[..., 0]  # not contiguous
    loss = linear_cross_entropy(wide, w, target.view(3, 7), b, reduction="none")
    assert loss.shape == (3, 7) and torch.equal(loss.flatten(), linear_cross_entropy(x, w, target, b, reduction="none"))
    half = F.linear(x, torch.cat([w, w]))[:, :V]
    assert torch.equal(cross_entropy(half, target), cross_entropy(half.contiguous(), target))


def test_the_logits_are_never_stored():
    x, w, _, target = (t.repeat(40, 1) if t.ndim == 2 else t for t in inputs(torch.float32))
    target = target.repeat(40)
    x.requires_grad_(), w.requires_grad_()
    seen = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor))
            return out

    with Sizes():
        linear_cross_entropy(x, w, target, rows=16).backward()
    assert max(seen) <= max(x.numel(), w.numel()) < x.shape[0] * w.shape[0]


def test_autocast_keeps_master_weights_gradients_wide():
    x, w, _, target = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        made = with_gradients(lambda x, w: linear_cross_entropy(x, w, target, rows=5), x, w)
    near = with_gradients(lambda x, w: definition(x, w, None, target), x.bfloat16(), w.bfloat16())
    agree(
        {n: t.float() for n, t in made.items()}, with_gradients(lambda x, w: definition(x, w, None, target), x.double(), w.double()), near
    )
    assert made["d1"].dtype == torch.float32 and not torch.equal(made["d1"], made["d1"].bfloat16().float())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_compile_whole(reduction):
    x, w, b, target = inputs(torch.float32)
    function = lambda *t: linear_cross_entropy(t[0], t[1], target, t[2], reduction=reduction, rows=8) + cross_entropy(t[0], target % D)
    whole = torch.compile(function, backend="aot_eager", fullgraph=True)
    eager, compiled = (with_gradients(f, x, w, b) for f in (function, whole))
    assert all(torch.equal(t, compiled[n]) for n, t in eager.items())
    with torch.no_grad():
        assert torch.equal(whole(x, w, b), function(x, w, b))


def test_losses_are_sound_operators():
    x, w, b, target = inputs()
    terms = (-100, 0.1, 0.01, 0.7, 3.0, 0, V, "")
    z = F.linear(x, w, b)
    torch.library.opcheck(torch.ops.chunkwise.linear_cross_entropy.default, (x, w, b, target, None, None, 8, True, *terms))
    torch.library.opcheck(torch.ops.chunkwise.linear_cross_entropy.default, (x, w, None, target, None, None, 8, False, *terms))
    torch.library.opcheck(torch.ops.chunkwise.cross_entropy.default, (z, target, *terms))
    torch.library.opcheck(torch.ops.chunkwise.cross_entropy_backward.default, (z, target, z.logsumexp(1), x[:, 0].contiguous(), *terms))


@pytest.mark.parametrize("how", ["grad", "vmap", "vmap of grad", "jacrev"])
def test_transforms_do_not_hide_a_class_that_does_not_exist(how):
    z, bad, good = draw(3, N, V), torch.zeros(3, N, dtype=torch.int64), torch.zeros(3, N, dtype=torch.int64)
    bad[2, 1] = V
    loss = lambda z, target: cross_entropy(z, target)
    call = {
        "grad": lambda t: torch.func.grad(loss)(z[2], t[2]),
        "vmap": lambda t: torch.vmap(loss)(z, t),
        "vmap of grad": lambda t: torch.vmap(torch.func.grad(loss))(z, t),
        "jacrev": lambda t: torch.func.jacrev(loss)(z[2], t[2]),
    }[how]
    assert call(good).isfinite().all()
    with pytest.raises(ValueError, match=f"cross_entropy: target must be classes 0 to {V - 1} or ignore_index = -100, got {V}"):
        call(bad)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (dict(target=torch.zeros(4, dtype=torch.int64)), ValueError, "target must be"),
        (dict(target=torch.zeros(N)), TypeError, "target must be int64"),
        (dict(target=torch.full((N,), V)), ValueError, f"target must be classes 0 to {V - 1}"),
        (dict(weight=draw(V, D + 1)), ValueError, "weight must be"),
        (dict(weight=draw(V, D).float()), TypeError, "weight and bias must have x's dtype"),
        (dict(bias=draw(V + 1)), ValueError, "bias must be"),
        (dict(x=torch.zeros(N, D, dtype=torch.int64)), TypeError, "x must be a floating"),
        (dict(reduction="avg"), ValueError, "reduction must be"),
        (dict(label_smoothing=1.5), ValueError, "label_smoothing must be"),
        (dict(softcap=-1.0), ValueError, "softcap must be"),
        (dict(softcap=float("nan")), ValueError, "softcap must be"),
        (dict(ignore_index=0.5), TypeError, "ignore_index must be a whole number, got 0.5"),
        (dict(rows=0), ValueError, "rows must be"),
        (dict(rows=2.5), ValueError, "rows must be a whole number"),
        (dict(first_class=3), ValueError, "first_class belongs"),
    ],
)
def test_losses_refuse_by_name(change, error, says):
    x, w, _, target = inputs()
    with pytest.raises(error, match=says):
        linear_cross_entropy(**{"x": x, "weight": w, "target": target, **change})


def _shares(uneven):
    """A vocabulary of V classes, or of V - 1 in equal shares."""
    classes, cut = (V, 20) if uneven else (V - 1, (V - 1) // 2)
    x, w, b, target = inputs()
    return x, w[:classes], b[:classes], target.clamp(max=classes - 1), (slice(0, cut), slice(cut, classes))


def _shard(rank, folder):
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    made = {}
    for uneven in (False, True):
        x, w, b, target, shares = _shares(uneven)
        own = shares[rank]
        given = dict(process_group=distributed.group.WORLD, **EVERYTHING, **(dict(first_class=own.start) if uneven else {}))
        fused = with_gradients(lambda *t: linear_cross_entropy(t[0], t[1], target, t[2], rows=8, **given), x, w[own], b[own])  # noqa: B023
        z = F.linear(x, w, b)[:, own]
        scored = with_gradients(lambda z: cross_entropy(z, target, reduction="none", **given), z)  # noqa: B023
        made[uneven] = fused, scored
    torch.save(made, f"{folder}/{rank}")
    distributed.destroy_process_group()


def test_a_vocabulary_split_over_processes_is_the_whole(tmp_path):
    multiprocessing.spawn(_shard, (str(tmp_path),), nprocs=2)
    made = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    for uneven in (False, True):
        x, w, b, target, _ = _shares(uneven)
        whole = with_gradients(lambda *t: linear_cross_entropy(t[0], t[1], target, t[2], **EVERYTHING), x, w, b)  # noqa: B023
        scored = with_gradients(lambda z: cross_entropy(z, target, reduction="none", **EVERYTHING), F.linear(x, w, b))  # noqa: B023
        fused, plain = zip(*(m[uneven] for m in made))
        for share in fused:
            agree({n: share[n] for n in ("loss", "d0")}, {n: whole[n] for n in ("loss", "d0")})
        agree({n: torch.cat([share[n] for share in fused]) for n in ("d1", "d2")}, {n: whole[n] for n in ("d1", "d2")})
        agree({"d": torch.cat([share["d0"] for share in plain], 1)}, {"d": scored["d0"]})
        agree({"loss": plain[0]["loss"]}, {"loss": scored["loss"]})
        assert torch.equal(plain[0]["loss"], plain[1]["loss"])
