"""Cross entropy, of logits or of a linear head whose logits are never stored: a block of tokens at a time, with the gradients at once.

    s = softcap tanh(scale z / softcap)      z the logits; softcap 0 leaves s = scale z
    L = (1 - smoothing) (lse(s) - s_y) + smoothing (lse(s) - mean(s)) + z_loss lse(s)^2

Szegedy et al. Rethinking the Inception Architecture for Computer Vision (smoothing). CVPR 2016.
Chowdhery et al. PaLM: Scaling Language Modeling with Pathways (z-loss). 2022.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.derivative import Tensors, gradients, many
from ..engine.library import unwrapped
from ..number import is_whole
from .boundary import check_tensors, define, differentiable
from .vocabulary import TERMS, Terms, group_of, losses, measure, score, slopes_

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

REDUCTIONS = ("mean", "sum", "none")
BLOCK = {"cuda": 1 << 28, "cpu": 1 << 24}  # bytes of logits that exist at a time
LEAST = 2048  # tokens of a block on a GPU: fewer, and adding to the weight's gradient costs more than its product


def _blocks(N: int, rows: int) -> list[slice]:
    return [slice(i, i + rows) for i in range(0, N, rows)]


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _product_(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """out = a b, with `add` out += a b; where out is wider than a and b, no sum or product is rounded to their dtype on a GPU."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif out.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):  # 16-bit operands, fp32 accumulator: the tensor cores' own form
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, beta=int(add), out=out)
    elif add or out.is_cuda:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(add), out=out)
    else:
        out.copy_(torch.mm(a, b))  # an input's gradient, rounded to its dtype in the end anyway: no wide copy of the weight


def _head(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor | None,
    upstream: Tensor | None,
    rows: int,
    grad: bool,
    *terms: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss and lse [N], and with `grad` the gradients of x, weight and bias, each token's weighted by upstream [N] or 1.

    lse: what an earlier call found; then the loss is not computed again. Gradients come in the wide dtype, those of weight and bias are
    summed over all blocks in it, so that their error does not grow with the number of blocks.
    """
    t = Terms(*terms)
    head, given = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    loss, lses, dx, dw, db = _results(x, weight, bias, grad)
    if not x.shape[0]:
        dw.zero_()
    db.zero_()
    with torch.autocast(x.device.type, enabled=False):
        for at in _blocks(x.shape[0], rows):
            z = _logits(x[at], head, given)
            if lse is None:
                lses[at], hit, total = score(z, target[at], t, grad)
                loss[at] = losses(lses[at], hit, total, target[at], t)
            else:
                slopes_(z, target[at], lse[at], None if upstream is None else upstream[at], t)
            if grad:
                _product_(dx[at], z, head, add=False)
                _product_(dw, z.t(), x[at], add=at.start > 0)
                if bias is not None:
                    db += z.sum(0, dtype=db.dtype)
    if grad and t.group:
        from torch import distributed

        distributed.all_reduce(dx, group=group_of(t))
    return loss, lses, dx, dw, db


def _loss_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _results(x: Tensor, weight: Tensor, bias: Tensor | None, grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Room for what `_head` returns; nothing of a gradient that is not wanted."""
    wide = _loss_dtype(x)
    loss, lses = (x.new_empty(x.shape[0], dtype=wide) for _ in range(2))
    dx, dw, db = (torch.empty_like(t, dtype=wide) if grad and t is not None else x.new_empty(0) for t in (x, weight, bias))
    return loss, lses, dx, dw, db


def _scored(z: Tensor, target: Tensor, *terms: Any) -> tuple[Tensor, Tensor]:
    t = Terms(*terms)
    lse, hit, total = score(z, target, t, False)
    return losses(lse, hit, total, target, t), lse


def _scored_backward(z: Tensor, target: Tensor, lse: Tensor, upstream: Tensor, *terms: Any) -> Tensor:
    dz = z.clone(memory_format=torch.contiguous_format)
    slopes_(dz, target, lse, upstream, Terms(*terms))
    return dz


_head_op = define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? lse, Tensor? upstream, int rows, bool grad, "
    f"{TERMS})"
    " -> (Tensor loss, Tensor lses, Tensor dx, Tensor dweight, Tensor dbias)",
    _head,
    lambda x, weight, bias, target, lse, upstream, rows, grad, *terms: _results(x, weight, bias, grad),
)
_score_op = define(
    f"cross_entropy(Tensor z, Tensor target, {TERMS}) -> (Tensor loss, Tensor lse)",
    _scored,
    lambda z, target, *terms: tuple(z.new_empty(z.shape[0], dtype=_loss_dtype(z)) for _ in range(2)),
)
_slope_op = define(
    f"cross_entropy_backward(Tensor z, Tensor target, Tensor lse, Tensor upstream, {TERMS}) -> Tensor",
    _scored_backward,
    lambda z, *rest: z.new_empty(z.shape),
)


SPLIT = "cross_entropy: the gradient has no derivative where a process_group splits the vocabulary"


def _formula(z: Tensor, target: Tensor, t: Terms) -> Tensor:
    """The losses of rows of logits by operators that PyTorch differentiates as often as one likes."""
    return losses(*measure(z, target, t), target, t)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, t: Terms) -> Tensor:
    """The same of the logits of a head."""
    return _formula(_logits(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)), target, t)


class _Summed(torch.autograd.Function):
    """The sum of the losses. Gradients come with it, unweighted: the one number that is known only later scales them. Their derivative is
    the formula's, for which x and the head are kept and whose logits exist all at once."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        loss, _, dx, dw, db = _head_op(*args)
        return loss.sum(), dx, dw, db

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:4], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.terms, ctx.given = inputs[8:], len(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (*x, target), found = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        need, t = ctx.needs_input_grad[:3], Terms(*ctx.terms)

        def find(x: Tensors, dy: Tensors, beside: Tensors) -> Tensors:
            factor = dy[0].view(1)  # one axis: a number without axes would be rounded to the gradient's own dtype first
            each = [(d, y.dtype) if y is not None and w else None for d, y, w in zip(beside[1:], x, need)]
            if not torch.compiler.is_compiling() and any(map(many, (factor, *beside))):
                return [None if e is None else (e[0] * factor).to(e[1]) for e in each]
            return [None if e is None else torch.mul(e[0], factor, out=torch.empty_like(e[0], dtype=e[1])) for e in each]

        def plain(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *_: Tensor) -> Tensors:
            return (_linear(x, weight, bias, target, t).sum(),)

        d = gradients(find, SPLIT if t.group else plain, need, x, grads[:1], (target, *found))
        return *d, *[None] * (ctx.given - 3)


_summed_function = differentiable(_Summed)


class _Each(torch.autograd.Function):
    """The loss of every token. Each gradient has a weight of its own, known only later: the logits are computed again then."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        loss, lse, *_ = _head_op(*args)
        return loss, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:4], output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.rows, ctx.terms, ctx.given = inputs[6], inputs[8:], len(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *x, target, lse = ctx.saved_tensors
        rows, terms, t = ctx.rows, ctx.terms, Terms(*ctx.terms)

        def find(x: Tensors, dy: Tensors, beside: Tensors) -> Tensors:
            d = _head_op(*x, *beside, dy[0].contiguous(), rows, True, *terms)[2:]
            return [None if y is None else t.to(y.dtype) for t, y in zip(d, x)]

        def plain(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, _: Tensor) -> Tensors:
            return (_linear(x, weight, bias, target, t),)

        d = gradients(find, SPLIT if t.group else plain, ctx.needs_input_grad[:3], x, grads[:1], (target, lse))
        return *d, *[None] * (ctx.given - 3)


_each_function = differentiable(_Each)


class _Scored(torch.autograd.Function):
    """The loss of every row of logits."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return _score_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:2], output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.terms = inputs[2:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        z, *beside = ctx.saved_tensors
        terms, t = ctx.terms, Terms(*ctx.terms)
        find = lambda x, dy, beside: (_slope_op(*x, *beside, dy[0].contiguous(), *terms),)
        plain = lambda z, target, _: (_formula(z, target, t),)
        return *gradients(find, SPLIT if t.group else plain, (True,), (z,), grads[:1], beside), *[None] * (len(terms) + 1)


_scored_function = differentiable(_Scored)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    process_group: ProcessGroup | None = None,
    first_class: int | None = None,
) -> Tensor:
    """Cross entropy of logits, in nats, float32 (float64 of float64 logits); the formula is this file's first lines.

    Args:
        logits: [..., V]; any float dtype. Computed in float32 at least.
        target: [...] int64 class of each row; rows whose class is `ignore_index` have loss 0 and gradient 0.
        reduction: "mean" over the rows that are not ignored (0 when all are), "sum", or "none": a loss for each row, of target's shape.
        label_smoothing: share of the weight spread over all classes, 0 to 1.
        z_loss: weight of lse^2.
        scale, softcap: of the logits; softcap 0 is none.
        process_group: the vocabulary is split over its ranks, which all hold the same targets; every rank gets the whole loss.
        first_class: this rank's first class; None on all ranks: they hold equal shares in their order. Given, ranks tell each other how
            many classes they hold, for which they wait.

    Raises:
        ValueError: shapes that do not fit, numbers out of range, a class that does not exist (read on the CPU alone: on a GPU such a row's
            loss is NaN, and nothing waits for the device); TypeError: dtypes.
    """
    name = "cross_entropy"
    _check(name, "logits", logits, target, reduction)
    t = _terms(name, logits.shape[-1], target, ignore_index, label_smoothing, z_loss, scale, softcap, process_group, first_class)
    flat = target.reshape(-1)
    loss, _ = _scored_function(logits.reshape(-1, logits.shape[-1]), flat, *t)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / _count(flat, t)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    process_group: ProcessGroup | None = None,
    first_class: int | None = None,
    rows: int | None = None,
) -> Tensor:
    """`cross_entropy` of the logits x weight' + bias, which exist for `rows` tokens at a time only.

    Gradients are found with the loss, while a block's logits are at hand; with reduction="none" each row's incoming gradient is its own,
    so its logits are computed a second time in the backward pass. Gradients of weight and bias are summed in float32.

    Args:
        x: [..., D]. Under autocast the products are in autocast's dtype.
        weight: [V, D], x's dtype (under autocast any).
        target: [...] int64.
        bias: [V] or None.
        rows: tokens of a block; by default as many as have 256 MiB of logits on a GPU (2048 at least), 16 MiB on a CPU.
        Others, and the result: see `cross_entropy`. With `process_group`, weight and bias are the rank's share; x's gradient is the whole.

    Raises:
        ValueError, TypeError: as `cross_entropy`, naming the argument.
    """
    name = "linear_cross_entropy"
    check_tensors(name, None, ("weight",), x=x, weight=weight, bias=bias)
    _check(name, "x", x, target, reduction)
    D = x.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != D or weight.shape[0] < 1:
        raise ValueError(f"{name}: weight must be [V, D] with D = {D} and V >= 1, got {list(weight.shape)}")
    V = weight.shape[0]
    if bias is not None and bias.shape != (V,):
        raise ValueError(f"{name}: bias must be [V] = [{V}], got {list(bias.shape)}")
    if rows is not None and not (is_whole(rows) and rows >= 1):
        raise ValueError(f"{name}: rows must be a whole number, at least 1, got {rows}")
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    elif any(y is not None and y.dtype != x.dtype for y in (weight, bias)):
        raise TypeError(
            f"{name}: weight and bias must have x's dtype {x.dtype}, got {weight.dtype}" + (f", {bias.dtype}" if bias is not None else "")
        )
    t = _terms(name, V, target, ignore_index, label_smoothing, z_loss, scale, softcap, process_group, first_class)
    flat = target.reshape(-1)
    if rows is None:
        rows = max(LEAST if x.is_cuda else 1, BLOCK.get(x.device.type, BLOCK["cuda"]) // (V * x.element_size()) // 64 * 64 or 1)
    grad = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (x, weight, bias))
    apply = _each_function if reduction == "none" else _summed_function
    given = (x.reshape(-1, D), weight, bias, flat, None, None, rows, grad and reduction != "none", *t)
    loss = apply(*given)[0]
    if reduction == "none":
        return loss.view(target.shape)
    return loss if reduction == "sum" else loss / _count(flat, t)


def _count(target: Tensor, t: Terms) -> Tensor:
    return (target != t.ignore_index).sum().clamp(min=1)


def _check(name: str, label: str, x: Tensor, target: Tensor, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if isinstance(target, Tensor) and target.dtype != torch.int64:
        raise TypeError(f"{name}: target must be int64, got {target.dtype}")
    check_tensors(name, {"target": target}, ("target",), **{label: x})
    if x.ndim < 1:
        raise ValueError(f"{name}: {label} must be [..., {'V' if label == 'logits' else 'D'}], got a number")
    if target.shape != x.shape[:-1]:
        raise ValueError(f"{name}: target must be {list(x.shape[:-1])} like {label} without its last axis, got {list(target.shape)}")


def _terms(
    name: str, V: int, target: Tensor, ignore_index: int, smoothing: float, z_loss: float, scale: float, softcap: float,
    group: ProcessGroup | None, first: int | None,
) -> Terms:  # fmt: skip
    if V < 1:
        raise ValueError(f"{name}: there must be at least one class, got V = {V}")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing must be from 0 to 1, got {smoothing}")
    if not is_whole(ignore_index):
        raise TypeError(f"{name}: ignore_index must be a whole number, got {ignore_index!r}")
    if not softcap >= 0:
        raise ValueError(f"{name}: softcap must be at least 0, got {softcap}")
    classes = V
    if group is not None:
        from torch import distributed

        classes = V * distributed.get_world_size(group)
        if first is None:
            first = distributed.get_rank(group) * V
        else:
            shares: list[Any] = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(shares, V, group=group)
            classes = sum(shares)
    elif first is not None:
        raise ValueError(f"{name}: first_class belongs to a process_group, which is not given")
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        target = unwrapped(target)
        wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
        if bool(wrong.any()):
            raise ValueError(
                f"{name}: target must be classes 0 to {classes - 1} or ignore_index = {ignore_index}, got {target[wrong][0].item()}"
            )
    name_of = "" if group is None else group.group_name
    return Terms(ignore_index, float(smoothing), float(z_loss), float(scale), float(softcap), first or 0, classes, name_of)


__all__ = ["cross_entropy", "linear_cross_entropy"]
