"""Feature maps with parameters: what they make of a head's queries and keys [..., K] is learnt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from .linear import Linear


class LearntMap(nn.Module):
    """Features [..., F] of x [..., K]."""

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        """Of the parameters that begin as those of no other linear map do."""
        return {}


class Hadamard(LearntMap):
    """[..., K] -> [..., K]: two affine maps, multiplied elementwise."""

    def __init__(self, K: int):
        super().__init__()
        self.layer1, self.layer2 = Linear(K, K), Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer1(x) * self.layer2(x)


class Hedgehog(LearntMap):
    """[..., K] -> [..., 2 K], positive and of sum 1: softmax of (2 y, -2 y), y an affine map that begins as the identity.

    Zhang, Bhatia, Kumbong, Re. The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry. ICLR 2024.
    """

    def __init__(self, K: int):
        super().__init__()
        self.layer = Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * self.layer(x)
        return torch.cat((y, -y), -1).softmax(-1)

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        K = self.layer.in_features
        return {"layer.weight": torch.eye(K, device=device), "layer.bias": torch.zeros(K, device=device)}


class T2R(LearntMap):
    """[..., K] -> [..., K]: relu of a linear map.

    Kasai, Peng, Zhang, Yogatama, Ilharco, Pappas, Mao, Chen, Smith. Finetuning Pretrained Transformers into RNNs. EMNLP 2021.
    """

    def __init__(self, K: int):
        super().__init__()
        self.layer = Linear(K, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


LEARNT: Mapping[str, Callable[[int], LearntMap]] = MappingProxyType({"elementwise_product": Hadamard, "hedgehog": Hedgehog, "t2r": T2R})
