"""RWKV-7 (Goose): each token chooses what to remove and how much; higher layers may take the first layer's values.

    w = -e^-0.5 sigmoid(..),   a = sigmoid(..),   kappa = unit(k k_k),   k <- k (1 + (a - 1) k_a),   v <- v + (v_first - v) sigmoid(..)
    S <- S diag(e^w) - (S kappa)(a kappa)' + v k',   o = (norm(S r) + (r' (r_k k)) v) g

Peng et al. RWKV-7 "Goose" with Expressive Dynamic State Evolution. COLM 2025. What is no matrix begins as in the authors' code.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..linear import Linear
from ..norm import wide
from .layer import CallOptions, Depth, Mixer, Window
from .rwkv import HeadNorm, line, low_rank, ramp, ratios
from .skeleton import per_head


class RWKV7(Mixer):
    """`first`: the lowest layer of the kind in its stack; the others need `Depth.first`. `*_low_rank_dim`: ranks; default: by width."""

    op = "rwkv7"
    x_mix: Tensor
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor

    def __init__(
        self, hidden_size: int, num_heads: int, *, expand_v: float = 1.0, decay_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None, a_low_rank_dim: int | None = None, v_low_rank_dim: int | None = None,
        layer_idx: int = 0, num_layers: int = 1, first: bool = True, **options: Unpack[CallOptions],
    ):  # fmt: skip
        super().__init__(hidden_size, num_heads, **options)
        self.layer_idx, self.num_layers, self.first = layer_idx, num_layers, first
        self.head_k_dim = per_head("head size", 1.0, hidden_size, num_heads)
        self.head_v_dim = per_head("expand_v", expand_v, hidden_size, num_heads)
        D, V, large = hidden_size, num_heads * self.head_v_dim, self.head_k_dim / 64
        rank = lambda given, factor: given or max(32, round(factor * D**0.5 / 32) * 32)
        self.r_proj, self.k_proj = Linear(D, D, bias=False), Linear(D, D, bias=False)
        self.v_proj, self.o_proj = Linear(D, V, bias=False), Linear(V, D, bias=False)
        self.w_lora = low_rank(D, rank(decay_low_rank_dim, 2.5 * large), D, nn.Tanh())
        self.a_lora = low_rank(D, rank(a_low_rank_dim, 2.5 * large), D)
        self.g_lora = low_rank(D, rank(gate_low_rank_dim, 5), V, nn.Sigmoid(), bias=False)
        if not first:
            self.v_lora = low_rank(D, rank(v_low_rank_dim, 1.7 * large), V)
        self.g_norm = HeadNorm(num_heads, V, self.head_k_dim * self.norm_eps)
        self.finish()

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        D, K, V = self.hidden_size, self.head_k_dim, self.num_heads * self.head_v_dim
        up, down = ratios(self.layer_idx, self.num_layers)
        x, channel, bow = ramp(D, device), line(D, device), 2 * line(K, device) - 1
        zigzag = (bow * bow.abs()).repeat(self.num_heads)
        height = ((self.layer_idx + 1) / self.num_layers) ** 0.7
        values = {
            "x_mix": torch.stack([1 - x ** (p * down) for p in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]),  # [6, D]: of r, w, k, v, a, g
            "k_k": 0.71 - 0.1 * (channel - 0.5),
            "k_a": torch.full((D,), 1.02, device=device),
            "r_k": torch.full((self.num_heads, K), -0.04, device=device),
            "w_lora.2.bias": -5.5 + 6 * channel ** (1 + up**0.3) + 2.5 * zigzag,
            "a_lora.2.bias": -0.19 + 0.3 * zigzag + 0.4 * (channel - 0.5),
            "g_norm.weight": torch.full((V,), height, device=device),
        }
        if not self.first:
            values["v_lora.2.bias"] = 0.73 - 0.4 * (line(V, device) - 0.5)
        return values

    def operands(self, x: Tensor, window: Window, positions: Tensor, depth: Depth) -> tuple[dict[str, Tensor], Tensor | None]:
        delta = window.shift(x) - x
        r, w, k, v, a, g = (x + delta * self.x_mix[:, None, None]).unbind(0)  # [6, B, T, D]
        r, k, a, w = self.r_proj(r), self.k_proj(k), wide(self.a_lora(a)).sigmoid(), wide(self.w_lora(w)).sigmoid() * -math.exp(-0.5)
        value = self.v_proj(v)
        if self.first:
            depth.first = value
        elif depth.first is None:
            raise ValueError("rwkv7: a layer that is not the first of its kind needs the first one's values: depth.first")
        else:
            value = torch.lerp(value, depth.first, self.v_lora(v).sigmoid())
        heads = (self.num_heads, -1)
        kappa = F.normalize(wide(k * self.k_k).unflatten(-1, heads), dim=-1)
        k = (wide(k) * (1 + (a - 1) * self.k_a)).to(r.dtype)
        return {
            "r": r.unflatten(-1, heads), "w": w.unflatten(-1, heads), "k": k.unflatten(-1, heads), "v": value.unflatten(-1, heads),
            "a": -kappa.to(r.dtype), "b": (kappa * a.unflatten(-1, heads)).to(r.dtype),
        }, self.g_lora(g)  # fmt: skip

    def close(self, o: Tensor, gate: Tensor | None, inputs: dict[str, Tensor]) -> Tensor:
        r, k, v = (wide(inputs[n]) for n in "rkv")
        own = ((r * k * self.r_k).sum(-1, keepdim=True) * v).flatten(-2)
        return self.o_proj(((self.g_norm(o) + own) * wide(gate)).to(o.dtype))  # type: ignore[arg-type]
