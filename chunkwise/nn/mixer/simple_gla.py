"""Simple gated linear attention: one data-dependent forget gate per head and token.

Dao, Gu. Transformers are SSMs. ICML 2024; the layer follows Yang et al. Gated Linear Attention. ICML 2024.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.nn import functional as F

from ..linear import Linear
from ..norm import wide
from .skeleton import HeadMixer, MixerOptions


class SimpleGatedLinearAttention(HeadMixer):
    op = "simple_gla"
    beside = ("gk",)
    use_short_conv = True
    norm_name = "g_norm_swish_gate"

    def __init__(self, hidden_size: int, num_heads: int, *, gate_logit_normalizer: float = 16.0, **options: Unpack[MixerOptions]):
        super().__init__(hidden_size, num_heads, **options)
        self.gate_logit_normalizer = gate_logit_normalizer
        self.gk_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.finish()

    def streams(self, x: Tensor, *beside: Tensor) -> dict[str, Tensor]:
        return {"g": F.logsigmoid(wide(beside[0])) / self.gate_logit_normalizer}  # [B, T, HV]
