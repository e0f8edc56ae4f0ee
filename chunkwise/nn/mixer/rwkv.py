"""What RWKV's layers share: low-rank maps, and a norm of each head with an affine map over all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..linear import Linear
from ..norm import wide


def low_rank(width: int, rank: int, out: int, activation: nn.Module | None = None, bias: bool = True) -> nn.Sequential:
    """out(act(down(x))): [.., width] -> [.., rank] -> [.., out]; keys 0.weight, 2.weight, 2.bias."""
    return nn.Sequential(Linear(width, rank, bias=False), activation or nn.Identity(), Linear(rank, out, bias=bias))


class HeadNorm(nn.GroupNorm):
    """Every head [.., H, V] to mean 0 and variance 1, then an affine map over the channels of all: [.., H * V] in the wide dtype."""

    def forward(self, o: Tensor) -> Tensor:
        y = F.layer_norm(wide(o), o.shape[-1:], eps=self.eps).flatten(-2)
        return y * self.weight.to(y.dtype) + self.bias.to(y.dtype)


def ramp(n: int, device: torch.device) -> Tensor:
    """0, 1/n, .. (n - 1)/n: [n] float32. RWKV's mixtures and decays begin as functions of the channel."""
    return torch.arange(n, device=device, dtype=torch.float32) / n


def line(n: int, device: torch.device) -> Tensor:
    """0 .. 1 in n steps, both ends included."""
    return torch.arange(n, device=device, dtype=torch.float32) / max(1, n - 1)


def ratios(layer_idx: int, num_layers: int) -> tuple[float, float]:
    """(0 at the lowest layer .. 1 at the highest, 1 at the lowest .. nearly 0)."""
    return layer_idx / max(1, num_layers - 1), 1 - layer_idx / num_layers
