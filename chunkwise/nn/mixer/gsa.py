"""Gated slot attention: a few slots, each of which forgets by its own gate and takes in what it forgets; read by softmax over them.

    g = logsigmoid(f_proj(x)) / normalizer,   s = 1 - e^g

Zhang, Yang, Zhu, Zhang, Cui, Wang, Wang, Shi, Wang, Bi, Zhou, Fu. Gated Slot Attention for Efficient Linear-Time Sequence Modeling.
NeurIPS 2024.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.nn import functional as F

from ..linear import Linear
from ..norm import wide
from .layer import Depth, Window
from .skeleton import HeadMixer, MixerOptions


class GatedSlotAttention(HeadMixer):
    """`num_slots`: slots a head, default the key size."""

    op = "gsa"
    beside = ("f",)
    feature_map = "silu"
    use_gate = False
    norm_name = "g_norm"
    joint_norm = True
    op_options = {"scale": 1.0}

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_slots: int | None = None,
        gate_logit_normalizer: float = 8.0,
        **options: Unpack[MixerOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        if num_slots is not None and num_slots < 1:
            raise ValueError(f"gsa: num_slots must be at least 1, got {num_slots}")
        self.num_slots = num_slots or self.head_k_dim
        self.gate_logit_normalizer = gate_logit_normalizer
        self.f_proj = Linear(hidden_size, self.num_v_heads * self.num_slots, bias=False)
        self.finish()

    def operands(self, x: Tensor, window: Window, positions: Tensor, depth: Depth) -> tuple[dict[str, Tensor], Tensor | None]:
        q, k, v, gate, (f,) = self.project(x, window)
        g = F.logsigmoid(wide(f)).unflatten(-1, (self.num_v_heads, -1)) / self.gate_logit_normalizer  # [B, T, HV, M]
        inputs = {"q": self.feature(q), "k": self.feature(k), "v": F.silu(v), "s": -g.expm1().to(v.dtype), "g": g}
        return self.shared(inputs), gate

    def close(self, o: Tensor, gate: Tensor | None, inputs: dict[str, Tensor]) -> Tensor:
        return super().close(F.silu(o), gate, inputs)
