"""Words in which members write down one token of their recurrence. S: [..., K, V]; k, q: [..., K]; v: [..., V]."""

from __future__ import annotations

from torch import Tensor


def write(k: Tensor, v: Tensor) -> Tensor:
    """The outer product k v': [..., K, V]."""
    return k[..., None] * v[..., None, :]


def read(q: Tensor, S: Tensor) -> Tensor:
    """S'q: [..., V]."""
    return (q[..., None] * S).sum(-2)
