"""Worker processes that a task may kill: a compiler that dies, a kernel that takes its device with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import zip_longest
from typing import Any


class Crew:
    """Workers, so many as `start` is asked for; what kills one is done again alone, and is None if it kills that one too."""

    def __init__(self, start: Callable[[int], ProcessPoolExecutor], jobs: int):
        self.start, self.pool = start, start(jobs)

    def each(self, work: Callable[..., Any], items: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """work(*item) of each, in their order."""
        futures: list[Any] = []
        try:
            futures += (self.pool.submit(work, *item) for item in items)
        except BrokenProcessPool:
            pass
        for item, future in zip_longest(items, futures):
            try:
                done = future and future.result()
            except BrokenProcessPool:
                done = None
            yield self._alone(work, item) if done is None else done

    def _alone(self, work: Callable[..., Any], item: tuple[Any, ...]) -> Any:
        with self.start(1) as pool:
            try:
                return pool.submit(work, *item).result()
            except BrokenProcessPool:
                return None
