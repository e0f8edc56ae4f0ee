"""Preconditioned Kimi delta attention: KDA that writes along keys rescaled by what their channels have seen already.

Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences. 2026. https://arxiv.org/abs/2604.21100
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..gate import log_decay, write_strength
from ..linear import Linear
from .preconditioner import Preconditioned


class PrecondKDA(Preconditioned):
    """`lower_bound` (a negative number) bounds the gate: g = lower_bound * sigmoid(exp(A_log) (f + dt_bias))."""

    op = "precond_kda"
    beside = ("b", "a", "b_atk")
    gate_activation = "sigmoid"

    def __init__(self, hidden_size: int, num_heads: int, *, lower_bound: float | None = None, **options: Any):
        super().__init__(hidden_size, num_heads, **options)
        if lower_bound is not None and not lower_bound < 0:
            raise ValueError(f"precond_kda: lower_bound must be negative, got {lower_bound}")
        self.lower_bound = lower_bound
        channels = self.num_v_heads * self.head_k_dim
        self.f_proj = nn.Sequential(
            Linear(hidden_size, self.head_v_dim, bias=False), Linear(self.head_v_dim, channels, bias=False)
        )
        for name, heads in zip(self.beside, (self.num_v_heads, self.num_k_heads, self.num_k_heads), strict=True):
            self.add_module(f"{name}_proj", Linear(hidden_size, heads, bias=False))
        self.finish()

    def gate_projection(self, hidden_size: int, out: int) -> nn.Module:
        return nn.Sequential(Linear(hidden_size, self.head_v_dim, bias=False), Linear(self.head_v_dim, out))

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        return self.gates(device, self.num_v_heads * self.head_k_dim)

    def streams(self, x: Tensor, *beside: Tensor) -> dict[str, Tensor]:
        b, a_atk, b_atk = beside  # [B, T, HV], [B, T, H] twice
        g = log_decay(self.f_proj(x).unflatten(-1, (self.num_v_heads, -1)), self.A_log, self.dt_bias, self.lower_bound)  # [B, T, HV, K]
        return {"g": g, "beta": write_strength(b, self.strength), **self.written(a_atk, b_atk)}
