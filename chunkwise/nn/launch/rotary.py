"""Rotary position embedding; the gradient is the turn back."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from ...kernels.rotary import rotary_kernel


def turn(x: Tensor, positions: Tensor, theta: float, interleaved: bool, back: bool) -> Tensor:
    """x [B, T, H, K] turned by positions [B or 1, T], or back."""
    B, T, H, K = x.shape
    x = x if x.stride(3) == 1 and (H == 1 or x.stride(2) == K) and (B == 1 or x.stride(0) == T * x.stride(1)) else x.contiguous()
    y = torch.empty(B, T, H, K, dtype=x.dtype, device=x.device)
    if y.numel():
        BP = max(8, 1 << (K // 2 - 1).bit_length())
        BT = max(1, min(2048 // BP, -(-B * T // 264)))
        BT = 1 << (BT - 1).bit_length()
        at, log2_theta = positions.contiguous(), math.log2(theta)
        coarse = ctypes.c_float(log2_theta).value  # kernels get float32
        rotary_kernel[(-(-T // BT), B)](
            x, at, y, x.stride(1), at.shape[1] if at.shape[0] > 1 else 0, T, H, coarse, log2_theta - coarse, -1.0 if back else 1.0,
            K=K, BT=BT, BP=BP, INTERLEAVED=interleaved, num_warps=max(1, min(8, BT * BP // 256)),
        )  # fmt: skip
    return y
