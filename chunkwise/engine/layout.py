"""The torch stages' layout: [B, T, heads, D] or packed rows become [slots, H, n, C, D], a slot being one chunk of one sequence.

Slots are ordered by step (the chunk's number inside its sequence), sequences inside a step by falling length, so the sequences
alive at a step are a prefix and every step is one contiguous range: the loop over chunks slices, it never gathers.
Rows past the end of a sequence are zeros: a token that does not forget, writes nothing and reads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .problem import Problem


@dataclass(frozen=True)
class Layout:
    """Where tokens lie in chunks. Dense calls need no table; packed ones hold one row number per chunk row."""

    B: int
    T: int
    H: int
    C: int
    N: int
    lengths: tuple[int, ...] | None  # packed: tokens of each sequence
    device: torch.device

    @cached_property
    def chunks(self) -> list[int]:
        """Chunks of each sequence, in the caller's order."""
        return [-(-n // self.C) for n in (self.lengths if self.lengths is not None else [self.T] * self.N)]

    @cached_property
    def order(self) -> list[int]:
        """Sequences by falling number of chunks."""
        return sorted(range(self.N), key=lambda n: -self.chunks[n])

    @cached_property
    def steps(self) -> list[tuple[slice, int]]:
        """Per step: its slots, and how many sequences (a prefix of `order`) are alive."""
        alive = [0] * max(self.chunks, default=0)
        for n in self.chunks:
            for i in range(n):
                alive[i] += 1
        ends = [0]
        for m in alive:
            ends.append(ends[-1] + m)
        return [(slice(a, a + m), m) for a, m in zip(ends, alive)]

    @property
    def slots(self) -> int:
        return sum(self.chunks)

    @cached_property
    def _rows(self) -> Tensor:
        """Packed: [slots * C] token of each chunk row, or T for a row past the end."""
        starts = [0]
        for n in self.lengths or ():
            starts.append(starts[-1] + n)
        first = torch.tensor([starts[n] + i * self.C for i, (_, m) in enumerate(self.steps) for n in self.order[:m]], dtype=torch.long)
        end = torch.tensor([starts[n + 1] for i, (_, m) in enumerate(self.steps) for n in self.order[:m]], dtype=torch.long)
        rows = first[:, None] + torch.arange(self.C)
        return rows.masked_fill_(rows >= end[:, None], self.T).flatten().to(self.device)

    @cached_property
    def _places(self) -> Tensor:
        """Packed: [T] chunk row of each token, the inverse of `_rows`."""
        place = torch.empty(self.T + 1, dtype=torch.long, device=self.device)
        place[self._rows] = torch.arange(self._rows.numel(), device=self.device)
        return place[: self.T]

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, heads(, D)] -> a new [slots, H, n, C(, D)] in `dtype`; heads = H * n."""
        n, D = x.shape[2] // self.H, x.shape[3:]
        out = torch.empty(self.slots, self.H, n, self.C, *D, dtype=dtype, device=x.device)
        if not self.slots:
            return out
        if self.lengths is not None:
            flat = torch.cat((x[0], x.new_zeros(1, *x.shape[2:]))).index_select(0, self._rows)
            out.copy_(flat.view(self.slots, self.C, self.H, n, *D).permute(0, 2, 3, 1, *range(4, 4 + len(D))))
            return out
        NC, full = len(self.steps), self.T // self.C
        grid = out.view(NC, self.B, self.H, n, self.C, *D)
        to_slots = (1, 0, 3, 4, 2, *range(5, 5 + len(D)))  # from [B, NC, C, H, n, D]
        if full:
            grid[:full].copy_(x[:, : full * self.C].unflatten(2, (self.H, n)).unflatten(1, (full, self.C)).permute(to_slots))
        if full < NC:
            tail = self.T - full * self.C
            grid[full:, :, :, :, :tail].copy_(x[:, full * self.C :].unflatten(2, (self.H, n)).unflatten(1, (1, tail)).permute(to_slots))
            grid[full:, :, :, :, tail:].zero_()
        return out

    def join(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[slots, H, n, C(, D)] -> a new [B, T, heads(, D)] in `dtype`."""
        n, D = x.shape[2], x.shape[4:]
        if self.lengths is not None:
            rows = x.permute(0, 3, 1, 2, *range(4, 4 + len(D))).reshape(self.slots * self.C, self.H * n, *D)
            return rows.index_select(0, self._places).to(dtype)[None]
        out = torch.empty(self.B, self.T, self.H * n, *D, dtype=dtype, device=x.device)
        if not self.slots:
            return out
        heads = out.unflatten(2, (self.H, n))
        NC, full = len(self.steps), self.T // self.C
        grid = x.view(NC, self.B, self.H, n, self.C, *D)
        to_rows = (1, 0, 4, 2, 3, *range(5, 5 + len(D)))  # to [B, NC, C, H, n, D]
        if full:
            heads[:, : full * self.C].unflatten(1, (full, self.C)).copy_(grid[:full].permute(to_rows))
        if full < NC:
            tail = self.T - full * self.C
            heads[:, full * self.C :].unflatten(1, (1, tail)).copy_(grid[full:, :, :, :, :tail].permute(to_rows))
        return out

    def sort(self, S: Tensor) -> Tensor:
        """Sequences [N, ...] from the caller's order to this layout's."""
        return S if self.lengths is None else S[self.order]

    def unsort(self, S: Tensor) -> Tensor:
        """The inverse of `sort`."""
        if self.lengths is None:
            return S
        out = torch.empty_like(S)
        out[self.order] = S
        return out


def layout(p: Problem) -> Layout:
    """The layout of a problem. Packed calls read the offsets on the host: pass cu_seqlens_cpu for tensors on a device."""
    lengths: tuple[int, ...] | None = None
    if p.cu_seqlens is not None:
        ends: Sequence[int] = (p.cu_seqlens if p.cu_seqlens_cpu is None else p.cu_seqlens_cpu).tolist()
        lengths = tuple(b - a for a, b in zip(ends, ends[1:]))
    device = p.cu_seqlens.device if p.cu_seqlens is not None else torch.device("cpu")
    return Layout(p.B, p.T, p.H, p.C, p.N, lengths, device)
