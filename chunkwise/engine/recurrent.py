"""The recurrence token by token: decoding, and short inputs. Its gradient is the chunk form's: the same function, recomputed.

A token reads the state once, for o and for X together, and writes it once: o = q D S + (q.k) v + (q.w) X by what it is about to write.
One token of one sequence is a few small steps around two passes over the state, so every view counts: what needs no step has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import Gate, Rule, Streams
from .layout import Layout, layout
from .problem import Problem, given

BLOCK = 1 << 19  # entries of the states that a CPU works on together: what its second caches hold


class Rows:
    """Tokens in the order they are taken: first tokens of all sequences, second ones, and so on. Packed: longest sequences first.

    A row is a token's value head: [rows, D].
    """

    def __init__(self, p: Problem, device: torch.device):
        self.p, self.n, self.device = p, p.HV // p.H, device
        self.packed: Layout | None = None if p.cu_seqlens is None else layout(dataclasses.replace(p, C=1), device)
        self.alive = [p.B] * p.T if self.packed is None else self.packed.alive  # per step: sequences that have such a token

    def take(self, x: Tensor) -> Tensor:
        """[B, T, heads, ...] -> [rows, D], D = 1 where there is no axis left; heads repeated for their value heads."""
        p, heads, D = self.p, x.shape[2], x.shape[3] if x.ndim == 4 else 1
        if self.packed is not None:
            x = x[0].index_select(0, self.packed.rows)
        elif p.B != 1 and p.T != 1:
            x = x.transpose(0, 1)
        x = (x if x.dtype is p.compute else x.to(p.compute)).reshape(-1, D)
        return x if heads == p.HV else x.repeat_interleave(self.n, 0)

    def put(self, o: Tensor) -> Tensor:
        """[rows, V] -> [B, T, HV, V] in the problem's dtype."""
        p, o = self.p, o if o.dtype is self.p.dtype else o.to(self.p.dtype)
        if self.packed is not None:
            o = o.view(p.T, p.HV, p.V)
            return torch.empty_like(o).index_copy_(0, self.packed.rows, o)[None]
        if p.B == 1 or p.T == 1:
            return o.view(p.B, p.T, p.HV, p.V)
        return o.view(p.T, p.B, p.HV, p.V).transpose(0, 1).contiguous()

    def enter(self, S: Tensor) -> Tensor:
        """[N, HV, K, V] in the caller's order -> [N * HV, K, V] in that of the rows, in the compute dtype."""
        S = S if S.dtype is self.p.compute else S.to(self.p.compute)
        return (S if self.packed is None else self.packed.sort(S)).reshape(-1, self.p.K, self.p.V)

    def leave(self, S: Tensor) -> Tensor:
        """The inverse of `enter`."""
        S = S.view(self.p.N, self.p.HV, self.p.K, self.p.V)
        return S if self.packed is None else self.packed.unsort(S)


class Tokens(NamedTuple):
    """All a step needs, [rows, ...]; absent where the rule has none."""

    R: Tensor  # [rows, readers, K]: q, then who erases, as they meet the state before the step
    k: Tensor  # [rows, K, 1]
    v: Tensor
    own: Tensor  # [rows, 1], what q reads of k's write
    beta: Tensor | None  # [rows, 1]
    w: Tensor | None  # [rows, K, 1]
    own_w: Tensor | None
    D: Tensor | None  # [rows, K or 1, 1] or [rows, 1, V], what is left of the state
    value: Tensor | None  # [rows, V], the same of what was read, where it is a matter of value channels


def _tokens(p: Problem, x: Streams, rows: Rows) -> Tokens:
    q, k, delta = rows.take(x.q), rows.take(x.k), p.rule is Rule.DELTA
    key = value = None
    if x.g is not None and p.gate is not Gate.NONE:
        left = rows.take(x.g.expand(p.B, p.T, p.HV) if p.gate is Gate.HEAD else x.g).exp()
        key, value = (None, left) if p.gate is Gate.VALUE else (left, None)
    erase = (x.a if p.before else x.e) if delta else x.a
    if delta or erase is not None:
        r = k if erase is None else rows.take(erase)
        if key is None or p.before:
            R = torch.stack((q if p.bonus or key is None else q * key, r), 1)
        else:
            R = torch.stack((q, r), 1) * key[:, None]
    else:
        R = (q if p.bonus or key is None else q * key)[:, None]
    w = None if delta or x.b is None else rows.take(x.b)
    return Tokens(
        R, k[..., None], rows.take(x.v),
        own=torch.linalg.vecdot(q if x.u is None else (q.view(-1, p.HV, p.K) * x.u.to(q.dtype)).view(-1, p.K), k)[:, None],
        beta=rows.take(x.beta) if delta and x.beta is not None else None,
        w=None if w is None else w[..., None], own_w=None if w is None else torch.linalg.vecdot(q, w)[:, None],
        D=key[..., None] if key is not None else None if value is None else value[:, None], value=value,
    )  # fmt: skip


def _step(p: Problem, t: Tokens, S: Tensor, into: Tensor, o: Tensor, *, last: bool) -> None:
    """A token of every row: o [rows, V] is written, and the state after it goes from S [rows, K, V] to `into`, unless it is the last."""
    read, write = torch.bmm(t.R, S), t.v  # [rows, readers, V]
    out, met = read[:, 0], read[:, -1]
    if t.value is not None:
        out = out if p.bonus else out * t.value
        met = met if p.before else met * t.value
    if p.rule is Rule.DELTA:
        write = write - met if t.beta is None else (write - met).mul_(t.beta)
    torch.addcmul(out, t.own, write, out=o)
    if t.own_w is not None:
        o.addcmul_(t.own_w, met)
    if last:
        return
    S = S if t.D is None else torch.mul(S, t.D, out=into)
    torch.addcmul(S, t.k, write[:, None], out=into)
    if t.w is not None:
        into.addcmul_(t.w, met[:, None])


class States(NamedTuple):
    """States worked on together, all tokens of theirs before the next: a block that stays in the caches."""

    first: int  # row
    S: Tensor  # [rows, K, V]
    into: Tensor  # the same, or where they go


def _given(p: Problem, rows: Rows, S0: Tensor | None, size: int, made: list[Tensor]) -> Iterator[States]:
    """States of the caller's, or zeros. Those after go to made[0], in the order of the rows."""
    S = torch.zeros(p.N * p.HV, p.K, p.V, dtype=p.compute, device=rows.device) if S0 is None else rows.enter(S0)
    ours = S0 is None or S0.dtype is not p.compute or rows.packed is not None
    made.append(S if ours else torch.empty_like(S, memory_format=torch.contiguous_format))
    if size >= len(S):
        yield States(0, S, made[0])
        return
    for a in range(0, len(S), size):
        yield States(a, S[a : a + size], made[0][a : a + size])


def _pooled(p: Problem, rows: Rows, pool: Tensor, slots: Sequence[int], size: int) -> Iterator[States]:
    """States of a pool [slots, HV, K, V], changed in place. Neighbours go together; small states that are none are gathered."""
    slots, most = slots if rows.packed is None else [slots[n] for n in rows.packed.order], max(1, size // p.HV)
    dense = pool.stride(0) == p.HV * pool.stride(1)
    a = 0
    while a < len(slots):
        b = a + 1
        while b < len(slots) and b - a < most and (slots[b] >= 0) == (slots[a] >= 0):
            b += 1
        here, near = slots[a:b], dense and all(y == x + 1 for x, y in zip(slots[a:b], slots[a + 1 : b]))
        if here[0] >= 0:
            to = None if near or b == a + 1 else torch.tensor(here)
            S = pool[here[0] : here[0] + b - a] if to is None else pool.index_select(0, to)
            work = S.to(p.compute)
            flat = work.reshape(-1, p.K, p.V)
            yield States(a * p.HV, flat, flat)
            if to is not None:
                pool.index_copy_(0, to, work.to(pool.dtype))
            elif work is not S:
                S.copy_(work)
        a = b


def forward(
    p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool, slots: Sequence[int] | None = None
) -> tuple[Tensor, Tensor | None, None]:
    """o [B, T, HV, V], the last state [N, HV, K, V] if `final`, and nothing to save.

    slots: S0 is a pool of states; sequence n has that in slots[n], which moves on in place, and none where that is negative: its o is 0.
    """
    rows, made = Rows(p, x.q.device), list[Tensor]()
    all_tokens = _tokens(p, x, rows)
    starts = [0, *accumulate(m * p.HV for m in rows.alive)]
    size = BLOCK // (p.K * p.V) or 1 if rows.device.type == "cpu" else p.N * p.HV
    skips = slots is not None and any(n < 0 for n in slots)
    o = (torch.zeros if skips else torch.empty)(starts[-1], p.V, dtype=p.compute, device=rows.device)
    last = None if final or slots is not None else len(rows.alive) - 1
    for first, S, into in _given(p, rows, S0, size, made) if slots is None else _pooled(p, rows, given(S0), slots, size):
        for i, (a, b) in enumerate(zip(starts, starts[1:])):
            n = min(b - a - first, len(S))  # rows that have such a token
            if n <= 0:
                break
            if n < len(S) and S is not into:
                S = into.copy_(S)
            a += first
            now, to = (S, into) if n == len(S) else (S[:n], into[:n])
            if n == starts[-1]:
                _step(p, all_tokens, now, to, o, last=i == last)
            else:
                t = Tokens._make(None if z is None else z[a : a + n] for z in all_tokens)
                _step(p, t, now, to, o[a : a + n], last=i == last)
            S = into
        if S is not into and final:
            into.copy_(S)
    return rows.put(o.mul_(p.scale)), rows.leave(made[0]) if final and made else None, None
