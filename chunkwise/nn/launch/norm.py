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


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, eps: float, groups: int,
    kind: str, activation: str, out: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y in `out` or h's dtype, h in the wider of x's and residual's), h empty without a residual."""
    (a, sx), (r, sr), (g, sg) = (rows(x if t is None else t) for t in (x, residual, gate))
    wider = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = torch.empty(x.shape, dtype=out or wider, device=x.device)
    h = y if residual is None else torch.empty_like(y, dtype=wider)
    R, D = a.shape[0], a.shape[1] // groups
    if y.numel():
        c = tile(R, D, AHEAD)
        start(
            norm_kernel, (-(-R // c.BR), groups),
            a, r, x if weight is None else weight, x if bias is None else bias, g, y, h, sx, sr, sg, R, eps, D=D, BR=c.BR, BD=c.BD,
            CENTER=kind == "layer", MEAN=kind != "l2", RESIDUAL=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None,
            GATE=activation if gate is not None else "", warps=c.num_warps,
        )  # fmt: skip
    return y, x.new_empty(0) if residual is None else h


def backward(
    h: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, dy: Tensor, dh: Tensor | None, eps: float, groups: int,
    kind: str, activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dweight, dbias, dgate); empty where there is nothing to differentiate."""
    (a, sh), (g, sg), (u, sy), (d, sd) = (rows(h if t is None else t) for t in (h, gate, dy, dh))
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    dgate = torch.empty_like(dx, dtype=gate.dtype) if gate is not None else h.new_empty(0)
    R, D = a.shape[0], a.shape[1] // groups
    c = tile(R, D, BACK)
    count = -(-R // c.BR)
    blocks = max(1, -(-count // PROGRAMS))
    programs = -(-count // blocks)
    parts = [torch.empty(programs if t is not None else 0, groups * D, dtype=torch.float32, device=h.device) for t in (weight, bias)]
    if dx.numel():
        start(
            norm_grad_kernel, (programs, groups),
            a, h if weight is None else weight, h if bias is None else bias, g, u, d, dx, dgate, *parts, sh, sg, sy, sd, R, blocks, eps,
            D=D, BR=c.BR, BD=c.BD, CENTER=kind == "layer", MEAN=kind != "l2", DH=dh is not None, WEIGHT=weight is not None,
            BIAS=bias is not None, GATE=activation if gate is not None else "", warps=c.num_warps,
        )  # fmt: skip
    dw, db = (h.new_empty(0) if t is None else part.sum(0).to(t.dtype) for t, part in zip((weight, bias), parts))
    return dx, dw, db, dgate
