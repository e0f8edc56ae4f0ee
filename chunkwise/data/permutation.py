"""Permutations: after every permutation of n things, where have all so far brought them? With n = 5 (S5) the word problem is complete
for NC1: no transformer or diagonal state space model of fixed depth solves it at every length.

Merrill, Petty, Sabharwal. The Illusion of State in State-Space Models. ICML 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from math import factorial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .task import IGNORE, Task


@cache
def product_table(n: int) -> list[list[int]]:
    """table[p][q]: the number of the permutation "first p, then q" among all n! in lexicographic order."""
    every = list(permutations(range(n)))
    number = {p: i for i, p in enumerate(every)}
    return [[number[tuple(q[i] for i in p)] for q in every] for p in every]


@dataclass(frozen=True)
class Permutation(Task):
    """Tokens: 0 ends, 1 .. n! are the permutations, and the answers; `length` of them, the product so far asked for at each."""

    name: ClassVar[str] = "permutation"
    axis: ClassVar[str] = "length"
    length: int = 16
    n: int = 5

    def check(self) -> None:
        if not 2 <= self.n <= 5:
            raise ValueError(f"permutation: n must be between 2 and 5, got {self.n}")

    @property
    def vocab(self) -> int:
        return 1 + factorial(self.n)

    @property
    def tokens(self) -> int:
        return self.length + 1

    @property
    def chance(self) -> float:
        return 1 / factorial(self.n)

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        table, product = product_table(self.n), 0
        word = torch.randint(0, factorial(self.n), (self.length,), generator=generator)
        answers = []
        for p in word.tolist():
            product = table[product][p]
            answers.append(product)
        return F.pad(word + 1, (0, 1)), F.pad(torch.tensor(answers) + 1, (1, 0), value=IGNORE)
