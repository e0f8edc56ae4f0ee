"""Parity: after every bit, was the number of ones so far odd? No state that only decays can say; one with negative eigenvalues can.

Grazzi, Siems, Zela, Franke, Hutter, Pontil. Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues. ICLR 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .task import IGNORE, Task


@dataclass(frozen=True)
class Parity(Task):
    """Tokens: 0 ends, 1 and 2 are the bits 0 and 1, and the answers even and odd; `length` bits, each of them asked for."""

    name: ClassVar[str] = "parity"
    axis: ClassVar[str] = "length"
    length: int = 32

    @property
    def vocab(self) -> int:
        return 3

    @property
    def tokens(self) -> int:
        return self.length + 1

    @property
    def chance(self) -> float:
        return 1 / 2

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        bits = torch.randint(0, 2, (self.length,), generator=generator)
        return F.pad(bits + 1, (0, 1)), F.pad(bits.cumsum(0) % 2 + 1, (1, 0), value=IGNORE)
