"""Memory for large results on a CPU. A page that is touched for the first time costs as much as thousands of multiplications."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

LARGE = 4 << 20  # bytes, from which huge pages are asked for: two of x86's


@cache
def _advise() -> Callable[[int, int], object] | None:
    """The system's madvise for huge pages, where it has that."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda start, size: madvise(start, size, mmap.MADV_HUGEPAGE)


def room(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty; where it is large, Linux is asked to make it of huge pages. It may decline: nothing else changes."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if torch.compiler.is_compiling():
        return out
    if out.nbytes >= LARGE and out.is_cpu and (advise := _advise()) is not None:
        first = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages of ours alone
        advise(first, (out.data_ptr() + out.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE)
    return out
