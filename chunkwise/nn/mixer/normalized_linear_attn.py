"""Linear attention whose outputs are weighted means of the values seen so far; positive features of queries and keys.

Katharopoulos, Vyas, Pappas, Fleuret. Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention. ICML 2020.
"""

from __future__ import annotations

from .linear_attn import LinearAttention


class NormalizedLinearAttention(LinearAttention):
    """`feature_map` must be positive, or the weights cancel."""

    op = "normalized_linear_attn"
