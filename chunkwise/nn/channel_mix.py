"""RWKV's feed-forward layer: every channel mixes the token with the one before it.

    x' = x + (x_{t-1} - x) x_k,   y = value(act(key(x'))),   act(z) = relu(z)^2

and, where gated (RWKV-6), y <- y sigmoid(receptance(x + (x_{t-1} - x) x_r)).

Peng et al. Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence. COLM 2024; RWKV-7 "Goose". COLM 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .activation import activation
from .linear import Linear
from .mixer.layer import fill
from .mixer.rwkv import ramp, ratios
from .packing import Packing
from .shift import token_shift


class ChannelMix(nn.Module):
    """x, y: [B, T, D]; its state is the last token of each sequence, [N, D, 1]. What is no matrix begins as in the authors' code."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, hidden_act: str = "sqrelu", *, gated: bool = False, layer_idx: int = 0,
        num_layers: int = 1,
    ):  # fmt: skip
        super().__init__()
        activation(hidden_act)
        self.act, self.gated, self.layer_idx, self.num_layers = hidden_act, gated, layer_idx, num_layers
        self.key = Linear(hidden_size, intermediate_size, bias=False)
        self.value = Linear(intermediate_size, hidden_size, bias=False)
        self.x_k = nn.Parameter(torch.empty(hidden_size))
        if gated:
            self.receptance = Linear(hidden_size, hidden_size, bias=False)
            self.x_r = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, copy: Callable[[Tensor, Tensor], Any] = Tensor.copy_) -> None:
        """Fill the mixtures; the matrices fill themselves. copy(parameter, value): who wants to have a say."""
        _, down = ratios(self.layer_idx, self.num_layers)
        mix = 1 - ramp(self.x_k.numel(), self.x_k.device) ** (down if self.gated else down**4)
        for p in (self.x_k, self.x_r) if self.gated else (self.x_k,):
            fill(p, mix, copy)

    def forward(
        self, x: Tensor, packing: Packing, state: Tensor | None = None, output_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(y, the state after the last token of each sequence, or None)."""
        before, last = token_shift(x, packing.enter(state), output_state, packing.cu_seqlens)
        delta = before - x
        y = self.value(activation(self.act)(self.key(torch.addcmul(x, delta, self.x_k.to(x.dtype)))))
        if self.gated:
            y = y * self.receptance(torch.addcmul(x, delta, self.x_r.to(x.dtype))).sigmoid()
        return y, packing.leave(last)
