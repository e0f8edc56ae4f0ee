"""Gated DeltaNet: the delta rule on a state that also forgets, by one data-dependent gate per head.

Yang, Kautz, Hatamizadeh. Gated Delta Networks: Improving Mamba2 with Delta Rule. ICLR 2025.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from ..linear import Linear
from .skeleton import HeadMixer, MixerOptions, mamba_gate_values


class GatedDeltaNet(HeadMixer):
    op = "gated_delta_rule"
    beside = ("a", "b")
    expand_v = 2.0
    use_short_conv = True
    qkv_activation = "silu"
    op_options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    keep_float32 = ("A_log", "dt_bias")
    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, hidden_size: int, num_heads: int, *, allow_neg_eigval: bool = False, **options: Unpack[MixerOptions]):
        super().__init__(hidden_size, num_heads, **options)
        self.allow_neg_eigval = allow_neg_eigval  # beta in (0, 2): I - beta k k' may reflect
        self.a_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.finish()

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        return mamba_gate_values(self.num_v_heads, self.num_v_heads, device)

    def streams(self, x: Tensor, *beside: Tensor) -> dict[str, Tensor]:
        return dict(zip(("g", "beta"), beside))  # [B, T, HV]

    def call_options(self) -> dict[str, Any]:
        return {"A_log": self.spread(self.A_log), "dt_bias": self.spread(self.dt_bias), "allow_neg_eigval": self.allow_neg_eigval}
