"""Gated DeltaNet 2: Kimi delta attention whose erasing and writing have gates of their own, by key channel and by value channel.

Hatamizadeh, Choi, Kautz. Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention. 2026.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from ..gate import log_decay, write_strength
from ..linear import Linear
from .skeleton import HeadMixer, MixerOptions, mamba_gate_values


class GatedDeltaNet2(HeadMixer):
    op = "gdn2"
    beside = ("b", "w")
    use_short_conv = True
    qkv_activation = "silu"
    gate_activation = "sigmoid"
    op_options = {"use_qk_l2norm_in_kernel": True}
    keep_float32 = ("A_log", "dt_bias")
    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, hidden_size: int, num_heads: int, *, allow_neg_eigval: bool = False, **options: Unpack[MixerOptions]):
        super().__init__(hidden_size, num_heads, **options)
        self.erase_scale = 2.0 if allow_neg_eigval else 1.0
        self.f_proj = nn.Sequential(
            Linear(hidden_size, self.head_v_dim, bias=False), Linear(self.head_v_dim, self.key_dim, bias=False)
        )
        self.b_proj = Linear(hidden_size, self.key_dim, bias=False)
        self.w_proj = Linear(hidden_size, self.value_dim, bias=False)
        self.finish()

    def gate_projection(self, hidden_size: int, out: int) -> nn.Module:
        return nn.Sequential(Linear(hidden_size, self.head_v_dim, bias=False), Linear(self.head_v_dim, out))

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        return mamba_gate_values(self.num_k_heads, self.key_dim, device)

    def streams(self, x: Tensor, *beside: Tensor) -> dict[str, Tensor]:
        heads, share = self.num_k_heads, self.num_v_heads // self.num_k_heads
        f = self.f_proj(x).unflatten(-1, (heads, -1))  # [B, T, H, K]
        g = log_decay(f, self.A_log, self.dt_bias)
        b = write_strength(beside[0], self.erase_scale).unflatten(-1, (heads, -1))
        w = write_strength(beside[1]).unflatten(-1, (self.num_v_heads, -1))  # [B, T, HV, V]
        return {"g": g.repeat_interleave(share, 2), "b": b.repeat_interleave(share, 2), "w": w}
