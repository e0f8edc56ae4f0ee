"""Cross entropy over rows of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.loss import loss_kernel
from ..vocabulary import Terms


def rows(z: Tensor, target: Tensor, t: Terms, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """lse, s_y - lse and sum(s) [R] of logits z [R, V]; with `grad`, dL/dz in place of them."""
    R = z.shape[0]
    lse, hit = (torch.empty(R, dtype=torch.float32, device=z.device) for _ in range(2))
    total = torch.empty_like(lse) if t.smoothing else torch.zeros_like(lse)
    _launch(z, target, lse, hit, total, None, t, MEASURE=True, SLOPE=grad)
    return lse, hit, total


def slopes_(z: Tensor, target: Tensor, lse: Tensor, weight: Tensor | None, t: Terms) -> None:
    """dL/dz in place of the logits, each row times its weight."""
    _launch(z, target, lse, lse, lse, weight, t, MEASURE=False, SLOPE=True)


def _launch(
    z: Tensor, target: Tensor, lse: Tensor, hit: Tensor, total: Tensor, weight: Tensor | None, t: Terms, MEASURE: bool, SLOPE: bool
) -> None:
    R, V = z.shape
    if R == 0:
        return
    BV = min(4096, max(16, 1 << (V - 1).bit_length()))
    loss_kernel[(R,)](
        z, target.contiguous(), lse.contiguous(), hit, total, lse if weight is None else weight, z.stride(0), t.ignore_index, t.first,
        t.scale, t.softcap or 1.0, t.smoothing, t.smoothing / t.classes, t.z_loss,
        V=V, BV=BV, CAP=bool(t.softcap), SUM=bool(t.smoothing), WEIGHT=weight is not None, MEASURE=MEASURE, SLOPE=SLOPE,
        num_warps=8 if BV >= 2048 else 4,
    )  # fmt: skip
