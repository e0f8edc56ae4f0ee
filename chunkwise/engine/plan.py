"""The plans a pass can run on, by name: modules with `forward` and `backward`, imported when first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace


def _module(name: str) -> Callable[[], ModuleType]:
    return cache(lambda: importlib.import_module(f"chunkwise.engine.{name}"))


@cache
def _recurrent() -> SimpleNamespace:
    """Forward token by token; the gradient is the chunk form's."""
    return SimpleNamespace(forward=_module("recurrent")().forward, backward=PLANS["chunk"]().backward)


PLANS: dict[str, Callable[[], ModuleType | SimpleNamespace]] = {
    "chunk": _module("chunk"),
    "recurrent": _recurrent,
    "triton": _module("plan_triton"),
}
