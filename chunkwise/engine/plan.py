"""The plans a pass can run on, by name: modules with `forward` and `backward`, imported when first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType, SimpleNamespace


def _module(name: str) -> Callable[[], ModuleType]:
    return cache(lambda: importlib.import_module(f"chunkwise.engine.{name}"))


@cache
def _recurrent() -> SimpleNamespace:
    """Forward token by token; the gradient is the chunk form's."""
    tokens = _module("recurrent")()
    return SimpleNamespace(forward=tokens.forward, backward=PLANS["chunk"]().backward, straight=tokens.straight)


@cache
def _triton() -> SimpleNamespace:
    """On kernels, by recipes."""
    from .plan_replay import replayed

    return replayed(_module("plan_triton")())


@cache
def _parallel_triton() -> SimpleNamespace:
    """Pairs of tokens on kernels, by recipes."""
    from .plan_replay import replayed

    return replayed(_module("plan_parallel_triton")())


@cache
def _mixed() -> SimpleNamespace:
    """Packed sequences, forward the short ones token by token, as they would go alone."""
    from .dispatch import RECURRENT_BELOW

    ways = PLANS["chunk"]()
    return SimpleNamespace(forward=partial(ways.forward, below=RECURRENT_BELOW), backward=partial(ways.backward, below=RECURRENT_BELOW))


@cache
def _triton_recurrent(gradient: str) -> SimpleNamespace:
    """Forward token by token in one kernel; the gradient is a chunk form's."""
    chunked = PLANS[gradient]()
    own = {"chunk": chunked.chunk} if hasattr(chunked, "chunk") else {}
    return SimpleNamespace(forward=_module("plan_recurrent_triton")().forward, backward=chunked.backward, **own)


PLANS: dict[str, Callable[[], ModuleType | SimpleNamespace]] = {
    "chunk": _module("group"),
    "mixed": _mixed,
    "recurrent": _recurrent,
    "triton": _triton,
    "triton_parallel": _parallel_triton,
    "triton_recurrent": lambda: _triton_recurrent("triton"),
    "triton_recurrent_torch": lambda: _triton_recurrent("chunk"),  # where there are no kernels for the chunk form
}
KERNELS = frozenset({"triton", "triton_parallel", "triton_recurrent", "triton_recurrent_torch"})  # plans whose forward pass runs kernels
BACKWARD_KERNELS = KERNELS - {"triton_recurrent_torch"}
