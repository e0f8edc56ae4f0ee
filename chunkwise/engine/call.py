"""A member's public call. What it decides, it decides once for sizes, types, strides and options: a later call that is alike goes straight
to its plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from ..spec import Output, Streams
from .dispatch import run
from .library import PLAIN, Pass, busy, trim, watched
from .problem import given
from .prologue import prologue
from .raw import Prepared, asks, handed
from .tape import Taped

if TYPE_CHECKING:
    from ..spec import Op

TENSORS = ("initial_state", "A_log", "dt_bias")  # among the options
_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)  # a tenth of a key's time


class Alike:
    """Whether a call is like one before, in everything but the numbers in its tensors.

    PyTorch's check of tensors also sees autocast, which of them require gradients, and who listens through them; `busy` sees the others.
    """

    def __init__(self, names: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        self.names = names
        tensors, others = ([i for i, t in enumerate(values) if (type(t) in PLAIN) is kind] for kind in (True, False))
        self.tensors, self.others = _picker(tensors), _picker(others)
        self.rest = self.others(values)
        self.types = [*map(type, self.rest)]
        about = self.tensors(values)
        self.mode = torch.is_grad_enabled() if any(t.requires_grad for t in about) else None  # None: makes no difference
        sizes, strides = ([list(f(t)) for t in about] for f in (Tensor.size, Tensor.stride))
        self.check = _Guards(*about, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def __call__(self, names: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
        if names != self.names:
            return False
        rest = self.others(values)
        if [*map(type, rest)] != self.types or rest != self.rest or not self.check(*self.tensors(values)):
            return False
        return self.mode is None or self.mode is torch.is_grad_enabled()


def alike(names: tuple[Any, ...], values: tuple[Any, ...]) -> Alike | None:
    """None where PyTorch has no such check, or does under autocast what a tape would not."""
    return None if _Guards is None or torch.is_autocast_enabled("cpu") else Alike(names, values)


def _picker(at: list[int]) -> Any:
    """What takes these out of a tuple, as a tuple."""
    return itemgetter(*at) if len(at) > 1 else lambda values: tuple([values[i] for i in at])


class Decision:
    """What calls that are alike have in common."""

    alike: Alike | None = None

    def remember(self, names: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
        """Make ready to be asked whether a call is like this one, whose values are these; False where nobody could tell."""
        if self.alike is None:
            self.alike = alike(names, values)
        return self.alike is not None


Some = TypeVar("Some", bound=Decision)


class Kept(Generic[Some]):
    """Decisions: the latest of every member, as most calls are like the one before; all by a key, of which the oldest goes."""

    def __init__(self, most: int) -> None:
        self.most, self.latest = most, dict[Any, Some]()
        self.by_key: dict[Any, Some] = {}

    def find(self, of: Any, names: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Some | None, Any]:
        """The decision for a call of the member `of`, if there is one; what it is kept under, None where it is not to be kept."""
        try:
            key = None if watched() else hashed((of, *names), values)
            found = self.by_key.get(key)
        except (TypeError, RuntimeError):  # a value without a hash, a tensor without strides: named by who decides
            return None, None
        if found is not None and found.remember(names, values):
            self.latest[of] = found
        return found, key

    def keep(self, key: Any, decision: Some) -> None:
        self.by_key[key] = decision
        trim(self.by_key, self.most)

    def forget(self) -> None:
        """Let every call be decided anew."""
        self.by_key.clear()
        self.latest.clear()


class Decided(Decision):
    """A call of one pass, but for its tensors."""

    def __init__(self, op: Op, inputs: Mapping[str, Any], o: Mapping[str, Any], made: Pass | Prepared) -> None:
        self.op, self.names, self.lower = op, tuple(inputs), op.lower or Streams
        self.made: Any = made.seated()
        self.settings, self.many = {n: o[n] for n in op.settings}, len(inputs)
        self.raw = {n: None if n in TENSORS else x for n, x in o.items()} if any(asks(o)) else None
        self.turn, self.order = bool(o["state_v_first"]), None
        if self.lower is Streams and self.raw is None and not self.settings:  # the inputs are the streams; the last one there is None
            self.order = itemgetter(*(self.names.index(n) if n in self.names else self.many for n in Streams._fields))
        # without `straight`, what a plan does may depend on numbers, or goes past PyTorch
        straight = getattr(made.plan, "straight", None) if isinstance(made, Pass) and not made.grad else None
        self.taped = Taped(self.run) if straight is not None and straight(made.p) else None

    def __call__(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Output:
        call = self.run if self.taped is None or torch.is_autocast_enabled("cpu") else self.taped
        return call(*inputs.values(), *map(options.get, TENSORS))  # type: ignore[return-value]

    def remember(self, names: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
        if self.alike is None:  # first this: another thread that finds the rest asks for it
            self.tensors = itemgetter(*[names.index(n) if n in names else len(names) for n in (*self.names, *TENSORS)])
        return super().remember(names, values)

    def run(self, *tensors: Any) -> Output:
        x, S0 = tensors[: self.many], tensors[self.many]
        beside: list[Any] = []
        if self.order is not None:
            x = self.order((*x, None))
        else:
            named: Mapping[str, Any] = dict(zip(self.names, x))
            options = None if self.raw is None else {**self.raw, **dict(zip(TENSORS[1:], tensors[self.many + 1 :]))}
            if isinstance(self.made, Prepared):
                if self.op.raw is None and not self.turn:
                    known = self.made.known(self.lower(**named, **self.settings), S0, tensors[self.many + 1 :])
                    if known is not None:
                        return known
                x, *beside = given(handed(self.op, named, given(options)))
            else:
                x = self.lower(**(named if options is None else prologue(self.op.name, named, options)), **self.settings)
        if not self.turn:
            return self.made(*x, S0, *beside)
        o, ST = self.made(*x, None if S0 is None else S0.mT, *beside)
        return o, None if ST is None else ST.mT


def hashed(names: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """A key of a call: everything it depends on but the numbers in its tensors. Of types too: 1 is True, and may be what True may not."""
    about = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_neg()) if type(t) in PLAIN else (type(t), t) for t in values]
    return (*names, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *about)


CALLS = Kept[Decided](1024)
LATEST, forget = CALLS.latest, CALLS.forget


def call(op: Op, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Output:
    """op's function of its inputs. Raises as `Op.check` and `dispatch.run` do, TypeError for an option there is not."""
    if busy():
        return _first(op, inputs, options, None)
    names, values = (*inputs, *options), (*inputs.values(), *options.values())
    latest = LATEST.get(op)
    if latest is not None and latest.alike(names, values):  # type: ignore[misc]
        return (latest.taped or latest.run)(*latest.tensors((*values, None)))  # type: ignore[return-value]
    decided, key = CALLS.find(op, names, values)
    return _first(op, inputs, options, key) if decided is None else decided(inputs, options)


def _first(op: Op, inputs: Mapping[str, Any], options: Mapping[str, Any], key: Any) -> Output:
    """All that a call has to check and to decide."""
    o = op.whole(options)
    passes: list[Pass | Prepared] = []
    out = run(op, inputs, op.check(inputs), o, passes=passes)
    numbers = any(isinstance(x, Tensor) and n not in TENSORS for n, x in options.items())  # offsets, say, are looked at every time
    if key is not None and len(passes) == 1 and op.passes is None and not numbers:
        CALLS.keep(key, Decided(op, inputs, o, passes[0]))
    return out
