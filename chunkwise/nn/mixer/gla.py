"""Gated linear attention: every key channel forgets at its own rate, which a low-rank projection decides.

Yang, Wang, Shen, Panda, Kim. Gated Linear Attention Transformers with Hardware-Efficient Training. ICML 2024.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn
from torch.nn import functional as F

from ..linear import Linear
from ..norm import wide
from .skeleton import HeadMixer, MixerOptions


class GatedLinearAttention(HeadMixer):
    op = "gla"
    expand_k = 0.5
    norm_name = "g_norm_swish_gate"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: float = 16.0,
        **options: Unpack[MixerOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        if not gate_logit_normalizer > 0:
            raise ValueError(f"gla: gate_logit_normalizer must be positive, got {gate_logit_normalizer}")
        self.gate_logit_normalizer = gate_logit_normalizer
        channels = self.num_v_heads * self.head_k_dim
        self.gk_proj = nn.Sequential(Linear(hidden_size, gate_low_rank_dim, bias=False), Linear(gate_low_rank_dim, channels))
        self.finish()

    def streams(self, x: Tensor, *beside: Tensor) -> dict[str, Tensor]:
        g = F.logsigmoid(wide(self.gk_proj(x))) / self.gate_logit_normalizer
        return {"g": g.unflatten(-1, (self.num_v_heads, -1))}  # [B, T, HV, K]
