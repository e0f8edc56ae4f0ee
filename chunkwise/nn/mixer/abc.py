"""Attention with bounded-memory control: every token is spread over a few slots by a softmax over all tokens so far; rotary positions.

Peng, Kasai, Pappas, Yogatama, Wu, Kong, Schwartz, Smith. ABC: Attention with Bounded-memory Control. ACL 2022. The projections are those of
the other layers here.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..linear import Linear
from ..rotary import rotary
from .skeleton import HeadMixer, MixerOptions

BOUND = 32.0  # of the slots' scores


class ABCAttention(HeadMixer):
    """`num_slots`: slots a head, default the key size; `rope_theta`: base of the wavelengths."""

    op = "abc"
    beside = ("s",)
    expand_k = 0.5
    norm_name = "g_norm"

    def __init__(
        self, hidden_size: int, num_heads: int, *, num_slots: int | None = None, rope_theta: float = 10000.0,
        **options: Unpack[MixerOptions],
    ):  # fmt: skip
        super().__init__(hidden_size, num_heads, **options)
        if num_slots is not None and num_slots < 1:
            raise ValueError(f"abc: num_slots must be at least 1, got {num_slots}")
        if self.feature_dim % 2:
            raise ValueError(f"abc: the key size of a head must be even for rotary positions, got {self.feature_dim}")
        self.num_slots, self.rope_theta = num_slots or self.head_k_dim, rope_theta
        self.s_proj = Linear(hidden_size, self.num_v_heads * self.num_slots, bias=False)
        self.finish()

    def turn(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(q, positions, self.rope_theta), rotary(k, positions, self.rope_theta)

    def streams(self, x: Tensor, *beside: Tensor) -> dict[str, Tensor]:
        return {"s": beside[0].unflatten(-1, (self.num_v_heads, -1)).clamp(-BOUND, BOUND)}  # [B, T, HV, M]
