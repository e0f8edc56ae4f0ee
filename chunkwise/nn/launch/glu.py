"""Gated linear units, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.glu import glu_grad_kernel, glu_kernel
from .row import start

BLOCK = 2048  # elements of a program


def forward(a: Tensor, b: Tensor, activation: str) -> Tensor:
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if n := y.numel():
        start(glu_kernel, -(-n // BLOCK), a.contiguous(), b.contiguous(), y, n, warps=8, GATE=activation, BLOCK=BLOCK)
    return y


def backward(a: Tensor, b: Tensor, dy: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    da, db = (torch.empty(a.shape, dtype=a.dtype, device=a.device) for _ in range(2))
    if n := a.numel():
        tensors = (t.contiguous() for t in (a, b, dy))
        start(glu_grad_kernel, -(-n // BLOCK), *tensors, da, db, n, warps=8, GATE=activation, BLOCK=BLOCK)
    return da, db
