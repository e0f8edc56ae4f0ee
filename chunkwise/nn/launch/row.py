"""How rows of channels lie in memory."""

from __future__ import annotations

from torch import Tensor


def rows(x: Tensor) -> tuple[Tensor, int]:
    """[..., D] as rows evenly apart, and their distance; a copy only where they are not."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
    return flat, flat.stride(0) if flat.shape[0] > 1 else flat.shape[1]
