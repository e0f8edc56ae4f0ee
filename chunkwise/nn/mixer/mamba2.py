"""Mamba-2: one projection to everything, one convolution over values, writers and readers, a skip connection, a gate before the norm.

    (z, x B C, dt) = in_proj(input);   x B C = silu(conv(x B C));   y = ssd(x, dt, A, B, C) + D x;   out_proj(norm(y silu(z)))

Dao, Gu. Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality. ICML 2024.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from ..conv import ShortConvolution
from ..linear import Linear
from ..norm import RMSNorm, wide
from .layer import CallOptions, Depth, Mixer, Window
from .skeleton import mamba_gate_values, per_head


class Mamba2(Mixer):
    """`num_heads` heads of `expand_v` * hidden_size / num_heads values and `state_size` keys; each of `num_groups` B and C serves
    num_heads / num_groups of them.
    """

    op = "mamba2"
    op_options = {"dt_softplus": True}
    keep_float32 = ("A_log", "dt_bias", "D")
    A_log: Tensor
    dt_bias: Tensor
    D: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        expand_v: float = 2.0,
        state_size: int = 128,
        num_groups: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        **options: Unpack[CallOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        if state_size < 1:
            raise ValueError(f"mamba2: state_size must be at least 1, got {state_size}")
        if num_groups < 1 or num_heads % num_groups:
            raise ValueError(f"mamba2: num_groups must divide num_heads = {num_heads}, got {num_groups}")
        self.head_v_dim, self.state_size, self.num_groups = per_head("expand_v", expand_v, hidden_size, num_heads), state_size, num_groups
        self.value_dim, self.key_dim = num_heads * self.head_v_dim, num_groups * state_size
        convolved = self.value_dim + 2 * self.key_dim
        self.in_proj = Linear(hidden_size, self.value_dim + convolved + num_heads, bias=False)
        self.conv1d = ShortConvolution(convolved, conv_size, conv_bias)
        self.norm = RMSNorm(self.value_dim, self.norm_eps)
        self.out_proj = Linear(self.value_dim, hidden_size, bias=False)
        self.finish()

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        return {**mamba_gate_values(self.num_heads, self.num_heads, device), "D": torch.ones(self.num_heads, device=device)}

    def operands(self, x: Tensor, window: Window, positions: Tensor, depth: Depth) -> tuple[dict[str, Tensor], Tensor | None]:
        z, xBC, dt = self.in_proj(x).split([self.value_dim, self.value_dim + 2 * self.key_dim, self.num_heads], -1)
        x, B, C = window.convolve(self.conv1d, xBC).split([self.value_dim, self.key_dim, self.key_dim], -1)
        groups = (self.num_groups, -1)
        return {
            "x": x.unflatten(-1, (self.num_heads, -1)), "dt": dt, "A": -wide(self.A_log).exp(), "B": B.unflatten(-1, groups),
            "C": C.unflatten(-1, groups), "D": self.D, "dt_bias": self.dt_bias,
        }, z  # fmt: skip

    def close(self, o: Tensor, gate: Tensor | None, inputs: dict[str, Tensor]) -> Tensor:
        y = wide(o.flatten(-2)) * F.silu(wide(gate))  # type: ignore[arg-type]
        normed = F.rms_norm(y.unflatten(-1, (self.num_groups, -1)), (self.value_dim // self.num_groups,), eps=self.norm.eps).flatten(-2)
        return self.out_proj((normed * self.norm.weight.to(normed.dtype)).to(o.dtype))

    def extra_repr(self) -> str:
        return f"{self.op}, mode={self.mode}, heads={self.num_heads}, groups={self.num_groups}, K={self.state_size}, V={self.head_v_dim}"
