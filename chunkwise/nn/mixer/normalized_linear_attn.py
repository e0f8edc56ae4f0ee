"""Linear attention whose outputs are weighted means of the values seen so far; positive features of queries and keys.

Katharopoulos, Vyas, Pappas, Fleuret. Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention. ICML 2020.
"""

from __future__ import annotations

from typing import Unpack

from .skeleton import HeadMixer, MixerOptions


class NormalizedLinearAttention(HeadMixer):
    """`feature_map` must be positive, or the weights cancel."""

    op = "normalized_linear_attn"
    feature_map = "elu_plus_one"
    use_gate = False
    norm_name = "norm"

    def __init__(self, hidden_size: int, num_heads: int, **options: Unpack[MixerOptions]):
        super().__init__(hidden_size, num_heads, **options)
        self.finish()
