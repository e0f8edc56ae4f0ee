"""What the preconditioned members share: keys rescaled, channel by channel, by how much has been written along them already.

Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences. 2026. https://arxiv.org/abs/2604.21100
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from ...ops.precond_gated_delta_rule import CENTRE
from ..gate import log_decay, write_strength
from .skeleton import HeadMixer, MixerOptions, mamba_gate_values


class Preconditioned(HeadMixer):
    """`squash_x` (at least 1): keys grow and shrink by no more than this; write strengths below 2 / squash_x keep eigenvalues above -1.
    `squash_eps` is added to what has been written before its logarithm is taken.

    A_log_atk, dt_bias_atk and log_atk_scale, one number a key head each, are the decay of what counts as written, and its usual size.
    """

    use_short_conv = True
    qkv_activation = "silu"
    op_options = {"use_qk_l2norm_in_kernel": True}
    keep_float32 = ("A_log", "dt_bias", "A_log_atk", "dt_bias_atk", "log_atk_scale")
    A_log: Tensor
    dt_bias: Tensor
    A_log_atk: Tensor
    dt_bias_atk: Tensor
    log_atk_scale: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        allow_neg_eigval: bool = False,
        squash_x: float = 1.5,
        squash_eps: float = 1e-6,
        **options: Unpack[MixerOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        if not squash_x >= 1 or not squash_eps > 0:
            raise ValueError(f"{self.op}: squash_x must be at least 1 and squash_eps positive, got {squash_x} and {squash_eps}")
        self.squash_x, self.squash_eps = float(squash_x), float(squash_eps)
        self.strength = 2.0 if allow_neg_eigval else 1.0

    def gates(self, device: torch.device, channels: int) -> dict[str, Tensor]:
        """Initial values: of the state's gate, for `channels` numbers a token, and of the preconditioner's."""
        own = {f"{name}_atk": value for name, value in mamba_gate_values(self.num_k_heads, self.num_k_heads, device).items()}
        centre = torch.full((self.num_k_heads,), CENTRE, device=device, dtype=torch.float32)
        return {**mamba_gate_values(self.num_v_heads, channels, device), **own, "log_atk_scale": centre}

    def written(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        """The preconditioner's arguments of the operator, from its raw gate and write strength [B, T, H]."""
        decay = log_decay(a, self.A_log_atk, self.dt_bias_atk)
        return {"g_atk": decay, "beta_atk": write_strength(b), "log_atk_scale": self.log_atk_scale}

    def call_options(self) -> dict[str, Any]:
        return {"x": self.squash_x, "eps": self.squash_eps}
