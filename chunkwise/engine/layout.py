"""The torch stages' layout: [B, T, heads, D] or packed rows become [slots, H, n, C, D], a slot being one chunk of one sequence.

Slots are ordered by step (the chunk's number inside its sequence), sequences inside a step by falling length, so the sequences
alive at a step are a prefix and every step is one contiguous range: the loop over chunks slices, it never gathers.
Rows past the end of a sequence are zeros: a token that does not forget, writes nothing and reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from .memory import room
from .problem import Problem


@dataclass(frozen=True)
class Layout:
    """Where tokens lie in chunks: all of a call's steps, or those of `narrow`. Packed calls hold one row number per chunk row."""

    B: int
    T: int
    H: int
    C: int
    N: int
    lengths: tuple[int, ...] | None  # packed: tokens of each sequence
    device: torch.device
    first: int = 0  # step
    last: int | None = None  # the step after the last
    skipped: int = 0  # slots of the steps before the first

    @cached_property
    def chunks(self) -> list[int]:
        """Chunks of each sequence, in the caller's order."""
        return [-(-n // self.C) for n in (self.lengths if self.lengths is not None else [self.T] * self.N)]

    @cached_property
    def order(self) -> list[int]:
        """Sequences by falling number of chunks."""
        return sorted(range(self.N), key=lambda n: -self.chunks[n])

    @cached_property
    def alive(self) -> list[int]:
        """How many sequences (a prefix of `order`) each step has."""
        alive = [0] * max(self.chunks, default=0)
        for n in self.chunks:
            for i in range(n):
                alive[i] += 1
        return alive[self.first : self.last]

    @cached_property
    def steps(self) -> list[tuple[slice, int]]:
        """Per step: its slots, and how many sequences are alive."""
        ends = [0, *accumulate(self.alive)]
        return [(slice(a, b), b - a) for a, b in zip(ends, ends[1:])]

    @property
    def slots(self) -> int:
        return sum(self.alive)

    def narrow(self, first: int, last: int) -> Layout:
        """The part of this layout that holds steps first to last - 1."""
        return replace(self, first=first, last=min(last, len(self.alive)), skipped=sum(self.alive[:first]))

    def parts(self, tokens: int) -> list[Layout]:
        """The whole in parts of so many tokens of each sequence, a multiple of C or all."""
        steps = max(1, -(-tokens // self.C))
        return [self.narrow(i, i + steps) for i in range(0, len(self.alive), steps)]

    @cached_property
    def rows(self) -> Tensor:
        """Packed: [slots * C] token of each chunk row, or T for a row past the end."""
        starts = [0, *accumulate(self.lengths or ())]
        where = [(starts[n] + i * self.C, starts[n + 1]) for i, m in enumerate(self.alive, self.first) for n in self.order[:m]]
        first, end = torch.tensor(where, dtype=torch.long).view(-1, 2).unbind(1)
        rows = first[:, None] + torch.arange(self.C)
        return rows.masked_fill_(rows >= end[:, None], self.T).flatten().to(self.device)

    @cached_property
    def _inside(self) -> Tensor:
        """Packed: `rows`, where a row past the end is that of the last token."""
        return self.rows.clamp(max=self.T - 1)

    @cached_property
    def _beyond(self) -> Tensor:
        """Packed: which of `rows` are past the end."""
        return self.rows == self.T

    @cached_property
    def _ragged(self) -> list[bool]:
        """Packed: whether a step has rows past the end of a sequence."""
        lengths = self.lengths or ()
        return [any(lengths[n] < (i + 1) * self.C for n in self.order[:m]) for i, m in enumerate(self.alive, self.first)]

    def _gather(self, x: Tensor, at: slice, ragged: bool) -> Tensor:
        """Packed: [1, T, heads(, D)] -> [rows, heads(, D)] of the chunk rows `at`."""
        rows = x[0].index_select(0, self._inside[at])
        return rows.masked_fill_(self._beyond[at].view(-1, *[1] * (rows.ndim - 1)), 0) if ragged else rows

    @property
    def _tokens(self) -> tuple[int, int]:
        """Dense: first token, and the one after the last."""
        return self.first * self.C, min(self.T, (self.first + len(self.alive)) * self.C)

    def split(self, x: Tensor, dtype: torch.dtype, out: Tensor | None = None, times: float = 1.0) -> Tensor:
        """[B, T, heads(, D)] -> a new [slots, H, n, C(, D)] in `dtype`, or `out`, multiplied; heads = H * n."""
        n, D = x.shape[2] // self.H, x.shape[3:]
        if out is None:
            out = torch.empty(self.slots, self.H, n, self.C, *D, dtype=dtype, device=x.device)
        if not self.slots:
            return out
        if self.lengths is not None:
            flat = self._gather(x, slice(None), any(self._ragged))
            out.copy_(flat.view(self.slots, self.C, self.H, n, *D).permute(0, 2, 3, 1, *range(4, 4 + len(D))))
            return out if times == 1 else out.mul_(times)
        for grid, tokens in self._grids(out, x):
            if x.dtype == dtype and times != 1:
                torch.mul(tokens, times, out=grid)
            else:
                grid.copy_(tokens)
                if times != 1:
                    grid.mul_(times)
        tail = self._tokens[1] % self.C
        if tail and self._tokens[1] == self.T:
            out.view(-1, self.B, self.H, n, self.C, *D)[-1, :, :, :, tail:].zero_()
        return out

    def _pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """Dense: of x [B, T, heads, D] the rows of each step, [B, H, n, C or fewer, D]."""
        return x[:, slice(*self._tokens)].unflatten(2, (self.H, x.shape[2] // self.H)).permute(0, 2, 3, 1, 4).split(self.C, 3)

    def reader(self, x: Tensor) -> Callable[[int, Tensor], None]:
        """Of x [B, T, heads, D]: what copies the rows of step i, counted from `first`, to [m, H, n, C, D]."""
        pieces = self._pieces(x) if self.lengths is None else ()

        def packed(i: int, out: Tensor) -> None:
            now = self.steps[i][0]
            rows = self._gather(x, slice(now.start * self.C, now.stop * self.C), self._ragged[i])
            out.copy_(rows.view(out.shape[0], self.C, *out.shape[1:3], -1).permute(0, 2, 3, 1, 4))

        def dense(i: int, out: Tensor) -> None:
            rows = pieces[i].shape[3]
            if rows == self.C:
                out.copy_(pieces[i])
            else:
                out[:, :, :, :rows] = pieces[i]
                out[:, :, :, rows:].zero_()

        return dense if self.lengths is None else packed

    def writer(self, out: Tensor) -> Callable[[int, Tensor], None]:
        """Into `empty`'s out [B, T, heads, D]: what copies [m, H, n, C, D] to the tokens' rows of step i."""
        pieces = self._pieces(out) if self.lengths is None else ()

        def packed(i: int, x: Tensor) -> None:
            now = self.steps[i][0]
            rows = x.permute(0, 3, 1, 2, 4).reshape(-1, *out.shape[2:])
            out[0].index_copy_(0, self.rows[now.start * self.C : now.stop * self.C], rows.to(out.dtype))

        def dense(i: int, x: Tensor) -> None:
            rows = pieces[i].shape[3]
            pieces[i].copy_(x if rows == self.C else x[:, :, :, :rows])

        return dense if self.lengths is None else packed

    def _grids(self, chunks: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Dense: matching views of chunks and of [B, T, heads(, D)], of the whole chunks and of what is left after them."""
        n, D = chunks.shape[2], chunks.shape[4:]
        grid = chunks.view(len(self.alive), self.B, self.H, n, self.C, *D)
        tokens = x[:, slice(*self._tokens)].unflatten(2, (self.H, n))
        full, tail = divmod(tokens.shape[1], self.C)
        to_slots = (1, 0, 3, 4, 2, *range(5, 5 + len(D)))  # from [B, chunks, C, H, n, D]
        if full:
            yield grid[:full], tokens[:, : full * self.C].unflatten(1, (full, self.C)).permute(to_slots)
        if tail:
            yield grid[full:, :, :, :, :tail], tokens[:, full * self.C :].unflatten(1, (1, tail)).permute(to_slots)

    def empty(self, heads: int, *D: int, dtype: torch.dtype) -> Tensor:
        """Room for `put`: [B, T, heads(, D)], and a row more in packed calls, where rows past the end go; see `trim`."""
        return room(self.B, self.T + (self.lengths is not None), heads, *D, dtype=dtype, device=self.device)

    def trim(self, out: Tensor) -> Tensor:
        """What was `put` into `empty`: [B, T, heads(, D)]."""
        return out[:, : self.T]

    def put(self, x: Tensor, out: Tensor) -> None:
        """Write [slots, H, n, C(, D)] to its tokens' rows of `empty`."""
        n, D = x.shape[2], x.shape[4:]
        if self.lengths is not None and self.slots:
            rows = x.permute(0, 3, 1, 2, *range(4, 4 + len(D))).reshape(self.slots * self.C, self.H * n, *D)
            out[0].index_copy_(0, self.rows, rows.to(out.dtype))
        elif self.slots:
            for grid, tokens in self._grids(x, out):
                tokens.copy_(grid)

    def join(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[slots, H, n, C(, D)] of all steps -> a new [B, T, heads(, D)] in `dtype`."""
        out = self.empty(self.H * x.shape[2], *x.shape[4:], dtype=dtype)
        self.put(x.contiguous(), out)
        return self.trim(out)

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


def layout(p: Problem, device: torch.device) -> Layout:
    """The layout of a problem on a device. Packed calls read the offsets on the host: pass cu_seqlens_cpu for tensors on a device."""
    lengths: tuple[int, ...] | None = None
    if p.cu_seqlens is not None:
        ends: Sequence[int] = (p.cu_seqlens if p.cu_seqlens_cpu is None else p.cu_seqlens_cpu).tolist()
        lengths = tuple(b - a for a, b in zip(ends, ends[1:]))
    return Layout(p.B, p.T, p.H, p.C, p.N, lengths, device)
