"""Copying: a string of random symbols, a mark, and the string again. A state of fixed size holds strings up to some length.

Jelassi, Brandfonbrener, Kakade, Malach. Repeat After Me: Transformers are Better than State Space Models at Copying. ICML 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .task import IGNORE, Task


@dataclass(frozen=True)
class Copying(Task):
    """Tokens: 0 is the mark, 1 .. symbols the symbols; `length` symbols, the mark, the same again, each of which is asked for."""

    name: ClassVar[str] = "copying"
    axis: ClassVar[str] = "length"
    length: int = 32
    symbols: int = 16

    @property
    def vocab(self) -> int:
        return 1 + self.symbols

    @property
    def tokens(self) -> int:
        return 2 * self.length + 1

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        string = torch.randint(1, self.symbols + 1, (self.length,), generator=generator)
        ids = torch.cat([string, torch.zeros(1, dtype=torch.int64), string])
        labels = ids.clone()
        labels[: self.length + 1] = IGNORE
        return ids, labels
