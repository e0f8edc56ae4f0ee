"""Gated linear units, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.glu import glu_grad_kernel, glu_kernel
from ..mlp import HALF
from .row import start

BLOCK = 2048  # elements of a program, at most


def forward(a: Tensor, b: Tensor, activation: str) -> Tensor:
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if n := y.numel():
        start(glu_kernel, -(-n // BLOCK), a.contiguous(), b.contiguous(), y, n, warps=8, GATE=activation, BLOCK=BLOCK, D=0)
    return y


def backward(a: Tensor, b: Tensor, dy: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    da, db = (torch.empty(a.shape, dtype=a.dtype, device=a.device) for _ in range(2))
    if n := a.numel():
        tensors = (t.contiguous() for t in (a, b, dy))
        start(glu_grad_kernel, -(-n // BLOCK), *tensors, da, db, n, warps=8, GATE=activation, BLOCK=BLOCK, D=0)
    return da, db


def forward_halves(ab: Tensor, activation: str) -> Tensor:
    """[.., 2 D] -> [.., D], D a multiple of HALF."""
    ab = ab.contiguous()
    D = ab.shape[-1] // 2
    y = torch.empty((*ab.shape[:-1], D), dtype=ab.dtype, device=ab.device)
    if n := y.numel():
        block = _block(D)
        start(glu_kernel, n // block, ab, ab.narrow(-1, D, D), y, n, warps=block // HALF, GATE=activation, BLOCK=block, D=D)
    return y


def backward_halves(ab: Tensor, dy: Tensor, activation: str) -> Tensor:
    ab = ab.contiguous()
    D, dab = ab.shape[-1] // 2, torch.empty(ab.shape, dtype=ab.dtype, device=ab.device)
    if n := dy.numel():
        block = _block(D)
        a, b, da, db = (t.narrow(-1, i * D, D) for t in (ab, dab) for i in range(2))
        start(
            glu_grad_kernel, n // block, a, b, dy.contiguous(), da, db, n, warps=block // HALF, GATE=activation, BLOCK=block, D=D
        )  # fmt: skip
    return dab


def _block(D: int) -> int:
    return min(BLOCK, D & -D)
