"""What a call does on a CPU, noted once and done again in a straight line: PyTorch's operators, one after another.

The Python between the operators of a small step costs as much as they do. A tape is a function of nothing but operators. What one makes
that nobody is handed lies in the same memory every time, so that its views are there already.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from .library import BELOW

Made = tuple[Tensor | None, ...]
OVER = frozenset({"addcmul", "cat", "exp", "mul", "stack", "sub", "sum"})  # write all of what `out` names
THREADS = 4  # tapes of a call
EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})


class Untaped(Exception):
    """The call does what is not to be done again unseen."""


class Listener(TorchDispatchMode):
    """A mode that PyTorch's compiler is not imported for."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would else import its compiler, seconds, only to keep it away: what is compiled never comes here."""
        return False


class Step(NamedTuple):
    """An operator, its arguments, its results."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Any, ...]
    single: bool  # it returns no tuple


class Notes(Listener):
    """Everything PyTorch does under it, beside doing it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with self:
            made = op.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        made = op(*args, **(kwargs or {}))
        single = not isinstance(made, (tuple, list))
        self.steps.append(Step(op, args, kwargs or {}, (made,) if single else tuple(made), single))
        return made


def tape(call: Callable[..., Made], tensors: Sequence[Tensor | None]) -> tuple[Made, Callable[..., Made] | None]:
    """call(*tensors), and a function that does the same to other tensors of these types and strides, in one thread at a time; None where
    that is not to be had. What a call does may depend on nothing but types and strides."""
    tensors = [None if t is None else t.detach() for t in tensors]  # two of them where one is given twice
    before = [None if t is None else _twin(t) for t in tensors]
    with torch.no_grad(), Notes() as notes:
        out = call(*tensors)
    try:
        again = _written(notes.steps, tensors, out)
        with torch.no_grad():
            same = all(map(_same, (*again(*before), *before), (*out, *tensors)))  # what it changes in place too
    except (Untaped, TypeError, RuntimeError):
        return out, None
    return out, again if same else None


class Taped:
    """A call that depends on nothing but its tensors' types and strides: the first time as it is, then by a tape."""

    def __init__(self, call: Callable[..., Made]) -> None:
        self.call, self.possible = call, True
        self.tapes: list[Callable[..., Made]] = []  # that no thread has

    def __call__(self, *tensors: Tensor | None) -> Made:
        try:
            again = self.tapes.pop()
        except IndexError:
            return self._first(tensors)
        with BELOW():
            made = again(*tensors)
        self.tapes.append(again)
        return made

    def _first(self, tensors: Sequence[Tensor | None]) -> Made:
        """Where there is no tape, or others have all."""
        if not self.possible:
            return self.call(*tensors)
        made, again = tape(self.call, tensors)
        self.possible = again is not None
        if again is not None and len(self.tapes) < THREADS:
            self.tapes.append(again)
        return made


def _twin(t: Tensor) -> Tensor:
    """The same numbers elsewhere, with the same strides."""
    once = t[tuple(slice(0, 1) if n == 0 else slice(None) for n in t.stride())]
    return torch.empty_strided(once.shape, once.stride(), dtype=t.dtype, device=t.device).copy_(once).expand(t.shape)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or a is not None and b is not None and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _quick(op: Any) -> Any:
    """An operator's function of Python's, which costs less to call."""
    name = op.overloadpacket.__name__
    found = getattr(torch, name, None) or getattr(Tensor, name, None)
    return found if inspect.isbuiltin(found) or inspect.ismethoddescriptor(found) else op


def _written(steps: Sequence[Step], tensors: Sequence[Tensor | None], out: Made) -> Callable[..., Made]:
    """The steps as a function of Python's."""
    moving = {id(t): f"t{i}" for i, t in enumerate(tensors) if t is not None}  # tensors of a call; all others stay
    handed = {_storage(t) for t in out if t is not None}
    known: dict[str, Any] = {}

    def told(x: Any) -> str:
        if isinstance(x, (list, tuple)):
            return f"({''.join(f'{told(y)}, ' for y in x)})"
        if id(x) in moving:
            return moving[id(x)]
        if x is None or isinstance(x, (bool, int)):
            return repr(x)
        known[f"c{len(known)}"] = x
        return f"c{len(known) - 1}"

    lines: list[str] = []
    for op, args, kwargs, made, single in steps:
        if not all(isinstance(t, Tensor) for t in made):
            raise Untaped(str(op))
        name, moves = op.overloadpacket.__name__, any(id(x) in moving for x in tree_flatten((args, kwargs))[0])
        ours = not any(_storage(t) in handed for t in made)
        if name == "detach":  # the same tensor, for autograd
            moving |= {id(made[0]): moving[id(args[0])]} if moves else {}
            continue
        if op.is_view and not moves or name in EMPTY and ours:
            continue  # there already
        words = [told(x) for x in args] + [f"{n}={told(x)}" for n, x in kwargs.items()]
        known[f"f{len(lines)}"] = _quick(op)
        if op._schema.is_mutable:
            lines.append(f"f{len(lines)}({', '.join(words)})")
        elif name in OVER and ours:
            lines.append(f"f{len(lines)}({', '.join(words)}, out={told(made[0])})")
        else:
            moving |= {id(t): f"v{len(lines)}_{i}" for i, t in enumerate(made)}
            lines.append(f"{', '.join(moving[id(t)] for t in made)}{'' if single else ','} = f{len(lines)}({', '.join(words)})")
    head = f"def again({', '.join(f't{i}' for i in range(len(tensors)))}):"
    exec("\n    ".join([head, *lines, f"return {told(out)}"]), known)
    return known["again"]
