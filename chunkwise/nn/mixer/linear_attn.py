"""Linear attention: positive features, no forgetting, each head's output normalised.

Katharopoulos, Vyas, Pappas, Fleuret. Transformers are RNNs. ICML 2020. The output norm in place of the normaliser is
Qin et al. The Devil in Linear Transformer. EMNLP 2022.
"""

from __future__ import annotations

from typing import Unpack

from .skeleton import HeadMixer, MixerOptions


class LinearAttention(HeadMixer):
    op = "linear_attn"
    feature_map = "elu_plus_one"
    use_gate = False
    norm_name = "norm"

    def __init__(self, hidden_size: int, num_heads: int, **options: Unpack[MixerOptions]):
        super().__init__(hidden_size, num_heads, **options)
        self.finish()
