"""Synthetic tasks by which members are compared: sequences drawn from (seed, index) alone, judged by the share of right answers."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .mix import mix

IGNORE = -100  # the label of a token that is not asked for


@dataclass(frozen=True)
class Task:
    """The sizes of a task are its fields, all whole numbers; `axis` names the one that makes it harder.

    Raises ValueError, naming the size, for sizes that cannot be drawn.
    """

    name: ClassVar[str]
    axis: ClassVar[str]

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value < 1:
                raise ValueError(f"{self.name}: {f.name} must be at least 1, got {value}")
        self.check()

    def check(self) -> None:
        """Refuse sizes that contradict each other."""

    @property
    def vocab(self) -> int:
        """Tokens, 0 the filler among them."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Tokens a sequence."""
        raise NotImplementedError

    @property
    def chance(self) -> float:
        """What guessing gets right."""
        raise NotImplementedError

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One sequence: (input_ids, labels), int64 [tokens]. labels hold an answer one place after the token that it follows from (models
        shift labels by one), IGNORE elsewhere; no token shows the answer that is due there."""
        raise NotImplementedError

    def item(self, seed: int, index: int) -> tuple[Tensor, Tensor]:
        return self.draw(torch.Generator().manual_seed(mix(seed, index) >> 1))

    def at(self, value: int) -> Task:
        """The same task with another value of the axis."""
        return replace(self, **{self.axis: value})


class _Sequences(Dataset):
    def __init__(self, task: Task, seed: int, length: int) -> None:
        self._task, self._seed, self._length = task, seed, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids, labels = self._task.item(self._seed, i)
        return {"input_ids": ids, "labels": labels}


class Drill:
    """A task to train on: `items` sequences, and others never trained on that say how much was learnt."""

    headline = "accuracy"

    def __init__(self, task: Task, *, items: int, seed: int, held_out: int = 256) -> None:
        self.task, self.seed, self.held_out = task, seed, held_out
        self.train = _Sequences(task, seed, items)

    @property
    def vocab(self) -> int:
        return self.task.vocab

    def evaluate(
        self,
        model: torch.nn.Module,
        batch: int = 32,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        task: Task | None = None,
    ) -> dict[str, float]:
        """{"accuracy": share of the answers that are the model's most likely next token}; task: another than the one trained on."""
        ids, labels = zip(*((task or self.task).item(self.seed, -1 - i) for i in range(self.held_out)))  # no training item is negative
        device, right, asked = next(model.parameters()).device, 0, 0
        with torch.no_grad(), autocast():
            for x, y in zip(torch.stack(ids).split(batch), torch.stack(labels).split(batch)):
                guess = model(input_ids=x.to(device), use_cache=False).logits[:, :-1].argmax(-1).cpu()
                query = y[:, 1:] != IGNORE
                right += int((guess == y[:, 1:])[query].sum())
                asked += int(query.sum())
        return {"accuracy": right / asked}


def all_tasks() -> dict[str, type[Task]]:
    """The tasks by name: each on the page of its name in this package."""
    import chunkwise.data

    names = [m.name for m in pkgutil.iter_modules(chunkwise.data.__path__)]
    pages = [importlib.import_module(f"chunkwise.data.{name}") for name in names]
    found = [x for page in pages for x in vars(page).values() if isinstance(x, type) and issubclass(x, Task) and x is not Task]
    return {task.name: task for task in found}
