"""Comba: the gated delta rule with feedback on both sides: the state is corrected by a weaker key, the query by the key.

    p = sigmoid(decay) k,   q <- q - D p

Hu, Pan, Du, Lan, Tang, Wen, Liang, Sun. Comba: Improving Bilinear RNNs with Closed-loop Control. 2025.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from ..gate import log_decay, write_strength
from ..linear import Linear
from ..norm import l2norm, wide
from .layer import Depth, Window
from .skeleton import HeadMixer, MixerOptions, mamba_gate_values


class Comba(HeadMixer):
    """`correction_factor`: what D begins with; 0.02 may serve small models better than 1.

    `normalize_feedback`: q and p become unit vectors at the very end, as in flash-linear-attention's layer, so that `decay` bears on the
    query alone; otherwise keys are unit vectors and p is shorter, as in the paper.
    """

    op = "comba"
    beside = ("a", "b")
    expand_v = 2.0
    use_short_conv = True
    qkv_activation = "silu"
    gate_activation = "sigmoid"
    keep_float32 = ("A_log", "dt_bias", "D", "decay")
    A_log: Tensor
    dt_bias: Tensor
    D: Tensor
    decay: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        correction_factor: float = 1.0,
        normalize_feedback: bool = False,
        **options: Unpack[MixerOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        self.correction_factor, self.normalize_feedback = correction_factor, normalize_feedback
        self.a_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.finish()

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        ones = torch.ones(self.num_k_heads, device=device)
        gate = mamba_gate_values(self.num_v_heads, self.num_v_heads, device)
        return {**gate, "D": self.correction_factor * ones, "decay": ones.clone()}

    def operands(self, x: Tensor, window: Window, positions: Tensor, depth: Depth) -> tuple[dict[str, Tensor], Tensor | None]:
        q, k, v, gate, (a, b) = self.project(x, window)
        q, k = self.feature(q), self.feature(k)
        if not self.normalize_feedback:
            q, k = l2norm(q), l2norm(k)
        p = (wide(k) * self.decay.to(wide(k).dtype).sigmoid()[:, None]).to(k.dtype)  # [B, T, H, K]
        g = log_decay(a, self.A_log, self.dt_bias)  # [B, T, HV]
        inputs = self.shared({"q": q, "k": k, "v": v, "p": p, "g": g, "beta": write_strength(b)})
        D = self.D.to(wide(q).dtype).repeat_interleave(self.num_heads // self.num_k_heads)[:, None]
        return {**inputs, "q": (wide(q) - D * wide(inputs["p"])).to(q.dtype)}, gate

    def call_options(self) -> dict[str, Any]:
        return {"use_qk_l2norm_in_kernel": self.normalize_feedback}
