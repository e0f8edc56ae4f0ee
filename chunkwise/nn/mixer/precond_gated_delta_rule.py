"""Preconditioned Gated DeltaNet: Gated DeltaNet that writes along keys rescaled by what their channels have seen already.

Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences. 2026. https://arxiv.org/abs/2604.21100
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gate import log_decay, write_strength
from ..linear import Linear
from .preconditioner import Preconditioned


class PrecondGatedDeltaNet(Preconditioned):
    op = "precond_gated_delta_rule"
    beside = ("a", "b", "a_atk", "b_atk")
    expand_v = 2.0

    def __init__(self, hidden_size: int, num_heads: int, **options: Any):
        super().__init__(hidden_size, num_heads, **options)
        for name, heads in zip(self.beside, 2 * [self.num_v_heads] + 2 * [self.num_k_heads], strict=True):
            self.add_module(f"{name}_proj", Linear(hidden_size, heads, bias=False))
        self.finish()

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        return self.gates(device, self.num_v_heads)

    def streams(self, x: Tensor, *beside: Tensor) -> dict[str, Tensor]:
        a, b, a_atk, b_atk = beside  # [B, T, HV] twice, [B, T, H] twice
        gate = {"g": log_decay(a, self.A_log, self.dt_bias), "beta": write_strength(b, self.strength)}
        return {**gate, **self.written(a_atk, b_atk)}
