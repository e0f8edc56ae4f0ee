"""How the command line says no."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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


def need(module: str, extra: str) -> None:
    """Refuse where an optional dependency is not installed."""
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise Refusal(f"this command needs {module}: pip install 'chunkwise[{extra}]'")
