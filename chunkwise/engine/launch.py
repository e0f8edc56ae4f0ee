"""Launching a kernel in little host time: what Triton works out anew at every call is looked up.

A kernel is compiled for the types of its arguments, the alignment of its pointers, what its numbers are divisible by, and its switches.
Those are the key here as they are Triton's; what was compiled under a key is run directly from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from .tune import Config

AMD = torch.version.hip is not None
READY: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}  # and the switches in the kernel's order


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


def _heard(hook: Any) -> bool:
    """Whether somebody, a profiler say, wants to know of launches."""
    return bool(getattr(hook, "calls", hook))


def launch(kernel: Any, grid: int, *args: Any, config: Config, **switches: Any) -> None:
    """kernel[(grid,)](*args, **switches) with the config's warps and stages; args: all that are no switches, in the kernel's order."""
    if not isinstance(kernel, JITFunction) or _heard(knobs.runtime.launch_enter_hook) or _heard(knobs.runtime.launch_exit_hook):
        kernel[(grid,)](*args, **switches, **config.launch)
        return
    device = driver.active.get_current_device()
    key = (kernel, device, config.num_warps, config.num_stages, *switches.values(), *map(_kind, args))
    found = READY.get(key)
    if found is None:
        made = kernel[(grid,)](*args, **switches, **config.launch)
        if isinstance(made, CompiledKernel):
            READY[key] = made, tuple(switches[n] for n in kernel.arg_names[len(args) :])
        return
    made, constants = found
    stream = driver.active.get_current_stream(device)
    made.run(grid, 1, 1, stream, made.function, made.packed_metadata, None, None, None, *args, *constants)
