"""Decayed products inside a chunk, for every kind of gate, with no exponent above zero where no gate is.

With G the log decay cumulated over the chunk's tokens (inclusive), a reader x at row i and a writer y at row j <= i meet as

    scores   M_ij = sum_k x_ik y_jk e^(G_ik - G_jk)
    rows     x_i  = sum_j M_ij y_j e^(G_i - G_j)         (the gradient of `scores` for x)
    pairs_   the same and y_j = sum_i M_ij x_i e^(G_i - G_j), the gradient for y, each added to what is there
    across   sum_(j < t <= i) M_ij x_i y_j e^(G_i - G_j), the gradient for g: what a token's decay lies between
    start    x_i e^(G_i)             the reader meets the state at the chunk's start; e^(G_i) are its `starts`
    end      y_j e^(G_C - G_j)       the writer as the state at the chunk's end sees it; e^(G_C - G_j) are its `ends`
    total    e^(G_C)  [S, H, n, D or 1]  what the whole chunk forgets

`before`: the reader reads before its own token forgets, G_(i-1) in G_i's place; only rows j < i are met then.
A difference of prefix sums must not lose small decays behind a huge one: see `Cumulated`.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

FLOOR = {torch.float32: -104.0, torch.float64: -746.0}  # exp of it is 0: a gate below forgets everything, -inf and -1e4 too
GRAIN = 16  # the coarse part of a log decay is a multiple of 1 / GRAIN
LEAF = 4  # per-channel gates: blocks of so many rows are taken pairwise


Between = dict[int, Tensor]  # by level: what `pairs_` leaves for `across`


class Cumulated:
    """Prefix sums of log decays along an axis whose differences are as good as sums of their own.

    Every log decay is a coarse part, a multiple of 1 / GRAIN whose sums are exact, and a fine part below 1 / GRAIN whose sums stay
    small: the error of a difference is that of its fine part, however far both sums have fallen.
    """

    def __init__(self, coarse: Tensor, fine: Tensor):
        self.coarse, self.fine = coarse, fine

    @classmethod
    def of(cls, g: Tensor, dim: int) -> tuple[Cumulated, Cumulated]:
        """Inclusive and exclusive prefix sums of g, at most 0, of dtype float32 or float64."""
        g = g.clamp(min=FLOOR[g.dtype])
        coarse = (g * GRAIN).round_().div_(GRAIN)
        fine = g - coarse
        total = cls(coarse.cumsum(dim), fine.cumsum(dim))
        return total, cls(total.coarse - coarse, total.fine - fine)

    def __getitem__(self, at: object) -> Cumulated:
        return Cumulated(self.coarse[at], self.fine[at])  # type: ignore[index]

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Cumulated:
        return Cumulated(self.coarse.unflatten(dim, sizes), self.fine.unflatten(dim, sizes))

    def __sub__(self, other: Cumulated) -> Tensor:
        return (self.coarse - other.coarse).add_(self.fine - other.fine)

    def exp(self) -> Tensor:
        return (self.coarse + self.fine).exp_()


def _mask(M: Tensor, strict: bool) -> Tensor:
    return M.tril_(-1 if strict else 0)


class Decay(Protocol):
    """What the pipeline asks of a gate; x, y: [S, H, n, C, D]; M: [S, H, n, C, C], zero above the diagonal."""

    def scores(self, x: Tensor, y: Tensor, strict: bool = False, before: bool = False) -> Tensor: ...
    def rows(self, M: Tensor, y: Tensor, before: bool = False) -> Tensor: ...
    def pairs_(self, M: Tensor, x: Tensor, y: Tensor, dx: Tensor, dy: Tensor, between: Between, before: bool = False) -> None: ...
    def starts(self, before: bool = False) -> Tensor | None: ...  # [S, H, n, C, D or 1]
    def ends(self) -> Tensor | None: ...
    def start(self, x: Tensor, before: bool = False) -> Tensor: ...
    def end(self, y: Tensor) -> Tensor: ...
    def total(self) -> Tensor | None: ...


class NoDecay:
    """Nothing is forgotten."""

    def scores(self, x: Tensor, y: Tensor, strict: bool = False, before: bool = False) -> Tensor:
        return self.decayed(x @ y.mT, strict)

    def decayed(self, P: Tensor, strict: bool = False, before: bool = False) -> Tensor:
        """Scores from products of their own [S, H, n, C, C]."""
        return P.tril(-1 if strict else 0)

    def rows(self, M: Tensor, y: Tensor, before: bool = False) -> Tensor:
        return M @ y

    def pairs_(self, M: Tensor, x: Tensor, y: Tensor, dx: Tensor, dy: Tensor, between: Between, before: bool = False) -> None:
        dx += M @ y
        dy += M.mT @ x

    def starts(self, before: bool = False) -> Tensor | None:
        return None

    def ends(self) -> Tensor | None:
        return None

    def start(self, x: Tensor, before: bool = False) -> Tensor:
        return x

    def end(self, y: Tensor) -> Tensor:
        return y

    def total(self) -> Tensor | None:
        return None


class ScalarDecay:
    """One number per token and head. g: [S, H, n, C], at most 0. Products are undecayed matrix products times Gamma_ij = e^(G_i - G_j)."""

    def __init__(self, g: Tensor):
        self.G, self.G_before = Cumulated.of(g, -1)
        self._gamma: dict[bool, Tensor] = {}
        self._starts: dict[bool, Tensor] = {}

    def __getitem__(self, at: slice) -> ScalarDecay:
        """Of the slots `at`."""
        part = copy(self)
        part.G, part.G_before, part._gamma, part._starts = self.G[at], self.G_before[at], {}, {}
        return part

    def gamma(self, before: bool) -> Tensor:
        """[S, H, n, C, C]; zero where the reader does not meet the writer."""
        if before not in self._gamma:
            G = self.G_before if before else self.G
            self._gamma[before] = _mask((G[..., :, None] - self.G[..., None, :]).exp_(), before)
        return self._gamma[before]

    def scores(self, x: Tensor, y: Tensor, strict: bool = False, before: bool = False) -> Tensor:
        return self.decayed(x @ y.mT, strict, before)

    def decayed(self, P: Tensor, strict: bool = False, before: bool = False) -> Tensor:
        """Scores from products that are not decayed [S, H, 1 or n, C, C]."""
        M = P * self.gamma(before)
        return _mask(M, True) if strict and not before else M

    def rows(self, M: Tensor, y: Tensor, before: bool = False) -> Tensor:
        return (M * self.gamma(before)) @ y

    def pairs_(self, M: Tensor, x: Tensor, y: Tensor, dx: Tensor, dy: Tensor, between: Between, before: bool = False) -> None:
        """Nothing is left in `between`: who has the scores has every pair's share."""
        M = M * self.gamma(before)
        dx += M @ y
        dy += M.mT @ x

    def starts(self, before: bool = False) -> Tensor:
        if before not in self._starts:
            self._starts[before] = (self.G_before if before else self.G).exp()[..., None]
        return self._starts[before]

    def ends(self) -> Tensor:
        return (self.G[..., -1:] - self.G).exp_()[..., None]

    def start(self, x: Tensor, before: bool = False) -> Tensor:
        return x * self.starts(before)

    def end(self, y: Tensor) -> Tensor:
        return y * self.ends()

    def total(self) -> Tensor | None:
        return self.G[..., -1:].exp()


def _blocks(M: Tensor, s: int) -> Tensor:
    """[..., C, C] -> [..., C / 2s, s, s]: where the rows of every second block of s meet the columns of the block before it."""
    return M.unflatten(-1, (-1, 2, s)).unflatten(-4, (-1, 2, s))[..., 1, :, :, 0, :].diagonal(0, -4, -2).movedim(-1, -3)


def _room(between: Between, level: int, like: Tensor) -> Tensor:
    """The sums of a level, from zeros."""
    if level not in between:
        between[level] = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return between[level]


def _leaves(M: Tensor, leaf: int) -> Tensor:
    """[..., C, C] -> [..., leaf, leaf, C / leaf]: the blocks on the diagonal."""
    return M.unflatten(-1, (-1, leaf)).unflatten(-3, (-1, leaf)).diagonal(0, -4, -2)


class ChannelDecay:
    """One number per token, head and channel. g: [S, H, n, C, D], at most 0.

    Secondary chunking by halves: at level s the rows of every second block of s rows meet the columns of the block before it, both
    anchored at that block's last G, so both exponents are at most 0 and the block is one matrix product; blocks of LEAF rows go pairwise.
    A token is either a row or a column of a level, so a level costs one exponential a channel.
    """

    def __init__(self, g: Tensor):
        self.G, self.G_before = Cumulated.of(g, -2)
        self.C = g.shape[-2]
        self._factors: dict[bool, list[tuple[int, Tensor, Tensor]]] = {}
        self._leaves: dict[bool, list[Tensor]] = {}
        self._starts: dict[bool, Tensor] = {}

    def _levels(self, before: bool) -> list[tuple[int, Tensor, Tensor]]:
        """(s, row factors, column factors), each [S, H, n, C / 2s, s, D]."""
        if before not in self._factors:
            self._factors[before] = list(self._make_levels(before))
        return self._factors[before]

    def _make_levels(self, before: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
        s = LEAF
        while s < self.C:
            G = self.G.unflatten(-2, (-1, 2, s))  # [..., C / 2s, 2, s, D]
            rows = (self.G_before if before else self.G).unflatten(-2, (-1, 2, s))[..., 1, :, :]
            anchor = G[..., 0, -1:, :]
            yield s, (rows - anchor).exp_(), (anchor - G[..., 0, :, :]).exp_()
            s *= 2

    def _pairs(self, before: bool) -> list[Tensor]:
        """For each distance d < LEAF inside a leaf: e^(G_i - G_(i-d)), [S, H, n, C / LEAF, LEAF - d, D]."""
        if before not in self._leaves:
            G = self.G.unflatten(-2, (-1, min(LEAF, self.C)))
            R = self.G_before.unflatten(-2, (-1, min(LEAF, self.C))) if before else G
            size = G.fine.shape[-2]
            self._leaves[before] = [(R[..., d:, :] - G[..., : size - d, :]).exp_() for d in range(size)]
        return self._leaves[before]

    def scores(self, x: Tensor, y: Tensor, strict: bool = False, before: bool = False) -> Tensor:
        strict = strict or before
        shape = torch.broadcast_shapes(x.shape, y.shape, self.G.fine.shape)
        M = x.new_zeros(*shape[:-2], self.C, self.C)
        for s, row, col in self._levels(before):
            xs, ys = x.unflatten(-2, (-1, 2, s)), y.unflatten(-2, (-1, 2, s))
            blocks = (xs[..., 1, :, :] * row) @ (ys[..., 0, :, :] * col).mT  # [..., C / 2s, s, s]
            _blocks(M, s).copy_(blocks)
        leaf = min(LEAF, self.C)
        xs, ys = x.unflatten(-2, (-1, leaf)), y.unflatten(-2, (-1, leaf))
        leaves = _leaves(M, leaf)
        for d, pair in enumerate(self._pairs(before)):
            if d or not strict:
                met = (xs[..., d:, :] * ys[..., : leaf - d, :] * pair if d or before else xs * ys).sum(-1)  # [..., C / leaf, leaf - d]
                leaves.diagonal(-d, -3, -2).copy_(met)
        return M

    def rows(self, M: Tensor, y: Tensor, before: bool = False) -> Tensor:
        shape = torch.broadcast_shapes(y.shape[:-2], self.G.fine.shape[:-2], M.shape[:-2])
        out = y.new_zeros(*shape, self.C, y.shape[-1])
        for s, row, col in self._levels(before):
            ys, outs = y.unflatten(-2, (-1, 2, s)), out.unflatten(-2, (-1, 2, s))
            outs[..., 1, :, :].addcmul_(_blocks(M, s) @ (ys[..., 0, :, :] * col), row)
        leaf = min(LEAF, self.C)
        ys, outs = y.unflatten(-2, (-1, leaf)), out.unflatten(-2, (-1, leaf))
        leaves = _leaves(M, leaf)
        for d, pair in enumerate(self._pairs(before)):
            if d or not before:
                outs[..., d:, :] += ys[..., : leaf - d, :] * pair * leaves.diagonal(-d, -3, -2)[..., None]
        return out

    def pairs_(self, M: Tensor, x: Tensor, y: Tensor, dx: Tensor, dy: Tensor, between: Between, before: bool = False) -> None:
        """M: zero on the diagonal too. A level's share of x dx is left in `between` at its rows, its share of y dy at its columns; leaves'
        at the tokens that they lie across.
        """
        for s, row, col in self._levels(before):
            xs, ys, dxs, dys = (z.unflatten(-2, (-1, 2, s)) for z in (x, y, dx, dy))
            xs, ys, block, at = xs[..., 1, :, :], ys[..., 0, :, :], _blocks(M, s), _room(between, s, dxs)
            read, wrote = (block @ (ys * col)).mul_(row), (block.mT @ (xs * row)).mul_(col)
            dxs[..., 1, :, :] += read
            dys[..., 0, :, :] += wrote
            at[..., 1, : s - before, :].addcmul_(read[..., int(before) :, :], xs[..., int(before) :, :])
            at[..., 0, :, :].addcmul_(wrote, ys)
        leaf = min(LEAF, self.C)
        xs, ys, dxs, dys = (z.unflatten(-2, (-1, leaf)) for z in (x, y, dx, dy))
        leaves, at = _leaves(M, leaf), _room(between, 0, dxs)
        for d, pair in enumerate(self._pairs(before)):
            if d:
                met = pair * leaves.diagonal(-d, -3, -2)[..., None]  # [..., C / leaf, leaf - d, D]
                read = met * ys[..., : leaf - d, :]
                dxs[..., d:, :] += read
                dys[..., : leaf - d, :].addcmul_(met, xs[..., d:, :])
                read *= xs[..., d:, :]
                for t in range(1, d + 1 - before):
                    at[..., t : t + leaf - d, :] += read

    def across(self, between: Between) -> Tensor:
        """[S, H, n, C, D]. A token among a level's rows lies between its rows from there on and all columns, one among the columns
        between those before it and all rows: no other pair comes into the sum, only to be taken off again.
        """
        total = between.pop(0).flatten(-3, -2)
        for s, at in between.items():
            rows_on = at.new_ones(s, s).triu()
            sums = torch.block_diag(rows_on.mT - torch.eye(s, dtype=at.dtype, device=at.device), rows_on)  # [2 s, 2 s]
            at = at.flatten(-3, -2)
            total.view(-1, 2 * s, at.shape[-1]).baddbmm_(sums.expand(at.shape[:-2].numel(), -1, -1), at.flatten(0, -3))
        return total

    def starts(self, before: bool = False) -> Tensor:
        if before not in self._starts:
            self._starts[before] = (self.G_before if before else self.G).exp()
        return self._starts[before]

    @cached_property
    def _ends(self) -> Tensor:
        return (self.G[..., -1:, :] - self.G).exp_()

    def ends(self) -> Tensor:
        return self._ends

    def start(self, x: Tensor, before: bool = False) -> Tensor:
        return x * self.starts(before)

    def end(self, y: Tensor) -> Tensor:
        return y * self.ends()

    def total(self) -> Tensor | None:
        return self.G[..., -1, :].exp()
