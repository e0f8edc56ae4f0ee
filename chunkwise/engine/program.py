"""A recorded pass as it is done again: memory to allocate, steps on it, results.

Memory that nobody is handed and PyTorch's operators do not touch lies in one block, each piece where others are dead. A call's pieces of
memory are, in this order: its inputs, constants, what is allocated apart, the block, and what operators make on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .problem import given
from .record import Described, Launch, Recorder, Torch, Unfit, View

ALIGNED = 256  # bytes: pieces of the block start at multiples of it


class Program:
    """See above; `steps` are Launch, its views those of a call, and Operator."""

    def __init__(self, recorder: Recorder, made: Sequence[Tensor | None]) -> None:
        bases, steps = recorder.bases, recorder.steps
        outs = [None if t is None else recorder.view(t) for t in made]
        life = lives(steps)
        apart = {v.base for v in outs if v is not None} | {v.base for step in steps if isinstance(step, Torch) for v in views(step)}
        inside = [i for i, b in enumerate(bases) if b.kind == "own" and i in life and i not in apart]
        offsets, self.block = pack([(bases[i].tensor.untyped_storage().nbytes(), *life[i]) for i in inside])
        self._start = dict(zip(inside, offsets))
        inputs, constants, own, after = ([i for i, b in enumerate(bases) if b.kind == k] for k in ("input", "constant", "own", "made"))
        own = [i for i in own if i in apart]
        before = [*inputs, *constants, *own]
        self.inputs, self.room = len(inputs), len(before)  # how many the caller's are; where the block is among them
        self.pieces = self.room + 1 + len(after)
        self._at = {b: i for i, b in enumerate(before)} | {b: self.room + 1 + i for i, b in enumerate(after)}
        self._constants = [given(bases[i].make) for i in constants]
        self._owned = [_layout(bases[i].tensor) for i in own]
        self._later = [None] * (1 + len(after))
        self.steps = [self._moved(step) if isinstance(step, Launch) else Operator(step, self) for step in steps]
        self._outs = [None if v is None else Part(self.moved(v), bases[v.base].tensor) for v in outs]
        whole = len(outs) > 1 and all(out is None or out.whole for out in self._outs)  # they are pieces, or None
        self._whole = itemgetter(*(self.pieces if out is None else out.view.base for out in self._outs)) if whole else None

    def moved(self, x: Any) -> Any:
        """A recorded view, where it is among a call's pieces of memory."""
        if isinstance(x, Described):
            return x._replace(view=self.moved(x.view))
        if isinstance(x, View):
            inner = self._start.get(x.base)
            return x._replace(base=self._at[x.base]) if inner is None else x._replace(base=self.room, offset=inner + x.offset)
        return x

    def _moved(self, step: Launch) -> Launch:
        return replace(step, args=tuple(self.moved(x) for x in step.args))

    def makers(self, device: torch.device) -> Sequence[Callable[[], Tensor]]:
        """Of a call's pieces of memory on a device, those that are there before it, but for the block: constants, what lies apart."""
        made = [partial(get, device=device) for get in self._constants]
        return made + [partial(torch.empty_strided, shape, strides, dtype=dtype, device=device) for shape, strides, dtype in self._owned]

    def allocate(self, tensors: Sequence[Tensor | None], makers: Sequence[Callable[[], Tensor]]) -> list[Any]:
        """The pieces of memory of a call; None where there is nothing, or not yet: the block, and what operators make."""
        return [*tensors, *[make() for make in makers], *self._later]

    def results(self, have: list[Any]) -> tuple[Tensor | None, ...]:
        """What the caller gets."""
        if self._whole is not None:
            return self._whole((*have, None))
        return tuple([None if out is None else out(have) for out in self._outs])


class Part:
    """A tensor of a call from its pieces of memory."""

    def __init__(self, view: View, base: Tensor) -> None:
        if view.dtype != base.dtype:
            raise Unfit(f"{base.dtype} read as {view.dtype}")
        self.view = view
        self.whole = view.offset == 0 and (view.shape, view.strides, view.dtype) == _layout(base)

    def __call__(self, have: Sequence[Any]) -> Tensor:
        t = have[self.view.base]
        return t if self.whole else seen(t, self.view)


def seen(t: Tensor, view: View) -> Tensor:
    """The view of a piece of memory."""
    return t.as_strided(view.shape, view.strides, t.storage_offset() + view.offset // view.dtype.itemsize)


class Operator:
    """An operator of PyTorch on a call's pieces of memory."""

    def __init__(self, step: Torch, program: Program) -> None:
        flat, self.tree = tree_flatten((step.args, step.kwargs), is_leaf=lambda x: isinstance(x, View))
        self.op, self.flat = step.op, [program.moved(x) for x in flat]
        self.outs = [None if b is None else program._at[b] for b in step.outs]

    def __call__(self, have: list[Any], device: torch.device) -> None:
        """Its results join them."""
        flat = [seen(have[x.base], x) if isinstance(x, View) else device if isinstance(x, torch.device) else x for x in self.flat]
        args, kwargs = tree_unflatten(flat, self.tree)
        made = self.op(*args, **kwargs)
        for t, place in zip(made if isinstance(made, (tuple, list)) else (made,), self.outs):
            if place is not None:
                have[place] = t


def _layout(t: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(t.shape), t.stride(), t.dtype


def lives(steps: Sequence[Launch | Torch]) -> dict[int, tuple[int, int]]:
    """Of every base the first and the last step that touches it."""
    found: dict[int, tuple[int, int]] = {}
    for i, step in enumerate(steps):
        for view in views(step):
            found[view.base] = found.get(view.base, (i, i))[0], i
    return found


def views(step: Launch | Torch) -> list[View]:
    """The tensors that a step is given."""
    found: list[View] = []

    def look(x: Any) -> None:
        if isinstance(x, View):
            found.append(x)
        elif isinstance(x, Described):
            found.append(x.view)
        elif isinstance(x, (tuple, list)):
            for y in x:
                look(y)
        elif isinstance(x, dict):
            look(list(x.values()))

    look((step.args, step.kwargs) if isinstance(step, Torch) else step.args)
    return found


def pack(pieces: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """(bytes, first step, last step) of each piece -> its offset, and the bytes of all. Pieces that live at once do not overlap.

    The largest are placed first, each as low as those allow that it meets.
    """
    placed: list[tuple[int, int, int, int]] = []  # start, end, first, last
    offsets = [0] * len(pieces)
    for i in sorted(range(len(pieces)), key=lambda i: -pieces[i][0]):
        size, first, last = pieces[i]
        size = -(-size // ALIGNED) * ALIGNED
        at = 0
        for start, end, a, b in sorted(placed):
            if a <= last and first <= b and at < end and start < at + size:
                at = end
        placed.append((at, at + size, first, last))
        offsets[i] = at
    return offsets, max((end for _, end, _, _ in placed), default=0)
