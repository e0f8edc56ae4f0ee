"""A member's public call. What it decides, it decides once for sizes, types, strides and options: a later call that is alike goes straight
to its plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..spec import Output, Streams
from .dispatch import run
from .library import PLAIN, Pass, busy, trim, watched
from .prologue import prologue
from .raw import asks
from .tape import Taped

if TYPE_CHECKING:
    from ..spec import Op

KEPT = 1024  # calls; the oldest goes
TENSORS = ("initial_state", "A_log", "dt_bias")  # among the options
CALLS: dict[Any, Decided] = {}
LATEST: dict[Any, Decided] = {}  # of every member: most calls are like the one before
_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)  # a tenth of a key's time


class Alike:
    """Whether a call is like one before, in everything but the numbers in its tensors.

    PyTorch's check of tensors also sees autocast, gradients that are asked for, and who listens through them; `busy` sees the others.
    """

    def __init__(self, names: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        self.names = names
        tensors, others = ([i for i, t in enumerate(values) if (type(t) in PLAIN) is kind] for kind in (True, False))
        self.tensors, self.others = _picker(tensors), _picker(others)
        self.rest = self.others(values)
        self.types = [*map(type, self.rest)]
        about = self.tensors(values)
        sizes, strides = ([list(f(t)) for t in about] for f in (Tensor.size, Tensor.stride))
        self.check = _Guards(*about, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def __call__(self, names: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
        if names != self.names:
            return False
        rest = self.others(values)
        return [*map(type, rest)] == self.types and rest == self.rest and self.check(*self.tensors(values))


def alike(names: tuple[Any, ...], values: tuple[Any, ...]) -> Alike | None:
    """None where PyTorch has no such check, or does under autocast what a tape would not.

    Without gradients, of tensors that require one, too: the check would take later calls with gradients for this one.
    """
    if _Guards is None or torch.is_autocast_enabled("cpu"):
        return None
    if not torch.is_grad_enabled() and any(type(t) in PLAIN and t.requires_grad for t in values):
        return None
    return Alike(names, values)


def _picker(at: list[int]) -> Any:
    """What takes these out of a tuple, as a tuple."""
    return itemgetter(*at) if len(at) > 1 else lambda values: tuple([values[i] for i in at])


class Decided:
    """A call of one pass, but for its tensors."""

    def __init__(self, op: Op, inputs: Mapping[str, Any], o: Mapping[str, Any], made: Pass) -> None:
        self.name, self.names, self.lower, self.made = op.name, tuple(inputs), op.lower or Streams, made.seated()
        self.settings, self.many = {n: o[n] for n in op.settings}, len(inputs)
        self.raw = {n: None if n in TENSORS else x for n, x in o.items()} if any(asks(o)) else None
        self.turn, self.order = bool(o["state_v_first"]), None
        if self.lower is Streams and self.raw is None and not self.settings:  # the inputs are the streams; the last one there is None
            self.order = itemgetter(*(self.names.index(n) if n in self.names else self.many for n in Streams._fields))
        straight = getattr(made.plan, "straight", None)  # without it, what a plan does may depend on numbers, or goes past PyTorch
        self.alike: Alike | None = None
        self.taped = Taped(self.run) if straight is not None and not made.grad and straight(made.p) else None

    def __call__(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Output:
        call = self.run if self.taped is None or torch.is_autocast_enabled("cpu") else self.taped
        return call(*inputs.values(), *map(options.get, TENSORS))  # type: ignore[return-value]

    def remember(self, names: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
        """Make ready to be asked whether a call is like this one, whose values are these; False where nobody could tell."""
        if self.alike is None:
            where = [names.index(n) if n in names else len(names) for n in (*self.names, *TENSORS)]
            self.tensors = itemgetter(*where)
            self.alike = alike(names, values)  # last: another thread that finds it asks for the rest
        return self.alike is not None

    def run(self, *tensors: Any) -> Output:
        x, S0 = tensors[: self.many], tensors[self.many]
        if self.order is not None:
            x = self.order((*x, None))
        else:
            named: Mapping[str, Any] = dict(zip(self.names, x))
            if self.raw is not None:
                named = prologue(self.name, named, {**self.raw, **dict(zip(TENSORS[1:], tensors[self.many + 1 :]))})
            x = self.lower(**named, **self.settings)
        if not self.turn:
            return self.made(*x, S0)
        o, ST = self.made(*x, None if S0 is None else S0.mT)
        return o, None if ST is None else ST.mT


def hashed(names: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """A key of a call: everything it depends on but the numbers in its tensors."""
    about = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_neg()) if type(t) in PLAIN else t for t in values]
    return (*names, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *about)


def call(op: Op, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Output:
    """op's function of its inputs. Raises as `Op.check` and `dispatch.run` do, TypeError for an option there is not."""
    if busy():
        return _first(op, inputs, options, None)
    names, values = (*inputs, *options), (*inputs.values(), *options.values())
    latest = LATEST.get(op)
    if latest is not None and latest.alike(names, values):  # type: ignore[misc]
        return (latest.taped or latest.run)(*latest.tensors((*values, None)))  # type: ignore[return-value]
    try:
        key = None if watched() else hashed((op, *names), values)
        decided = CALLS.get(key)
    except (TypeError, RuntimeError):  # a value without a hash, a tensor without strides: named below
        key = decided = None
    if decided is None:
        return _first(op, inputs, options, key)
    if decided.remember(names, values):
        LATEST[op] = decided
    return decided(inputs, options)


def forget() -> None:
    """Let every call be decided anew."""
    CALLS.clear()
    LATEST.clear()


def _first(op: Op, inputs: Mapping[str, Any], options: Mapping[str, Any], key: Any) -> Output:
    """All that a call has to check and to decide."""
    if not options.keys() <= op.defaults.keys():
        unknown = sorted(options.keys() - op.defaults.keys())[0]
        raise TypeError(f"{op.name}: unexpected keyword {unknown!r}; it takes {', '.join(op.defaults)}")
    o = {**op.defaults, **options}
    passes: list[Pass] = []
    out = run(op, inputs, op.check(inputs), o, passes=passes)
    numbers = any(isinstance(x, Tensor) and n not in TENSORS for n, x in options.items())  # offsets, say, are looked at every time
    if key is not None and len(passes) == 1 and op.passes is None and not numbers:
        CALLS[key] = Decided(op, inputs, o, passes[0])
        trim(CALLS, KEPT)
    return out
