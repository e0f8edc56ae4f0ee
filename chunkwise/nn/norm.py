"""Root-mean-square norms, plain and gated, and the L2 norm of keys and queries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .activation import activation as activation_named


def wide(x: Tensor) -> Tensor:
    """x in the dtype that norms and gates are computed in: float32 for half types, unchanged otherwise."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis, computed in float32; a zero row stays zero. Same shape and dtype as x."""
    y = wide(x)
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in the wide dtype."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.to(y.dtype)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32, returned in x's dtype.

    Zhang, Sennrich. Root Mean Square Layer Normalization. NeurIPS 2019.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, *, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return _rms(x, self.weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class GatedRMSNorm(nn.Module):
    """RMSNorm(x) * act(gate), both [..., D]: the output norm of gated linear-attention layers.

    Raises:
        ValueError: `activation` is neither "silu" nor "sigmoid"; x and gate differ in shape.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "silu", *, device=None, dtype=None):
        if activation not in ("silu", "sigmoid"):
            raise ValueError(f"GatedRMSNorm: activation must be 'silu' or 'sigmoid', got {activation!r}")
        super().__init__()
        self.eps, self.activation = eps, activation
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.shape != gate.shape:
            raise ValueError(f"GatedRMSNorm: gate must have x's shape {list(x.shape)}, got {list(gate.shape)}")
        return (_rms(x, self.weight, self.eps) * activation_named(self.activation)(wide(gate))).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, activation={self.activation!r}"


__all__ = ["GatedRMSNorm", "RMSNorm", "l2norm", "wide"]
