"""Linear attention: features of queries and keys, no forgetting, each head's output normalised.

Katharopoulos, Vyas, Pappas, Fleuret. Transformers are RNNs. ICML 2020. The output norm in place of the normaliser is
Qin et al. The Devil in Linear Transformer. EMNLP 2022.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from ..feature import LEARNT
from .skeleton import HeadMixer, MixerOptions

EPS = 1e-4  # beside the sum of a query's or key's features


class LinearAttention(HeadMixer):
    """`feature_map`: a name of `chunkwise.nn.feature_map`, or one that is learnt, of queries and keys apart unless `tie_feature_map`:
    "elementwise_product", "hedgehog", "t2r" (chunkwise/nn/feature.py). `norm_q`, `norm_k`: features divided by their sum.
    """

    op = "linear_attn"
    feature_map = "elu_plus_one"
    use_gate = False
    norm_name = "norm"

    def __init__(
        self, hidden_size: int, num_heads: int, *, tie_feature_map: bool = False, norm_q: bool = False, norm_k: bool = False,
        **options: Unpack[MixerOptions],
    ):  # fmt: skip
        name = options.get("feature_map")
        learnt = LEARNT.get(name or "")
        if learnt is not None:
            options["feature_map"] = None
        elif tie_feature_map:
            raise ValueError(f"{self.op}: tie_feature_map needs a feature_map that is learnt, {' or '.join(LEARNT)}, got {name!r}")
        super().__init__(hidden_size, num_heads, **options)
        self.norm_q, self.norm_k = norm_q, norm_k
        self.feature_map_q = None if learnt is None else learnt(self.head_k_dim)
        self.feature_map_k = None if learnt is None or tie_feature_map else learnt(self.head_k_dim)
        self.finish()

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        maps = {n: m for n in ("feature_map_q", "feature_map_k") if (m := getattr(self, n)) is not None}
        return {f"{n}.{name}": value for n, m in maps.items() for name, value in m.initial_values(device).items()}

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.feature_map_q is None:
            q, k = super().features(q, k)
        else:
            q, k = self.feature_map_q(q), (self.feature_map_k or self.feature_map_q)(k)
        return share(q) if self.norm_q else q, share(k) if self.norm_k else k


def share(x: Tensor) -> Tensor:
    """[..., K]: each feature's part of their sum."""
    return x / (x.sum(-1, keepdim=True) + EPS)
