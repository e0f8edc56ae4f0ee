"""The recurrence token by token: decoding, and short inputs. Its gradient is the chunk form's: the same function, recomputed.

A token reads the state for X, lets it forget, writes, and reads it for o while the caches still hold it. One token of one sequence is a few
small steps around four passes over the state, so every view counts: what needs no step has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import Gate, Rule, Streams
from .layout import Layout, layout
from .memory import room
from .problem import Problem, given

BLOCK = 1 << 19  # entries of the states that a CPU works on together: what its second caches hold


class Rows:
    """Tokens in the order they are taken: first tokens of all sequences, second ones, and so on. Packed: longest sequences first.

    A row is a token of a sequence, or of one of its heads where the states of all are more than a block: [rows, 1, h or h * n, D].
    """

    def __init__(self, p: Problem, device: torch.device, whole: bool):
        self.p, self.n, self.device, self.dtype = p, p.HV // p.H, device, p.compute
        self.h = p.H if whole or p.HV * p.K * p.V <= BLOCK else 1  # heads of a row, with n value heads each
        self.packed: Layout | None = None if p.cu_seqlens is None else layout(dataclasses.replace(p, C=1), device)
        self.alive = [p.B] * p.T if self.packed is None else self.packed.alive  # per step: sequences that have such a token
        self.count = p.N * (p.H // self.h)  # of states

    def take(self, x: Tensor) -> Tensor:
        """[B, T, H or HV, ...] -> [rows, 1, h or h * n, ...] in the compute dtype."""
        p = self.p
        x = x if x.dtype is self.dtype else x.to(self.dtype)
        if self.packed is None and self.h == p.H and p.T == 1:
            return x
        heads, rest = x.shape[2] * self.h // p.H, x.shape[3:]
        if self.packed is not None:
            x = x[0].index_select(0, self.packed.rows)
        elif p.B != 1 and p.T != 1:
            x = x.transpose(0, 1)
        return x.reshape(-1, 1, heads, *rest)

    def put(self, o: Tensor) -> Tensor:
        """[rows, 1, h * n, V] -> [B, T, HV, V] in the problem's dtype."""
        p, o = self.p, o if o.dtype is self.p.dtype else o.to(self.p.dtype)
        if self.packed is not None:
            o = o.view(p.T, p.HV, p.V)
            return torch.empty_like(o).index_copy_(0, self.packed.rows, o)[None]
        if p.B == 1 or p.T == 1:
            return o if self.h == p.H and p.T == 1 else o.view(p.B, p.T, p.HV, p.V)
        return o.view(p.T, p.B, p.HV, p.V).transpose(0, 1).contiguous()

    def enter(self, S: Tensor) -> Tensor:
        """[N, HV, K, V] in the caller's order -> dense [count, h * n, K, V] in that of the rows, in the compute dtype: bits do not
        depend on how states lie."""
        S = S if S.dtype is self.dtype else S.to(self.dtype)
        S = (S if self.packed is None else self.packed.sort(S)).contiguous()
        return S if self.h == self.p.H else S.view(-1, self.n, self.p.K, self.p.V)

    def leave(self, S: Tensor) -> Tensor:
        """The inverse of `enter`."""
        S = S if self.h == self.p.H else S.view(self.p.N, self.p.HV, self.p.K, self.p.V)
        return S if self.packed is None else self.packed.unsort(S)


class Tokens(NamedTuple):
    """All a step needs, rows first; absent where the rule has none. h heads, n value heads each, hn = h * n."""

    q: Tensor  # [rows, hn, K], scaled
    r: Tensor | None  # [rows, hn, K]: who erases; times the decay of key channels, as it meets the state before the step
    k: Tensor  # [rows, hn, K, 1], or [rows, h, 1, K, 1] where n value heads share it
    v: Tensor  # [rows, 1, hn, V]
    beta: Tensor | None  # [rows, 1, hn]
    w: Tensor | None  # as k
    D: Tensor | None  # [rows, hn, K or 1, 1] or [rows, hn, 1, V], what is left of the state
    left: Tensor | None  # [rows, 1, hn, 1 or V], the same of what r has read, where it is no matter of key channels
    own: Tensor | None  # [rows, 1, hn, 1], what q adds of its token's v, where it reads before that is written


@lru_cache(maxsize=64)
def _number(value: float, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n, 1, 1, 1, 1]; one of Python's would be converted in every call."""
    return torch.full((n, 1, 1, 1, 1), value, dtype=dtype, device=device)


def _tokens(p: Problem, x: Streams, rows: Rows) -> Tokens:
    h, hn, K, take, delta = rows.h, rows.h * rows.n, p.K, rows.take, p.rule is Rule.DELTA

    def reader(y: Tensor, by: float | Tensor) -> Tensor:
        """[rows, 1, h or hn, K] times a number, or [rows, 1, hn, K] -> [rows, hn, K], without a view of y."""
        heads = y.shape[2]
        R = torch.empty(len(y), hn, K, dtype=rows.dtype, device=rows.device)

        def apart(z: Tensor) -> Tensor:
            """[rows, 1, hn, K] -> [hn / heads, rows, 1, heads, K]"""
            return z.reshape(-1, 1, heads, hn // heads, K).permute(3, 0, 1, 2, 4)

        if not isinstance(by, Tensor):
            make = _number if rows.device.type == "cpu" else _number.__wrapped__  # a graph may own what a GPU makes
            torch.mul(y, make(by, hn // heads, rows.dtype, rows.device), out=apart(R))
        else:
            torch.mul(y, apart(by), out=apart(R))
        return R

    def column(y: Tensor) -> Tensor:
        """[rows, 1, h or hn, K] -> as Tokens.k"""
        return y.reshape(-1, hn, K, 1) if y.shape[2] == hn else y.reshape(-1, h, 1, K, 1)

    k, erase = take(x.k), (x.a if p.before else x.e) if delta else x.a
    D = left = own = r = None
    if x.g is not None and p.gate is not Gate.NONE:
        g = take(x.g.expand(p.B, p.T, p.HV) if p.gate is Gate.HEAD else x.g).exp()
        D = g.reshape(-1, hn, *{Gate.KEY: (K, 1), Gate.VALUE: (1, p.V)}.get(p.gate, (1, 1)))
        left = g.reshape(-1, 1, hn, D.shape[3]) if delta and not p.before else None
    by_key = left is not None and p.gate is Gate.KEY
    if delta or erase is not None:
        r = reader(k if erase is None else take(erase), g if by_key else 1.0)
    if x.u is not None:
        bonus = (x.q.to(rows.dtype) * x.k.to(rows.dtype)).unsqueeze(3) * (x.u.to(rows.dtype) * p.scale).view(p.H, rows.n, K)
        own = take(bonus.sum(-1).flatten(2)).unsqueeze(3)
    return Tokens(
        q=reader(take(x.q), p.scale), r=r, k=column(k) if r is None or by_key or erase is not None else r.unsqueeze(3), v=take(x.v), D=D,
        left=None if by_key else left, own=own, beta=take(x.beta) if delta and x.beta is not None else None,
        w=None if delta or x.b is None else column(take(x.b)),
    )  # fmt: skip


@lru_cache(maxsize=16)
def _bags(states: int, K: int) -> tuple[Tensor, Tensor]:
    """Which lines of so many states each reading adds up, all of its own, and where they begin and end."""
    return torch.arange(states * K, dtype=torch.int32, device="cpu"), torch.arange(0, states * K + 1, K, dtype=torch.int32, device="cpu")


def _read(R: Tensor, S: Tensor, most: int) -> Tensor:
    """[rows, 1, hn, V], or [hn, V] of one row, what R [rows, hn, K] reads of S [rows, hn, K, V]; no block has more than `most` states.

    A reading is a weighted sum of a state's lines. Products of a row pack the states first and take twice as long.
    """
    rows, hn, K, V = S.shape
    if S.dtype is not torch.float32 or not S.is_cpu:
        return torch.matmul(R.unsqueeze(2), S).view(rows, 1, hn, V)
    lines, starts = _bags(most, K)
    if rows * hn != most:
        lines, starts = lines[: R.numel()], starts[: rows * hn + 1]
    o = torch.embedding_bag(S.view(-1, V), lines, starts, False, 0, False, R.view(-1), True)[0]
    return o if rows == 1 else o.view(rows, 1, hn, V)


def _write(S: Tensor, k: Tensor, v: Tensor, into: Tensor | None) -> Tensor:
    """S [rows, hn, K, V] + k v', k as Tokens.k, v [rows, 1, hn, V]; `into` that, or memory of its own."""
    if k.ndim == 4:
        return torch.addcmul(S, k, v.reshape(*S.shape[:2], 1, -1), out=into)
    shape = (*k.shape[:2], S.shape[1] // k.shape[1], *S.shape[2:])
    to = torch.addcmul(S.view(shape), k, v.reshape(*shape[:3], 1, -1), out=None if into is None else into.view(shape))
    return to.view(S.shape) if into is None else into


def _step(p: Problem, t: Tokens, S: Tensor, into: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
    """A token of every row: o [rows, 1, hn, V], and the state after it, which goes from S [rows, hn, K, V] to `into`, that may be S, or
    to memory of its own."""
    o = None if t.own is None else torch.addcmul(_read(t.q, S, most), t.own, t.v)
    met, write = None if t.r is None else _read(t.r, S, most), t.v
    if met is not None and p.rule is Rule.DELTA:
        write = write - met if t.left is None else torch.addcmul(write, t.left, met, value=-1)
        if t.beta is not None:
            write.permute(3, 0, 1, 2).mul_(t.beta)
    if t.D is not None:
        S = into = torch.mul(S, t.D, out=into)
    into = _write(S, t.k, write, into)
    if t.w is not None and met is not None:
        _write(into, t.w, met, into)
    o = _read(t.q, into, most) if o is None else o
    return o.view(-1, 1, *o.shape[-2:]), into


class States(NamedTuple):
    """States worked on together, all tokens of theirs before the next: a block that stays in the caches."""

    first: int  # row
    S: Tensor  # [rows, hn, K, V]
    into: Tensor  # the same, or where they go


def _whole(p: Problem, rows: Rows, S0: Tensor | None) -> tuple[Tensor, bool]:
    """The caller's states, or zeros, in the order of the rows, and whether they are ours."""
    if S0 is None:
        return torch.zeros(rows.count, rows.h * rows.n, p.K, p.V, dtype=rows.dtype, device=rows.device), True
    S = rows.enter(S0)
    return S, S.data_ptr() != S0.data_ptr()


def _given(p: Problem, rows: Rows, S0: Tensor | None, size: int, made: list[Tensor]) -> Iterator[States]:
    """States of the caller's, or zeros. Those after go to made[0], in the order of the rows."""
    S, ours = _whole(p, rows, S0)
    into = S if ours else room(*S.shape, dtype=S.dtype, device=S.device)
    made.append(into)
    for a in range(0, len(S), size):
        here = S[a : a + size]
        yield States(a, here, here if S is into else into[a : a + size])


def _pooled(p: Problem, rows: Rows, pool: Tensor, slots: Sequence[int], size: int) -> Iterator[States]:
    """States of a pool [slots, HV, K, V], changed in place. Neighbours go together; small states that are none are gathered."""
    slots = slots if rows.packed is None else [slots[n] for n in rows.packed.order]
    dense = pool.stride(0) == p.HV * pool.stride(1)
    a = 0
    while a < len(slots):
        b = a + 1
        while b < len(slots) and b - a < size and (slots[b] >= 0) == (slots[a] >= 0):
            b += 1
        here, near = slots[a:b], dense and all(y == x + 1 for x, y in zip(slots[a:b], slots[a + 1 : b]))
        if here[0] >= 0:
            to = None if near or b == a + 1 else torch.tensor(here, device="cpu")
            S = pool[here[0] : here[0] + b - a] if to is None else pool.index_select(0, to)
            work = (S if S.dtype is p.compute else S.to(p.compute)).contiguous()
            yield States(a, work, work)
            if to is not None:
                pool.index_copy_(0, to, work.to(pool.dtype))
            elif work is not S:
                S.copy_(work)
        a = b


def straight(p: Problem) -> bool:
    """Whether a call is one token of few states, so that what it does never depends on numbers, and costs little more than its Python."""
    return p.T == 1 and p.N > 0 and p.cu_seqlens is None and p.N * p.HV * p.K * p.V <= BLOCK


def forward(
    p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool, slots: Sequence[int] | None = None
) -> tuple[Tensor, Tensor | None, None]:
    """o [B, T, HV, V], the last state [N, HV, K, V] if `final`, and nothing to save.

    slots: S0 is a pool of states; sequence n has that in slots[n], which moves on in place, and none where that is negative: its o is 0.
    """
    cpu = x.q.device.type == "cpu"
    rows, made = Rows(p, x.q.device, slots is not None or not cpu), list[Tensor]()
    tokens, hn = _tokens(p, x, rows), rows.h * rows.n
    size = max(1, min(rows.count, BLOCK // (hn * p.K * p.V)) if cpu else rows.count)
    if slots is None and rows.alive == [p.N] and size == rows.count:  # one token, no loops
        S, ours = _whole(p, rows, S0)
        o, S = _step(p, tokens, S, S if ours else None, size * hn)
        return rows.put(o), rows.leave(S) if final else None, None
    starts = [0, *accumulate(m * (p.H // rows.h) for m in rows.alive)]
    skips = slots is not None and any(n < 0 for n in slots)
    o = (torch.zeros if skips else torch.empty)(starts[-1], 1, hn, p.V, dtype=rows.dtype, device=rows.device)
    for first, S, into in _given(p, rows, S0, size, made) if slots is None else _pooled(p, rows, given(S0), slots, size):
        for a, b in zip(starts, starts[1:]):
            m = min(b - a - first, len(S))  # rows that have such a token
            if m <= 0:
                break
            if m < len(S) and S is not into:
                S = into.copy_(S)
            a += first
            now, to = (S, into) if m == len(S) else (S[:m], into[:m])
            if m == starts[-1]:
                o, _ = _step(p, tokens, now, to, size * hn)
            else:
                t = Tokens._make(None if z is None else z[a : a + m] for z in tokens)
                o[a : a + m], _ = _step(p, t, now, to, size * hn)
            S = into
        if S is not into and final:
            into.copy_(S)
    return rows.put(o), rows.leave(made[0]) if final and made else None, None
