"""What an option that is no tensor may be."""

from __future__ import annotations

from operator import index


def is_number(x: object) -> bool:
    """A number alone, whose gradient nobody asks for. Sizes that a compiler traces are ints to `isinstance`, and cannot be asked for
    attributes."""
    if isinstance(x, (int, float)):
        return not isinstance(x, bool)
    return (hasattr(x, "__float__") or hasattr(x, "__index__")) and _single(x) and not getattr(x, "requires_grad", False)


def is_whole(x: object) -> bool:
    """Of numbers: those that count."""
    if isinstance(x, (int, float)):
        return isinstance(x, int)
    try:
        index(x)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def is_yes_or_no(x: object) -> bool:
    """None is no; "False", say, is neither."""
    return isinstance(x, bool) or hasattr(x, "__bool__") and _single(x)


def _single(x: object) -> bool:
    return getattr(x, "ndim", 0) == 0
