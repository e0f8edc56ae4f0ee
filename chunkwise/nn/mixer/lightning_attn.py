"""Lightning attention: every head of every layer forgets at a constant rate of its own; SiLU on q, k and v; a sigmoid gate after the norm.

Qin, Sun, Li, Shen, Sun, Zhong. Lightning Attention-2. 2024; the layer's activations and gate are those of
MiniMax. MiniMax-01: Scaling Foundation Models with Lightning Attention. 2025.
"""

from __future__ import annotations

from typing import Any, Unpack

from .skeleton import HeadMixer, MixerOptions


class LightningAttention(HeadMixer):
    op = "lightning_attn"
    qkv_activation = "silu"
    gate_activation = "sigmoid"
    norm_name = "norm"
    joint_norm = True

    def __init__(self, hidden_size: int, num_heads: int, *, layer_idx: int = 0, num_layers: int = 1, **options: Unpack[MixerOptions]):
        super().__init__(hidden_size, num_heads, **options)
        self.member.check_settings(dict(layer_idx=layer_idx, num_layers=num_layers))
        self.layer_idx, self.num_layers = layer_idx, num_layers
        self.finish()

    def call_options(self) -> dict[str, Any]:
        return {"layer_idx": self.layer_idx, "num_layers": self.num_layers}
