"""How the command line says no."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chunkwise.extra import advice, missing


class Refusal(Exception):
    """A request that cannot be met, in one line that names what was wanted and what was given. Ends the command with exit code 2."""

    code = 2


class Failure(Refusal):
    """A run that began and could not go on. Ends the command with exit code 1."""

    code = 1


@contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Within it, the errors by which the library refuses bad input become refusals of the command."""
    try:
        yield
    except errors as error:
        wrapped = error.__cause__ if type(error).__name__.startswith("StrictDataclass") else None  # transformers wraps what a check raised
        raise Refusal(str(wrapped or error)) from error


def need(extra: str) -> None:
    """Refuse where something that this extra brings is not installed."""
    if module := missing(extra):
        raise Refusal(advice("this command", module, extra))


def short_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; PyTorch says so on a CPU by a RuntimeError alone."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def make_folder(path: Path, option: str) -> None:
    """Refuse, before work starts, a folder that cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f"{option} {path} is no folder and cannot be made one: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise Refusal(f"{option} {path} cannot be written to")
