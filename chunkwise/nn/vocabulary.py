"""The softmax over the vocabulary, row by row of logits, and the slope of the loss; the vocabulary may be split over processes.

The formula is loss.py's. Each stage has a form in PyTorch, which is also its kernel's oracle, and one in Triton (launch/loss.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .boundary import uses_kernels
from .norm import wide

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Terms(NamedTuple):
    """What the loss is made of. `classes` counts the whole vocabulary; `first` is this shard's first class."""

    ignore_index: int
    smoothing: float
    z_loss: float
    scale: float
    softcap: float
    first: int
    classes: int
    group: str  # name of the process group that the vocabulary is split over; "" is none


TERMS = "int ignore_index, float smoothing, float z_loss, float scale, float softcap, int first, int classes, str group"  # in a schema


def measure(z: Tensor, target: Tensor, t: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """Of every row of logits z [R, V]: lse(s), the log probability s_y - lse(s) (0 where the shard lacks y) and sum(s), each [R], wide."""
    s = _scores(z, t)
    own = target - t.first
    mine = (own >= 0) & (own < z.shape[1])
    most = s.amax(1)
    rest = (s - most.unsqueeze(1)).exp_().sum(1).log_()  # lse - most: added to nothing large where the two large ones cancel
    hit = s.gather(1, own.clamp(0, z.shape[1] - 1).unsqueeze(1)).squeeze(1) - most - rest
    return most + rest, torch.where(mine, hit, 0), s.sum(1) if t.smoothing else torch.zeros_like(hit)


def slope_(z: Tensor, target: Tensor, lse: Tensor, weight: Tensor | None, t: Terms) -> None:
    """Put dL/dz in place of the logits z [R, V], each row times its weight [R]; zero where the label is ignored."""
    s = _scores(z, t)
    bend = None if not t.softcap else (1 - (s / t.softcap).square()) * t.scale
    own = target - t.first
    mine = ((own >= 0) & (own < z.shape[1])).to(s.dtype)
    d = s.sub_(lse.unsqueeze(1)).exp_().mul_((1 + 2 * t.z_loss * lse).unsqueeze(1))
    if t.smoothing:
        d -= t.smoothing / t.classes
    d.scatter_add_(1, own.clamp(0, z.shape[1] - 1).unsqueeze(1), (mine * (t.smoothing - 1)).unsqueeze(1))
    d = d.mul_(t.scale) if bend is None else d.mul_(bend)
    if weight is not None:
        d *= weight.unsqueeze(1)
    z.copy_(d.masked_fill_((target == t.ignore_index).unsqueeze(1), 0))


def _scores(z: Tensor, t: Terms) -> Tensor:
    """s of the logits z, in memory of its own."""
    if t.softcap:
        return torch.tanh(wide(z) * (t.scale / t.softcap)) * t.softcap
    return wide(z) * t.scale


def score(z: Tensor, target: Tensor, t: Terms, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """lse, s_y - lse and sum(s) of the whole vocabulary [R]; with `grad`, dL/dz in place of the logits z [R, V]."""
    if uses_kernels(z):
        from .launch import loss

        if not t.group:
            return loss.rows(z, target, t, grad=grad)
        lse, hit, total = loss.rows(z, target, t, grad=False)
    else:
        lse, hit, total = measure(z, target, t)
    if t.group:
        lse, hit, total = _gathered(lse, hit, total, target, z.shape[1], t)
    if grad:
        slopes_(z, target, lse, None, t)
    return lse, hit, total


def slopes_(z: Tensor, target: Tensor, lse: Tensor, weight: Tensor | None, t: Terms) -> None:
    if uses_kernels(z):
        from .launch import loss

        loss.slopes_(z, target, lse, weight, t)
    else:
        slope_(z, target, lse, weight, t)


def group_of(t: Terms) -> ProcessGroup:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(t.group)  # type: ignore[arg-type]


def _gathered(lse: Tensor, hit: Tensor, total: Tensor, target: Tensor, V: int, t: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """The same of all shards, from those of one with V classes."""
    from torch import distributed

    most = lse.clone()
    distributed.all_reduce(most, distributed.ReduceOp.MAX, group=group_of(t))
    mine = (target >= t.first) & (target < t.first + V)
    hit = torch.where(mine, hit + (lse - most), 0)
    sums = torch.stack([(lse - most).exp(), hit, total])
    distributed.all_reduce(sums, group=group_of(t))
    rest = sums[0].log()
    return most + rest, sums[1] - rest, sums[2]


def losses(lse: Tensor, hit: Tensor, total: Tensor, target: Tensor, t: Terms) -> Tensor:
    """L of every row [R]; 0 where the label is ignored, NaN where there is no such class."""
    loss = -hit
    if t.smoothing:
        loss = (1 - t.smoothing) * loss + t.smoothing * (lse - total / t.classes)
    if t.z_loss:
        loss = loss + t.z_loss * lse.square()
    loss = loss.masked_fill((target < 0) | (target >= t.classes), float("nan"))
    return loss.masked_fill(target == t.ignore_index, 0)
