"""RWKV-6 (Finch): every projection sees its own, data-dependent mixture of the token and the one before; a data-dependent decay.

    x' = x + (x_{t-1} - x) (mix + tanh(.. low rank ..)),   w = -exp(low rank(x'))

Peng et al. Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence. COLM 2024. Parameters that are no matrices begin as
in the authors' code.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..linear import Linear
from ..norm import wide
from .layer import CallOptions, Depth, Mixer, Window
from .rwkv import HeadNorm, line, low_rank, ramp, ratios
from .skeleton import per_head


class RWKV6(Mixer):
    """`proj_low_rank_dim`, `gate_low_rank_dim`: ranks of the mixtures and of the decay."""

    op = "rwkv6"
    op_options = {"scale": 1.0}
    x_mu: Tensor
    x_bias: Tensor
    x_up: Tensor
    bonus: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        proj_low_rank_dim: int = 32,
        gate_low_rank_dim: int = 64,
        layer_idx: int = 0,
        num_layers: int = 1,
        **options: Unpack[CallOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        self.layer_idx, self.num_layers, self.rank = layer_idx, num_layers, proj_low_rank_dim
        self.head_k_dim = per_head("expand_k", expand_k, hidden_size, num_heads)
        self.head_v_dim = per_head("expand_v", expand_v, hidden_size, num_heads)
        self.key_dim, self.value_dim = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.x_proj = Linear(hidden_size, 5 * proj_low_rank_dim, bias=False)
        self.r_proj = Linear(hidden_size, self.key_dim, bias=False)
        self.w_lora = low_rank(hidden_size, gate_low_rank_dim, self.key_dim, nn.Tanh())
        self.k_proj = Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = Linear(hidden_size, self.value_dim, bias=False)
        self.g_proj = Linear(hidden_size, self.value_dim, bias=False)
        self.g_norm = HeadNorm(num_heads, self.value_dim, self.norm_eps)
        self.o_proj = Linear(self.value_dim, hidden_size, bias=False)
        self.finish()

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        up, down = ratios(self.layer_idx, self.num_layers)
        x, channel = ramp(self.hidden_size, device), line(self.key_dim, device)
        slow = 1 - x**down  # r, w, k, v, g in the order of the mixtures below
        mix = [1 - x ** (0.5 * down), slow, slow, slow - 0.3 * up, 1 - x ** (0.5 * down)]
        zigzag = torch.tensor([0.0, 0.1, -0.1], device=device).repeat(self.key_dim // 3 + 1)[: self.key_dim]
        return {
            "x_mu": slow.clone(),  # [D], the mixture that the low-rank map sees
            "x_bias": torch.stack(mix),  # [5, D]
            "x_up": torch.empty(5, self.rank, self.hidden_size, device=device).uniform_(-0.01, 0.01),
            "bonus": (up * (1 - channel) + zigzag).view(self.num_heads, -1),  # [H, K]
            "w_lora.2.bias": -6 + 5 * channel ** (0.7 + 1.3 * up),
        }

    def operands(self, x: Tensor, window: Window, positions: Tensor, depth: Depth) -> tuple[dict[str, Tensor], Tensor | None]:
        delta = window.shift(x) - x
        low = self.x_proj(x + delta * self.x_mu).tanh().unflatten(-1, (5, self.rank))  # [B, T, 5, rank]
        mix = torch.einsum("btnr,nrd->nbtd", low, self.x_up) + self.x_bias[:, None, None]  # [5, B, T, D]
        r, w, k, v, g = (x + delta * mix).unbind(0)
        heads = (self.num_heads, -1)
        return {
            "r": self.r_proj(r).unflatten(-1, heads), "k": self.k_proj(k).unflatten(-1, heads), "v": self.v_proj(v).unflatten(-1, heads),
            "w": -wide(self.w_lora(w)).exp().unflatten(-1, heads), "u": self.bonus,
        }, self.g_proj(g)  # fmt: skip

    def close(self, o: Tensor, gate: Tensor | None, inputs: dict[str, Tensor]) -> Tensor:
        return self.o_proj((self.g_norm(o) * F.silu(wide(gate))).to(o.dtype))  # type: ignore[arg-type]
