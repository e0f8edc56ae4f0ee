"""Turns among processes on one device: many may warm up together, one alone may time. A lock goes with the process that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(lock: Path | None, *, alone: bool) -> Iterator[None]:
    """Wait for a turn: alone, or beside others that do not ask to be alone. lock: a file, made if need be; None: no waiting."""
    if lock is None:
        yield
        return
    import fcntl

    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
