"""Rotary position embedding, from each token's position: no tables, so nothing grows, is saved or goes stale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine.derivative import singly
from .boundary import check_tensors, define, differentiable, uses_kernels


def _turned(x: Tensor, positions: Tensor, theta: float, interleaved: bool, back: bool) -> Tensor:
    from .launch.rotary import turn

    return turn(x, positions, theta, interleaved, back)


_turn_op = define(
    "rotary(Tensor x, Tensor positions, float theta, bool interleaved, bool back) -> Tensor", _turned, lambda x, *_: x.new_empty(x.shape)
)


class _Rotary(torch.autograd.Function):
    """The kernel; its gradient is the turn back, whose gradient is the turn again."""

    @staticmethod
    def forward(x: Tensor, positions: Tensor, theta: float, interleaved: bool, back: bool) -> Tensor:
        return _turn_op(x, positions, theta, interleaved, back)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, positions, *ctx.how = inputs
        ctx.save_for_backward(positions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        how = (*ctx.saved_tensors, *ctx.how[:2], not ctx.how[2])
        if torch.compiler.is_compiling():
            return _turn_op(*grads, *how), None, None, None, None
        turn = _rotary_function if torch.is_grad_enabled() else _turn_op
        (d,) = singly(lambda dy: (turn(*dy, *how),), grads)
        return d, None, None, None, None


_rotary_function = differentiable(_Rotary)


def rotary(x: Tensor, positions: Tensor, theta: float = 10000.0, *, interleaved: bool = False) -> Tensor:
    """Turn the pairs (x_i, x_{i + K/2}) of every head, interleaved (x_2i, x_{2i+1}), by positions * theta^(-2i/K).

    Args:
        x: [B, T, H, K], K even.
        positions: [B or 1, T] integers: offsets and packed documents are whatever these say. Angles are computed in float64,
            so that far positions keep their phase.
        theta: the base of the wavelengths, positive.

    Returns:
        [B, T, H, K] in x's dtype, computed in float32 for half types.

    Raises:
        ValueError: K is odd, theta is not positive, or positions do not fit x; TypeError: dtypes.

    Su et al. RoFormer: Enhanced Transformer with Rotary Position Embedding. 2021.
    """
    check_tensors("rotary", {"positions": positions}, ("positions",), x=x)
    if x.ndim != 4:
        raise ValueError(f"rotary: x must be [B, T, H, K], got {list(x.shape)}")
    B, T, _, K = x.shape
    if K % 2:
        raise ValueError(f"rotary: the head size K must be even, got {K}")
    if not theta > 0:
        raise ValueError(f"rotary: theta must be positive, got {theta}")
    if positions.ndim != 2 or positions.shape[0] not in (1, B) or positions.shape[1] != T:
        raise ValueError(f"rotary: positions must be [{B}, {T}] or [1, {T}], got {list(positions.shape)}")
    if uses_kernels(x) and K <= 1024 and B < 2**16:
        return _rotary_function(x, positions, float(theta), interleaved, False)
    pair = torch.arange(K // 2, device=x.device, dtype=torch.float64)
    angle = positions.to(torch.float64)[..., None, None] * theta ** (pair * (-2.0 / K))  # [B or 1, T, 1, K/2]
    half = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(half), angle.sin().to(half)
    if interleaved:
        a, b = x.to(half).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)
    a, b = x.to(half).chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
