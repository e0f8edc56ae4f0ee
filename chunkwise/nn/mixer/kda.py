"""Kimi Delta Attention: the delta rule on a state whose key channels each forget at their own rate.

Kimi Team. Kimi Linear: An Expressive, Efficient Attention Architecture. 2025.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from ..norm import wide
from .skeleton import HeadMixer, MixerOptions, log_softplus_gate, mamba_gate_values


class KimiDeltaAttention(HeadMixer):
    """`lower_bound` (a negative number) bounds the gate: g = lower_bound * sigmoid(exp(A_log) (f + dt_bias))."""

    op = "kda"
    use_short_conv = True
    qkv_activation = "silu"
    gate_activation = "sigmoid"
    op_options = {"use_qk_l2norm_in_kernel": True}
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
        self.beta_scale = 2.0 if allow_neg_eigval else 1.0  # beta in (0, 2): I - beta k k' may reflect
        self.lower_bound = lower_bound
        channels = self.num_v_heads * self.head_k_dim
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, channels, bias=False)
        )
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.finish()

    def gate_projection(self, hidden_size: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Linear(hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, out))

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        return mamba_gate_values(self.num_v_heads, self.num_v_heads * self.head_k_dim, device)

    def streams(self, x: Tensor) -> dict[str, Tensor]:
        f = self.f_proj(x).unflatten(-1, (self.num_v_heads, -1))  # [B, T, HV, K]
        A_log, dt_bias = self.A_log.unsqueeze(-1), self.dt_bias.view(self.num_v_heads, -1)
        if self.lower_bound is None:
            g = log_softplus_gate(f, A_log, dt_bias)
        else:
            g = self.lower_bound * (wide(A_log).exp() * (wide(f) + wide(dt_bias))).sigmoid()
        return {"g": g, "beta": wide(self.b_proj(x)).sigmoid() * self.beta_scale}
