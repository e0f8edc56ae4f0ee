"""How rows of channels lie in memory, and how kernels on them are started."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from ...engine.config import Config
from ...engine.launch import launch


@cache
def _built(warps: int, registers: int | None) -> Config:
    return Config(BK=0, BV=0, num_warps=warps, num_stages=3, registers=registers)


def start(
    kernel: Any, grid: int | tuple[int, int], *args: Any, warps: int, registers: int | None = None, **switches: Any
) -> None:  # fmt: skip
    """kernel[grid](*args, **switches) in little host time; args: all that are no switches, in the kernel's order. registers: the most that
    a thread may have."""
    launch(kernel, grid, *args, config=_built(warps, registers), **switches)


def rows(x: Tensor) -> tuple[Tensor, int]:
    """[..., D], in which rows lie evenly apart, and their distance; a copy only where they do not."""
    if x.is_contiguous():
        return x, x.shape[-1]
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
    return flat, flat.stride(0) if flat.shape[0] > 1 else flat.shape[1]
