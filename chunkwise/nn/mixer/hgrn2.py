"""HGRN2: what a channel forgets is what it takes in; the higher the layer, the longer it must remember at least.

    f = floor + (1 - floor) sigmoid(f_proj(x)),   S <- diag(f) S + (1 - f) v',   o = S' q / sqrt(K)

Qin, Yang, Sun, Shen, Li, Sun, Zhong. HGRN2: Gated Linear RNNs with State Expansion. COLM 2024.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from ..norm import wide
from .layer import Depth, Window
from .skeleton import HeadMixer, MixerOptions


class HGRN2(HeadMixer):
    op = "hgrn2"
    letters = ("q", "f", "i")
    conv_activation = None
    feature_map = "silu"  # of the queries
    use_gate = False
    norm_name = "g_norm"
    joint_norm = True
    floored = True

    def __init__(self, hidden_size: int, num_heads: int, **options: Unpack[MixerOptions]):
        super().__init__(hidden_size, num_heads, **options)
        self.finish()

    def operands(self, x: Tensor, window: Window, positions: Tensor, depth: Depth) -> tuple[dict[str, Tensor], Tensor | None]:
        q, f, v, gate, _ = self.project(x, window)
        g = F.logsigmoid(wide(f))  # [B, T, H, K]
        if depth.floor is not None:
            floor = wide(depth.floor).view(f.shape[2:])
            g = torch.logaddexp(floor.log(), torch.log1p(-floor) + g)
        return self.shared({"q": self.feature(q), "v": v, "g": g}), gate
