"""DeltaNet: each token corrects what the state returns for its key; short convolution, SiLU, unit keys and queries.

Yang, Wang, Zhang, Shen, Kim. Parallelizing Linear Transformers with the Delta Rule over Sequence Length. NeurIPS 2024.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..gate import write_strength
from ..linear import Linear
from .skeleton import HeadMixer, MixerOptions


class DeltaNet(HeadMixer):
    op = "delta_rule"
    beside = ("b",)
    use_short_conv = True
    use_gate = False
    qkv_activation = "silu"
    op_options = {"use_qk_l2norm_in_kernel": True}

    def __init__(self, hidden_size: int, num_heads: int, *, allow_neg_eigval: bool = False, **options: Unpack[MixerOptions]):
        super().__init__(hidden_size, num_heads, **options)
        self.beta_scale = 2.0 if allow_neg_eigval else 1.0  # beta in (0, 2): I - beta k k' may reflect
        self.b_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.finish()

    def streams(self, x: Tensor, *beside: Tensor) -> dict[str, Tensor]:
        return {"beta": write_strength(beside[0], self.beta_scale)}  # [B, T, HV]
