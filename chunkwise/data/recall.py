"""Multi-query associative recall: pairs of a key and a value, then every key again in random order: which value was it?

The smallest task on which members of the family differ in what they remember: a state that only adds confuses pairs as they grow
in number, one that corrects what it writes does not.

Arora, Eyuboglu, Timalsina, Johnson, Poli, Zou, Rudra, Ré. Zoology: Measuring and Improving Recall in Efficient Language Models. ICLR 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .task import IGNORE, Task


@dataclass(frozen=True)
class Recall(Task):
    """Tokens: 0 fills, 1 .. keys are keys, keys + 1 .. keys + values are values. The first 2 * pairs tokens are `pairs` different keys,
    each followed by its value; each key comes once more, at a random place behind them, in random order; the rest is filler.
    """

    name: ClassVar[str] = "recall"
    axis: ClassVar[str] = "pairs"
    pairs: int = 16
    keys: int = 64
    values: int = 64
    length: int = 64

    def check(self) -> None:
        if self.pairs > self.keys:
            raise ValueError(f"recall: pairs must be between 1 and keys = {self.keys}, got {self.pairs}")
        if self.values < 2:
            raise ValueError(f"recall: values must be at least 2, got {self.values}")
        if self.length < 3 * self.pairs + 1:
            raise ValueError(f"recall: length must be at least 3 * pairs + 1 = {3 * self.pairs + 1}, got {self.length}")

    @property
    def vocab(self) -> int:
        return 1 + self.keys + self.values

    @property
    def tokens(self) -> int:
        return self.length

    @property
    def chance(self) -> float:
        return 1 / self.values

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        n = self.pairs
        key = torch.randperm(self.keys, generator=generator)[:n] + 1
        value = torch.randint(self.keys + 1, self.keys + self.values + 1, (n,), generator=generator)
        ids = torch.zeros(self.length, dtype=torch.int64)
        labels = torch.full((self.length,), IGNORE)
        ids[0 : 2 * n : 2], ids[1 : 2 * n : 2] = key, value
        place = 2 * n + torch.randperm(self.length - 2 * n - 1, generator=generator)[:n]
        ids[place], labels[place + 1] = key, value
        return ids, labels

    def at(self, value: int) -> Recall:
        """So many pairs, in sequences as much longer as they need to be."""
        return Recall(value, self.keys, self.values, max(self.length, 4 * value))
