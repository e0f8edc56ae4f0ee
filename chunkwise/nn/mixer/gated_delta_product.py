"""Gated DeltaProduct: several delta-rule steps a token, so that what a token does to the state is a product of reflections.

Siems, Carstensen, Zela, Hutter, Pontil, Grazzi. DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products.
NeurIPS 2025.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from ..gate import log_decay, write_strength
from ..linear import Linear
from .skeleton import HeadMixer, MixerOptions, mamba_gate_values


class GatedDeltaProduct(HeadMixer):
    """`num_householder`: steps a token; `use_forget_gate`: without it, DeltaProduct."""

    op = "gated_delta_product"
    expand_v = 2.0
    use_short_conv = True
    qkv_activation = "silu"
    op_options = {"use_qk_l2norm_in_kernel": True}
    keep_float32 = ("A_log", "dt_bias")
    A_log: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_householder: int = 2,
        use_forget_gate: bool = True,
        allow_neg_eigval: bool = True,
        **options: Unpack[MixerOptions],
    ):
        if num_householder < 1:
            raise ValueError(f"gated_delta_product: num_householder must be at least 1, got {num_householder}")
        self.steps = num_householder
        super().__init__(hidden_size, num_heads, **options)
        self.beta_scale = 2.0 if allow_neg_eigval else 1.0  # beta in (0, 2): I - beta k k' may reflect
        self.has_forget_gate = use_forget_gate
        self.beside = ("b", "a") if use_forget_gate else ("b",)
        if use_forget_gate:
            self.a_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = Linear(hidden_size, num_householder * self.num_v_heads, bias=False)
        self.finish()

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        return mamba_gate_values(self.num_v_heads, self.num_v_heads, device) if self.has_forget_gate else {}

    def streams(self, x: Tensor, *beside: Tensor) -> dict[str, Tensor]:
        beta = write_strength(beside[0], self.beta_scale).unflatten(-1, (-1, self.num_v_heads))  # [B, T, R, HV]
        if not self.has_forget_gate:
            return {"beta": beta}
        return {"g": log_decay(beside[1], self.A_log, self.dt_bias), "beta": beta}
