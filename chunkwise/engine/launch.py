"""Launching a kernel: what Triton works out anew at every launch is looked up, and what is being recorded is noted.

A kernel is compiled for the types of its arguments, the alignment of its pointers, what its numbers are divisible by, and its switches.
Those are the key here as they are Triton's; what was compiled under a key is run directly from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from .config import Config
from .constant import constant as constant_of
from .fingerprint import settle

if TYPE_CHECKING:
    from .record import Recorder

AMD = torch.version.hip is not None
settle()  # every kernel is launched, and hashed, by way of this module
READY: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}  # and the switches in the kernel's order


class Here(threading.local):
    """Who notes what this thread launches, instead of it being launched."""

    recorder: Recorder | None = None


HERE = Here()


def descriptor(base: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> TensorDescriptor:
    """For the copy engine: starts and rows of 16 bytes, which the caller has seen to; Triton's own constructor checks at every call."""
    d = TensorDescriptor.__new__(TensorDescriptor)
    d.base, d.shape, d.strides, d.block_shape, d.padding = base, list(shape), list(strides), list(block), "zero"
    return d


def _kind(x: Any) -> Any:
    """What of an argument a compiled kernel depends on."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0, AMD and x.untyped_storage().nbytes() < 2**31  # there offsets have 32 bits where these do
    if isinstance(x, TensorDescriptor):
        return x.base.dtype, *x.block_shape
    if isinstance(x, int):
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x >= 2**63
    return type(x)


def kind(kernel: Any, device: Any, args: Sequence[Any], switches: dict[str, Any], config: Config) -> tuple[Any, ...]:
    """What a compiled kernel is kept under."""
    return (kernel, device, config, *switches.values(), *map(_kind, args))


def heard() -> bool:
    """Whether somebody, a profiler say, wants to know of launches."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(bool(getattr(hook, "calls", hook)) for hook in hooks)


def launch(kernel: Any, grid: int | tuple[int, int], *args: Any, config: Config, **switches: Any) -> None:
    """kernel[grid](*args, **switches) with the config's warps and stages; args: all that are no switches, in the kernel's order."""
    if HERE.recorder is not None:
        HERE.recorder.launch(kernel, grid, args, switches, config)
        return
    across, along = (grid, 1) if isinstance(grid, int) else grid
    if not isinstance(kernel, JITFunction) or heard():
        kernel[across, along](*args, **switches, **config.launch)
        return
    device = driver.active.get_current_device()
    key = kind(kernel, device, args, switches, config)
    found = READY.get(key)
    if found is None:
        made = kernel[across, along](*args, **switches, **config.launch)
        if isinstance(made, CompiledKernel):
            READY[key] = made, tuple(switches[n] for n in kernel.arg_names[len(args) :])
        return
    made, constants = found
    stream = driver.active.get_current_stream(device)
    made.run(across, along, 1, stream, made.function, made.packed_metadata, None, None, None, *args, *constants)


def constant(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`constant.constant`; what is being recorded notes that it takes one."""
    kept = constant_of(make)

    def get(*key: Any, device: torch.device) -> Tensor:
        return kept(*key, device=device) if HERE.recorder is None else HERE.recorder.constant(partial(get, *key))

    return get
