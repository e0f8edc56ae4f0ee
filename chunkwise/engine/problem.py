"""What the engine is asked to do: one frozen record, built once, passed whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..spec import Gate, Rule, Streams


@dataclass(frozen=True)
class Problem:
    """Sizes and switches of one call: B batch, T tokens, H heads, HV value heads, K key, V value, N sequences, C chunk."""

    gate: Gate
    rule: Rule
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    C: int
    scale: float
    bonus: bool  # q reads before the write, plus u on the token's own pair
    erase: bool  # delta: erases along e, not along k
    precision: str
    dtype: torch.dtype  # of q, k, v and o
    cu_seqlens: Tensor | None  # [N + 1] on the inputs' device
    cu_seqlens_cpu: Tensor | None

    @property
    def compute(self) -> torch.dtype:
        """States, gates and sums: float64 for float64 inputs, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def problem(
    x: Streams, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, *, gate: Gate, rule: Rule, C: int, scale: float, precision: str
) -> Problem:
    """Read the sizes off the streams. The chunk is no longer than the sequence needs."""
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return Problem(
        gate, rule, B, T, H, HV, K, V, N, C, scale, x.u is not None, x.e is not None, precision, x.q.dtype, cu_seqlens, cu_seqlens_cpu
    )
