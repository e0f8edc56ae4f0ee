"""What the hosts of a pass do, noted instead of done: launches, memory, and what PyTorch computes in between.

The hosts run on tensors without contents. What they decide depends on sizes, types, strides and switches, all in the key that a recipe is
kept under, so it is decided once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from os import cpu_count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .config import Config
from .cuda import player
from .fingerprint import remember
from .launch import HERE, READY, kind
from .tape import Listener

META = torch.device("meta")
EMPTY = (torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided)


def alike(x: Tensor, *, dtype: torch.dtype | None = None, pin_memory: bool = False) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=META)


def added(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    axes = {i % x.ndim for i in dim or range(x.ndim)}
    shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keepdim or i not in axes]
    return torch.empty(shape, dtype=dtype or x.dtype, device=META)


def _plain(x: Tensor) -> bool:
    """Whether these know what PyTorch would make: it adds whole numbers up in int64."""
    return x.is_contiguous() and x.is_floating_point() and x.ndim > 0


# Of contiguous tensors without contents PyTorch works these shapes out in Python, and imports sympy for it: seconds of a first call.
SHAPES: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.empty_like.default: alike,
    torch.ops.aten.sum.dim_IntList: added,
}


class Unfit(Exception):
    """The pass does something that is not to be noted; its hosts run at every call."""


class View(NamedTuple):
    """A tensor: a part of a piece of memory."""

    base: int
    offset: int  # bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Described(NamedTuple):
    """A descriptor of a tensor, for the copy engine."""

    view: View
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclass
class Base:
    """A piece of memory: of the caller ("input"), a `constant`, allocated by the hosts ("own"), or made by PyTorch's operators ("made")."""

    kind: str
    tensor: Tensor  # without contents; all of it
    make: Callable[..., Tensor] | None = None


@dataclass
class Launch:
    """A kernel, its grid, and its arguments but for the switches: View, Described or a number each."""

    kernel: Any
    grid: tuple[int, int]
    args: tuple[Any, ...]
    switches: dict[str, Any]
    config: Config
    made: Any = None  # compiled


@dataclass
class Torch:
    """An operator of PyTorch; tensors among its arguments are Views. outs: of what it returns, where that is new memory."""

    op: Any
    args: Any
    kwargs: Any
    outs: tuple[int | None, ...]


class Recorder(Listener):
    """Notes what happens under it in its thread."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.bases: list[Base] = []
        self.steps: list[Launch | Torch] = []
        self.aside = False  # what happens is no part of the pass
        self._places: dict[int, int] = {}  # of a tensor's storage, its base
        self._constants: dict[Any, Tensor] = {}
        self.inputs = [None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META) for t in tensors]
        for t in self.inputs:
            self._add(Base("input", torch.empty(0, device=META) if t is None else t))

    def __enter__(self) -> Recorder:
        HERE.recorder = self
        return super().__enter__()

    def __exit__(self, *fault: Any) -> None:
        HERE.recorder = None
        super().__exit__(*fault)

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        plain = op in SHAPES and _plain(args[0]) and kwargs.keys() <= {"dtype", "pin_memory"}
        made = (SHAPES[op] if plain else op)(*args, **kwargs)
        if self.aside:
            return made
        outs = made if isinstance(made, (tuple, list)) else (made,)
        fresh = [isinstance(t, Tensor) and t.untyped_storage()._cdata not in self._places for t in outs]
        if op.overloadpacket in EMPTY:
            self._add(Base("own", made))
        elif any(fresh) or op._schema.is_mutable:
            noted = tree_map(self._noted, args), tree_map(self._noted, kwargs)
            self.steps.append(Torch(op, *noted, tuple(self._add(Base("made", t)) if new else None for t, new in zip(outs, fresh))))
        return made

    def _add(self, base: Base) -> int:
        self._places[base.tensor.untyped_storage()._cdata] = len(self.bases)
        self.bases.append(base)
        return len(self.bases) - 1

    def _noted(self, x: Any) -> Any:
        """An argument without its tensor."""
        return self.view(x) if isinstance(x, Tensor) else x

    def view(self, t: Tensor) -> View:
        """Where a tensor lies."""
        base = self._places.get(t.untyped_storage()._cdata)
        if base is None:
            raise Unfit(f"a tensor {list(t.shape)} of nobody")
        return View(base, int(t.storage_offset()) * t.itemsize, tuple(t.shape), t.stride(), t.dtype)

    def constant(self, get: partial[Tensor]) -> Tensor:
        """What `get` has, as a tensor without contents."""
        key = get.func, get.args
        if key not in self._constants:
            HERE.recorder, self.aside = None, True
            real = get(device=torch.device("cpu"))  # for its sizes; operators without contents would import PyTorch's compiler
            self._constants[key] = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=META)
            HERE.recorder, self.aside = self, False
            self._add(Base("constant", self._constants[key], get))
        return self._constants[key]

    def launch(self, kernel: Any, grid: int | tuple[int, int], args: tuple[Any, ...], switches: dict[str, Any], config: Config) -> None:
        """Note a launch; its kernel is compiled, or found, afterwards."""
        across, along = (grid, 1) if isinstance(grid, int) else grid
        if not across * along:
            return
        self.steps.append(Launch(kernel, (across, along), tuple(self._argument(x) for x in args), switches, config, args))

    def _argument(self, x: Any) -> Any:
        if isinstance(x, TensorDescriptor):
            return Described(self.view(x.base), tuple(x.shape), tuple(x.strides), tuple(x.block_shape))
        return self._noted(x)

    @property
    def launches(self) -> list[Launch]:
        return [step for step in self.steps if isinstance(step, Launch)]

    def compile(self, device: torch.device) -> None:
        """Every kernel launched, built side by side with what others wait for."""
        waiting = []
        for step in self.launches:
            args, step.made = step.made, None
            if not isinstance(step.kernel, JITFunction):
                raise Unfit(f"{step.kernel} is interpreted")
            key = kind(step.kernel, device.index, args, step.switches, step.config)
            if key in READY:
                step.made = READY[key][0]
                continue
            with LOCK:
                if key not in BUILDING:
                    BUILDING[key] = _threads().submit(_build, device, step, args)
                waiting.append((step, key, BUILDING[key]))
        for step, key, future in waiting:
            try:
                step.made = future.result()
            finally:
                BUILDING.pop(key, None)
            READY[key] = step.made, tuple(step.switches[n] for n in step.kernel.arg_names[len(step.args) :])


LOCK = threading.Lock()
BUILDING: dict[Any, Future[Any]] = {}


@cache
def begin() -> Future[None]:
    """What building anything waits for, begun while hosts run; and what plays it then."""
    _threads().submit(player)
    return _threads().submit(remember)


@cache
def _threads() -> ThreadPoolExecutor:
    """Triton's compiler spends most of its time outside Python."""
    return ThreadPoolExecutor(cpu_count() or 1, thread_name_prefix="chunkwise compiler")


def _build(device: torch.device, step: Launch, args: tuple[Any, ...]) -> Any:
    remember()
    with torch.cuda.device(device):
        return step.kernel.warmup(*args, grid=(1,), **step.switches, **step.config.launch)
