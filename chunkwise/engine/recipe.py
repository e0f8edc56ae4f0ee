"""Recipes: what a pass does on a GPU, decided once for its sizes, types, strides and switches, then done again with other addresses.

The hosts of a plan cost ten times the launches they make. A recipe is what they did (see record.py) with everything worked out: the memory
to allocate (see program.py), the kernels with their parameters in the driver's order (see cuda.py). A call brings its addresses, and C
launches (see player.c).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from . import cuda
from .launch import AMD, heard
from .library import outside, trim
from .problem import given
from .program import Operator, Program
from .record import Described, Launch, Recorder, Unfit, View, begin
from .tune import RULES

Made = tuple[Tensor | None, ...]
Hosts = Callable[..., Made]
Ahead = Callable[[Made, Made], tuple[tuple[Any, ...], Made, Callable[..., Made]]]
KEPT = 1024  # recipes; the oldest goes
ALLOCATE: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)  # (bytes, stream) -> address
FREE: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)
RECIPES: dict[Any, Recipe | Coming | Hosts] = {}  # where there can be no recipe, a call's hosts


class Recipe:
    """A program for a device, its kernels loaded and their parameters laid out."""

    def __init__(self, program: Program, device: torch.device) -> None:
        if cuda.player() is None:
            raise Unfit("there is no C compiler")
        self.program, self.device, self.play, self.makers = program, device, cuda.player().play, program.makers(device)
        self.index = index = given(device.index)
        ready = [_ready(step, index) for step in program.steps if isinstance(step, Launch)]
        try:
            self.board = cuda.board(ready, program.pieces, program.inputs)
        except ValueError as fault:
            raise Unfit(str(fault)) from fault
        self.runs: list[tuple[Operator | None, int, int]] = []  # launches from one operator of PyTorch to the next
        at = 0
        operators = [None if isinstance(step, Launch) else step for step in program.steps]
        for operator, steps in groupby(operators):
            many = 0 if operator is not None else len(list(steps))
            self.runs.append((operator, at, at + many))
            at += many

    def __call__(self, *tensors: Tensor | None) -> Made | None:
        """None, and nothing is done, where a tensor begins where its kernels cannot read."""
        index = self.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self(*tensors)
        if index not in cuda.ENTERED.devices:
            cuda.enter(index)
        have = self.program.allocate(tensors, self.makers)
        stream, size = torch._C._cuda_getCurrentRawStream(index), self.program.block
        if not size:
            return self._done(have, stream)
        have[self.program.room] = at = ALLOCATE(size, stream)  # an address: a tensor costs twice as much
        try:
            return self._done(have, stream)
        finally:
            FREE(at)  # what follows on this stream may have it

    def _done(self, have: list[Any], stream: int) -> Made | None:
        for operator, first, last in self.runs:
            if operator is not None:
                with outside(have[0]):
                    operator(have, self.device)
            elif not self.play(self.board, have, stream, first, last):
                return None
        return self.program.results(have)


def _ready(step: Launch, index: int) -> cuda.Ready:
    """The kernel, loaded, and its parameters, which the driver agrees to."""
    made, args = step.made, []
    for x in step.args:
        view = x.view if isinstance(x, Described) else x
        if not isinstance(view, View):
            args.append(x)
            continue
        if view.offset % 16:
            raise Unfit(f"{made.name} is given a part of a tensor at byte {view.offset}")
        place = cuda.Place(view.base, view.offset)
        args.append(cuda.Map(place, x.shape, x.strides) if isinstance(x, Described) else place)
    if not cuda.plain(made):
        raise Unfit(f"{made.name} needs more than a grid and parameters")
    ordered, function = cuda.parameters(made, args), cuda.load(made, index)
    if not cuda.fits(function, ordered):
        raise Unfit(f"{made.name} has other parameters than Triton 3.6 gives a kernel")
    return cuda.Ready(function, step.grid, 32 * made.metadata.num_warps, made.metadata.shared, ordered)


class Seat:
    """Where calls that are alike find their recipe without a key."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.rules: tuple[Any, ...] = ()

    def keep(self, recipe: Recipe | Coming | Hosts | None) -> None:
        if isinstance(recipe, Recipe):
            self.recipe, self.rules = recipe, tuple(RULES.values())

    def __call__(self, tensors: Sequence[Tensor | None]) -> Made | None:
        """What the recipe makes; None where it is not known yet, or does not fit any more."""
        if self.recipe is None or self.rules != tuple(RULES.values()) or heard():
            return None
        return self.recipe(*tensors)


def askew(tensors: Sequence[Tensor | None]) -> bool:
    """Whether one begins where kernels for starts of 16 bytes cannot read."""
    return any([t is not None and t.data_ptr() & 15 for t in tensors])


class Coming:
    """A recipe whose kernels are being built; it is there when the first call has been served."""

    def __init__(self, key: Any, program: Future[Program | None], hosts: Callable[..., Made], device: torch.device) -> None:
        self.key, self.program, self.hosts, self.device = key, program, hosts, device

    def __call__(self, *tensors: Tensor | None) -> Made:
        try:
            made = _bound(self.program.result(), self.device) or self.hosts
        except BaseException:
            RECIPES.pop(self.key, None)  # the next call asks again
            raise
        RECIPES[self.key] = made
        return given(made(*tensors))


def replay(
    what: tuple[Any, ...], tensors: Sequence[Tensor | None], hosts: Callable[..., Made], ahead: Ahead | None = None,
    seat: Seat | None = None,
) -> Made:  # fmt: skip
    """hosts(*tensors), a tuple of tensors and None, by its recipe where there is one. `what` and the tensors' sizes decide all they do.

    ahead: of the inputs and results of a call that had no recipe (without contents), what will be asked for next; its kernels are built
    with the call's own.
    """
    device = given(tensors[0]).device
    if not served(device) or heard():
        return hosts(*tensors)
    if askew(tensors):
        return hosts(*tensors)
    key = _key(what, tensors, device)
    recipe = RECIPES.get(key)
    if recipe is None:
        recipe = RECIPES[key] = _bound(record(tensors, hosts, device, ahead), device) or hosts
        trim(RECIPES, KEPT)
    if seat is not None:
        seat.keep(recipe)
    return given(recipe(*tensors))


def _key(what: tuple[Any, ...], tensors: Sequence[Tensor | None], device: torch.device) -> tuple[Any, ...]:
    return what, *[None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors], device, *RULES.values()


def served(device: torch.device) -> bool:
    """Whether launches on a device can go past Triton."""
    return device.type == "cuda" and not AMD and cuda.library() is not None


def record(
    tensors: Sequence[Tensor | None], hosts: Callable[..., Made], device: torch.device, ahead: Ahead | None = None
) -> Program | None:
    """What hosts(*tensors) does, its kernels built; None where it cannot be done again."""
    begin()
    try:
        with torch.cuda.device(device), torch.no_grad():
            with Recorder(tensors) as recorder:
                made = hosts(*recorder.inputs)
            if ahead is not None:
                what, following, then = ahead(tuple(recorder.inputs), made)
                key = _key(what, following, device)
                if key not in RECIPES:
                    RECIPES[key] = Coming(key, _behind().submit(record, following, then, device), then, device)
            recorder.compile(device)
            return Program(recorder, made)
    except Unfit:
        return None


@cache
def _behind() -> ThreadPoolExecutor:
    """The thread that records what will be asked for next."""
    return ThreadPoolExecutor(1, thread_name_prefix="chunkwise recorder")


def _bound(program: Program | None, device: torch.device) -> Recipe | None:
    try:
        with torch.cuda.device(device):  # kernels are loaded into the current context
            return None if program is None else Recipe(program, device)
    except Unfit:
        return None
