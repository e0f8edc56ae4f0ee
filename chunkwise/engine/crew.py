"""Worker processes that a task may kill: a compiler that dies, a kernel that takes its device with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any


class Crew:
    """Workers, so many as `start` is asked for, until the block that was entered with them ends. What may have killed one is done again in
    a process of its own, and is None if it kills that one too; new workers do the rest."""

    def __init__(self, start: Callable[[int], ProcessPoolExecutor], jobs: int):
        self.start, self.jobs, self.pool = start, jobs, start(jobs)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: Any) -> None:
        self.pool.shutdown(cancel_futures=True)

    def each(self, work: Callable[..., Any], items: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """work(*item) of each, in their order."""
        ahead = [_submit(self.pool, work, item) for item in items]
        for i in range(len(items)):
            try:
                done = ahead[i].result()
            except BrokenProcessPool:
                lost = [j for j in range(i, len(items)) if not ahead[j].done() or isinstance(ahead[j].exception(), BrokenProcessPool)]
                suspects, rest = lost[: self.jobs + 1], lost[self.jobs + 1 :]  # items begin in their order, one waits with its worker
                pools = {j: self.start(1) for j in suspects}
                alone = {j: _submit(pools[j], work, items[j]) for j in suspects}
                for j in suspects:
                    ahead[j] = _survived(alone[j])
                    pools[j].shutdown()
                self.pool.shutdown()
                self.pool = self.start(self.jobs)
                for j in rest:
                    ahead[j] = _submit(self.pool, work, items[j])
                done = ahead[i].result()
            yield done


def _submit(pool: ProcessPoolExecutor, work: Callable[..., Any], item: tuple[Any, ...]) -> Future[Any]:
    try:
        return pool.submit(work, *item)
    except BrokenProcessPool as fault:
        future: Future[Any] = Future()
        future.set_exception(fault)
        return future


def _survived(future: Future[Any]) -> Future[Any]:
    """The same, or one of None where its worker died."""
    if not isinstance(future.exception(), BrokenProcessPool):
        return future
    none: Future[Any] = Future()
    none.set_result(None)
    return none
