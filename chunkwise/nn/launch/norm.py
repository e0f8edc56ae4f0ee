"""Norms, forward and backward, in one pass each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.norm import norm_grad_kernel, norm_kernel
from .row import rows, start


class Tile(NamedTuple):
    """Rows and columns of a block, and the warps that share it."""

    BR: int
    BD: int
    num_warps: int


AHEAD, BACK = 4096, 2048  # elements of a block
PROGRAMS = 1056  # of the backward pass: a few a multiprocessor, each adding the gradients of weight and bias over its rows


def tile(R: int, D: int, elements: int) -> Tile:
    """Blocks of that many elements, whole rows; few rows are spread over the multiprocessors."""
    BD = max(16, 1 << (D - 1).bit_length())
    BR = max(1, elements // BD)
    while BR > 1 and R < BR * 264:
        BR //= 2
    return Tile(BR, BD, max(1, min(16, BR * BD // 512)))


def _side_by_side(groups: int, *tensors: Tensor | None) -> bool:
    """Whether some rows [..., H, V] are heads of wider rows: as rows [..., H * V] of H groups they are read where they lie. Many more than
    a layer has heads are tokens, cut from longer samples: a group each would leave a program nothing to add over."""
    given = [t for t in tensors if t is not None and t.ndim > 2 and t.shape[-2] <= PROGRAMS and not t.is_contiguous()]
    return groups == 1 and any(t.stride(-1) == 1 and t.stride(-2) == t.shape[-1] for t in given)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, eps: float, groups: int,
    kind: str, activation: str, out: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(y in `out` or h's dtype, h in the wider of x's and residual's, None without a residual).

    weight, bias: [channels of all groups], or of one and shared.
    """
    if _side_by_side(groups, x, residual, gate):
        r, g = (None if t is None else t.flatten(-2) for t in (residual, gate))
        y, h = forward(x.flatten(-2), r, weight, bias, g, eps, x.shape[-2], kind, activation, out)
        return y.view(x.shape), None if h is None else h.view(x.shape)
    (a, sx), (b, sb), (c, sc) = (rows(x if t is None else t) for t in (x, residual, gate))
    wider = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = torch.empty(x.shape, dtype=out or wider, device=x.device)
    h = y if residual is None else torch.empty_like(y, dtype=wider)
    if n := y.numel():
        D = x.shape[-1] // groups
        R = n // x.shape[-1]
        t = tile(R, D, AHEAD)
        start(
            norm_kernel, (-(-R // t.BR), groups),
            a, b, x if weight is None else weight, x if bias is None else bias, c, y, h, sx, sb, sc, R, eps, D=D, BR=t.BR, BD=t.BD,
            CENTER=kind == "layer", MEAN=kind != "l2", RESIDUAL=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None,
            GATE=activation if gate is not None else "", SHARED=_shared(groups, D, weight, bias), warps=t.num_warps,
        )  # fmt: skip
    return y, None if residual is None else h


def _shared(groups: int, D: int, *parameters: Tensor | None) -> bool:
    """Whether weight and bias are those of one group."""
    return groups > 1 and any(p is not None and p.shape[0] == D for p in parameters)


def backward(
    h: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, dy: Tensor, dh: Tensor | None, eps: float, groups: int,
    kind: str, activation: str,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dx, dweight, dbias, dgate); None where there is nothing to differentiate."""
    if _side_by_side(groups, h, gate, dy, dh):
        g, d = (None if t is None else t.flatten(-2) for t in (gate, dh))
        dx, dw, db, dg = backward(h.flatten(-2), weight, bias, g, dy.flatten(-2), d, eps, h.shape[-2], kind, activation)
        return dx.view(h.shape), dw, db, None if dg is None else dg.view(h.shape)
    (a, sh), (b, sg), (u, sy), (v, sd) = (rows(h if t is None else t) for t in (h, gate, dy, dh))
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    dgate = None if gate is None else torch.empty_like(dx, dtype=gate.dtype)
    D = h.shape[-1] // groups
    R = dx.numel() // max(1, h.shape[-1])
    c, shared = tile(R, D, BACK), _shared(groups, D, weight, bias)
    count = -(-R // c.BR)
    blocks = max(1, -(-count // (PROGRAMS // groups if shared else PROGRAMS)))
    programs = -(-count // blocks)
    parts = [None if t is None else torch.empty(programs, groups * D, dtype=torch.float32, device=h.device) for t in (weight, bias)]
    if dx.numel():
        start(
            norm_grad_kernel, (programs, groups),
            a, h if weight is None else weight, h if bias is None else bias, b, u, v, dx, dx if dgate is None else dgate,
            *(dx if part is None else part for part in parts), sh, sg, sy, sd, R, blocks, eps, D=D, BR=c.BR, BD=c.BD,
            CENTER=kind == "layer", MEAN=kind != "l2", DH=dh is not None, WEIGHT=weight is not None, BIAS=bias is not None,
            GATE=activation if gate is not None else "", SHARED=shared, warps=c.num_warps,
        )  # fmt: skip
    dw, db = (None if t is None or p is None else p.view(-1, t.shape[0]).sum(0).to(t.dtype) for t, p in zip((weight, bias), parts))
    return dx, dw, db, dgate
