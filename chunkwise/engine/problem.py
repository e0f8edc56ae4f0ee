"""What the engine is asked to do: one frozen record, built once, passed whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from ..spec import NOTHING, Gate, Raw, Rule, Streams


def power_of_two(T: int) -> int:
    """The smallest power of two that is at least T."""
    return 1 << max(T - 1, 0).bit_length()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """States, gates and sums: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


Some = TypeVar("Some")


def given(t: Some | None) -> Some:
    """What the rule, or an earlier stage, must have provided."""
    if t is None:
        raise ValueError("chunkwise engine: a tensor is missing that this rule's stages hand on")
    return t


PART = 1 << 19  # entries: what one stream of the chunks worked on together may hold; keeps them in a CPU's caches
WIDE = 2  # so many times as much where gates are no channels' and little is kept of a stream
SHORT = 32  # tokens: chunks of the torch plan's forward pass where the states are large
LARGE = 1 << 17  # entries of a step's states from which a few more steps cost less than longer chunks do


def partition(gate: Gate, N: int, T: int, HV: int, D: int, chunk: int) -> tuple[int, int]:
    """(tokens of a part, a bound on the parts) for the torch stages; D channels, chunk = 0: the whole row. Sizes may be symbolic."""
    if not chunk:
        return T, 1
    room = PART if gate in (Gate.KEY, Gate.VALUE) else WIDE * PART
    tokens = chunk * torch.sym_max(1, room // torch.sym_max(1, N * HV * chunk * D))
    return tokens, T // tokens + 1


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
    ahead: int  # chunk of the torch plan's forward pass; its backward pass, and kernels, take C
    part: int  # tokens of a sequence that the torch stages take at once
    parts: int  # at most
    scale: float
    bonus: bool  # q reads before the write, plus u on the token's own pair
    erase: bool  # delta: erases along a or e, not along k
    before: bool  # the erase reader reads before its token forgets: along a
    precision: str
    dtype: torch.dtype  # of q, k, v and o
    key: object  # the same in all calls of these sizes and switches
    cu_seqlens: Tensor | None  # [N + 1] on the inputs' device
    cu_seqlens_cpu: Tensor | None
    inverse: str = "auto"  # precision of the products that make T
    fixed: bool = False  # nobody asks for the gate's gradient
    raw: Raw = NOTHING  # what is still to be done to the streams by kernels: in the chunk form what `raw.prepares` says

    @property
    def saved(self) -> tuple[int, ...]:
        """Shape of the states that the torch plan's forward keeps for its backward: the one before each part."""
        return (self.parts, self.N, self.HV, self.K, self.V)

    @property
    def compute(self) -> torch.dtype:
        """Of states, gates and sums."""
        return compute_dtype(self.dtype)


def bare(p: Problem) -> Problem:
    """The problem without its offsets, for what is kept longer than a call."""
    return p if p.cu_seqlens is None else replace(p, cu_seqlens=None, cu_seqlens_cpu=None)


def placed(p: Problem, cu: Tensor | None) -> Problem:
    """The problem with these offsets, of which nothing is known on the host."""
    return p if cu is None else replace(p, cu_seqlens=cu, cu_seqlens_cpu=None)


@lru_cache(maxsize=1024)
def record(
    q: tuple[int, ...], v: tuple[int, ...], packed: int | None, dtype: torch.dtype, gate: Gate, rule: Rule, chunk: int, scale: float,
    precision: str, inverse: str, exact: bool, bonus: bool, erase: bool, before: bool,
) -> Problem:  # fmt: skip
    """The problem of sizes and switches, its offsets left out."""
    B, T, H, K = q
    HV, V = v[2:]
    N = B if packed is None else packed
    whole = power_of_two(T)
    C = chunk if exact else min(chunk or whole, whole)
    ahead = min(C, SHORT) if chunk and HV * K * V >= LARGE else C  # never by N: a sample's bits do not depend on its batch
    return Problem(
        gate, rule, B, T, H, HV, K, V, N, C, ahead, *partition(gate, N, T, HV, max(K, V), chunk), scale, bonus=bonus, erase=erase,
        before=before, precision=precision, inverse=inverse, dtype=dtype, key=object(), cu_seqlens=None, cu_seqlens_cpu=None,
    )  # fmt: skip


def problem(
    x: Streams,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    *,
    gate: Gate,
    rule: Rule,
    chunk: int,
    scale: float,
    precision: str,
    inverse: str = "auto",
    exact: bool = False,
) -> Problem:
    """Read the sizes off the streams. A chunk is no longer than the row needs, unless `exact`; chunk = 0 takes the whole row as one."""
    packed = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    before = x.a is not None
    switches = (x.q.dtype, gate, rule, chunk, scale, precision, inverse, exact, x.u is not None, before or x.e is not None, before)
    p = record(x.q.shape, x.v.shape, packed, *switches)
    return p if packed is None else replace(p, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
