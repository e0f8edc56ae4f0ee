"""Kimi Delta Attention: the delta rule on a state whose key channels each forget at their own rate.

Kimi Team. Kimi Linear: An Expressive, Efficient Attention Architecture. 2025.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..linear import Linear
from .skeleton import HeadMixer, MixerOptions, mamba_gate_values


class KimiDeltaAttention(HeadMixer):
    """`lower_bound` (a negative number) bounds the gate: g = lower_bound * sigmoid(exp(A_log) (f + dt_bias))."""

    op = "kda"
    beside = ("b",)
    use_short_conv = True
    qkv_activation = "silu"
    gate_activation = "sigmoid"
    op_options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    keep_float32 = ("A_log", "dt_bias")
    A_log: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        **options: Unpack[MixerOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        if lower_bound is not None and not lower_bound < 0:
            raise ValueError(f"kda: lower_bound must be negative, got {lower_bound}")
        self.allow_neg_eigval = allow_neg_eigval  # beta in (0, 2): I - beta k k' may reflect
        self.lower_bound = lower_bound
        channels = self.num_v_heads * self.head_k_dim
        self.f_proj = nn.Sequential(
            Linear(hidden_size, self.head_v_dim, bias=False), Linear(self.head_v_dim, channels, bias=False)
        )
        self.b_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.finish()

    def gate_projection(self, hidden_size: int, out: int) -> nn.Module:
        return nn.Sequential(Linear(hidden_size, self.head_v_dim, bias=False), Linear(self.head_v_dim, out))

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        return mamba_gate_values(self.num_v_heads, self.num_v_heads * self.head_k_dim, device)

    def streams(self, x: Tensor, *beside: Tensor) -> dict[str, Tensor]:
        return {"g": self.f_proj(x).unflatten(-1, (self.num_v_heads, -1)), "beta": beside[0]}  # [B, T, HV, K], [B, T, HV]

    def call_options(self) -> dict[str, Any]:
        gate = {"A_log": self.spread(self.A_log), "dt_bias": self.spread(self.dt_bias), "lower_bound": self.lower_bound}
        return {**gate, "allow_neg_eigval": self.allow_neg_eigval}
