"""Multi-query associative recall: pairs of a key and a value, then every key again in random order: which value was it?

The smallest task on which members of the family differ in what they remember: a state that only adds confuses pairs as they grow
in number, one that corrects what it writes does not.

Arora, Eyuboglu, Timalsina, Johnson, Poli, Zou, Rudra, Ré. Zoology: Measuring and Improving Recall in Efficient Language Models. ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .mix import mix

IGNORE = -100


def draw_recall(seed: int, index: int, *, pairs: int, keys: int, values: int, length: int) -> tuple[Tensor, Tensor]:
    """One sequence: (input_ids [length], labels [length]), int64.

    Tokens: 0 fills, 1 .. keys are keys, keys + 1 .. keys + values are values. The first 2 * pairs tokens are `pairs` different keys,
    each followed by its value; each key comes once more, at a random place behind them, in random order; the rest is filler.
    labels hold the value one place after a repeated key (models shift labels by one), IGNORE elsewhere; the input never shows the answer.
    """
    generator = torch.Generator().manual_seed(mix(seed, index) >> 1)
    key = torch.randperm(keys, generator=generator)[:pairs] + 1
    value = torch.randint(keys + 1, keys + values + 1, (pairs,), generator=generator)
    ids = torch.zeros(length, dtype=torch.int64)
    labels = torch.full((length,), IGNORE)
    ids[0 : 2 * pairs : 2], ids[1 : 2 * pairs : 2] = key, value
    place = 2 * pairs + torch.randperm(length - 2 * pairs - 1, generator=generator)[:pairs]
    ids[place], labels[place + 1] = key, value
    return ids, labels


class _Sequences(Dataset):
    def __init__(self, length: int, draw: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        self._length, self._draw = length, draw

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids, labels = self._draw(i)
        return {"input_ids": ids, "labels": labels}


class RecallTask:
    """Sequences of `length` tokens with `pairs` pairs; validated on sequences never trained on, by the share of queries answered right.

    Raises ValueError, naming the argument, for sizes that cannot be drawn.
    """

    headline = "accuracy"

    def __init__(self, *, pairs: int, keys: int, values: int, length: int, items: int, seed: int, held_out: int = 256) -> None:
        if not 1 <= pairs <= keys:
            raise ValueError(f"pairs must be between 1 and keys={keys}, got {pairs}")
        if values < 2:
            raise ValueError(f"values must be at least 2, got {values}")
        if length < 3 * pairs + 1:
            raise ValueError(f"length must be at least 3 * pairs + 1 = {3 * pairs + 1}, got {length}")

        def draw(index: int) -> tuple[Tensor, Tensor]:
            return draw_recall(seed, index, pairs=pairs, keys=keys, values=values, length=length)

        self.vocab = 1 + keys + values
        self.train = _Sequences(items, draw)
        ids, labels = zip(*(draw(-1 - i) for i in range(held_out)))  # negative indices: no training item has one
        self._ids, self._labels = torch.stack(ids), torch.stack(labels)

    def evaluate(
        self, model: torch.nn.Module, batch: int = 32, autocast: Callable[[], AbstractContextManager] = nullcontext
    ) -> dict[str, float]:
        """{"accuracy": share of the queries whose most likely next token is the value}."""
        device, right, asked = next(model.parameters()).device, 0, 0
        with torch.no_grad(), autocast():
            for ids, labels in zip(self._ids.split(batch), self._labels.split(batch)):
                guess = model(input_ids=ids.to(device), use_cache=False).logits[:, :-1].argmax(-1).cpu()
                query = labels[:, 1:] != IGNORE
                right += int((guess == labels[:, 1:])[query].sum())
                asked += int(query.sum())
        return {"accuracy": right / asked}
