"""Multi-scale retention: every head forgets at its own constant rate; rotary positions; swish-gated norm of each head.

Sun et al. Retentive Network: A Successor to Transformer for Large Language Models. 2023.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..rotary import rotary
from .skeleton import HeadMixer, MixerOptions


class MultiScaleRetention(HeadMixer):
    op = "retention"
    expand_v = 2.0
    norm_name = "g_norm_swish_gate"

    def __init__(self, hidden_size: int, num_heads: int, *, rope_theta: float = 10000.0, **options: Unpack[MixerOptions]):
        super().__init__(hidden_size, num_heads, **options)
        if self.feature_dim % 2:
            raise ValueError(f"retention: the key size of a head must be even for rotary positions, got {self.feature_dim}")
        self.rope_theta = rope_theta
        self.finish()

    def turn(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(q, positions, self.rope_theta), rotary(k, positions, self.rope_theta)
