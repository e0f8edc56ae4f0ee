"""The recurrence token by token: decoding, and short inputs. Its gradient is the chunk form's: the same function, recomputed.

A token reads the state once, for o and for X together, and writes it once: o = q D S + (q.k) v + (q.w) X by what it is about to write.
One token of one sequence is a few small steps around three passes over the state, so every view counts: what needs no step has none.
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

    A row is a token's head with its n value heads: [rows, 1 or n, D].
    """

    def __init__(self, p: Problem, device: torch.device):
        self.p, self.n, self.device = p, p.HV // p.H, device
        self.packed: Layout | None = None if p.cu_seqlens is None else layout(dataclasses.replace(p, C=1), device)
        self.alive = [p.B] * p.T if self.packed is None else self.packed.alive  # per step: sequences that have such a token

    def take(self, x: Tensor) -> Tensor:
        """[B, T, H or HV, ...] -> [rows, 1 or n, D], D = 1 where there is no axis left."""
        p, heads, D = self.p, x.shape[2], x.shape[3] if x.ndim == 4 else 1
        if self.packed is not None:
            x = x[0].index_select(0, self.packed.rows)
        elif p.B != 1 and p.T != 1:
            x = x.transpose(0, 1)
        return (x if x.dtype is p.compute else x.to(p.compute)).reshape(-1, heads // p.H, D)

    def put(self, o: Tensor) -> Tensor:
        """[rows, n, V] -> [B, T, HV, V] in the problem's dtype."""
        p, o = self.p, o if o.dtype is self.p.dtype else o.to(self.p.dtype)
        if self.packed is not None:
            o = o.view(p.T, p.HV, p.V)
            return torch.empty_like(o).index_copy_(0, self.packed.rows, o)[None]
        if p.B == 1 or p.T == 1:
            return o.view(p.B, p.T, p.HV, p.V)
        return o.view(p.T, p.B, p.HV, p.V).transpose(0, 1).contiguous()

    def enter(self, S: Tensor) -> Tensor:
        """[N, HV, K, V] in the caller's order -> dense [N * H, n, K, V] in that of the rows, in the compute dtype: bits do not
        depend on how states lie."""
        S = S if S.dtype is self.p.compute else S.to(self.p.compute)
        return (S if self.packed is None else self.packed.sort(S)).contiguous().view(-1, self.n, self.p.K, self.p.V)

    def leave(self, S: Tensor) -> Tensor:
        """The inverse of `enter`."""
        S = S.view(self.p.N, self.p.HV, self.p.K, self.p.V)
        return S if self.packed is None else self.packed.unsort(S)


class Tokens(NamedTuple):
    """All a step needs, [rows, 1 or n, ...]; absent where the rule has none."""

    R: Tensor  # [rows, n, readers, K]: q, then who erases, as they meet the state before the step
    k: Tensor  # [rows, 1, K, 1]
    v: Tensor  # [rows, n, V]
    own: Tensor  # [rows, 1 or n, 1], what q reads of k's write
    beta: Tensor | None  # [rows, n, 1]
    w: Tensor | None  # [rows, 1 or n, K, 1]
    own_w: Tensor | None  # [rows, 1 or n, 1]
    D: Tensor | None  # [rows, n, K or 1, 1] or [rows, n, 1, V], what is left of the state
    value: Tensor | None  # [rows, n, V], the same of what was read, where it is a matter of value channels


def _tokens(p: Problem, x: Streams, rows: Rows) -> Tokens:
    q, k, delta = rows.take(x.q), rows.take(x.k), p.rule is Rule.DELTA
    key = value = None
    if x.g is not None and p.gate is not Gate.NONE:
        left = rows.take(x.g.expand(p.B, p.T, p.HV) if p.gate is Gate.HEAD else x.g).exp()
        key, value = (None, left) if p.gate is Gate.VALUE else (left, None)
    erase = (x.a if p.before else x.e) if delta else x.a
    u = None if x.u is None else x.u.to(p.compute).reshape(p.H, rows.n, p.K)
    w = None if delta or x.b is None else rows.take(x.b)
    return Tokens(
        _readers(q, (k if erase is None else rows.take(erase)) if delta or erase is not None else None, key, p, rows.n),
        k[..., None], rows.take(x.v),
        own=torch.linalg.vecdot(q if u is None else (q.view(-1, p.H, 1, p.K) * u).view(-1, rows.n, p.K), k)[..., None],
        beta=rows.take(x.beta) if delta and x.beta is not None else None,
        w=None if w is None else w[..., None], own_w=None if w is None else torch.linalg.vecdot(q, w)[..., None],
        D=key[..., None] if key is not None else None if value is None else value[:, :, None], value=value,
    )  # fmt: skip


def _readers(q: Tensor, r: Tensor | None, key: Tensor | None, p: Problem, n: int) -> Tensor:
    """q and who erases, [rows, 1 or n, K], decayed unless they read before the token forgets -> dense [rows, n, readers, K]."""
    if r is None:
        R = (q if p.bonus or key is None else q * key)[:, :, None]
    elif key is not None and not p.bonus and not p.before:
        q, r = (q, r) if q.shape == r.shape else torch.broadcast_tensors(q, r)
        R = torch.stack((q, r), 2) * key[:, :, None]
    else:
        q = q if p.bonus or key is None else q * key
        r = r if p.before or key is None else r * key
        R = torch.stack((q, r) if q.shape == r.shape else torch.broadcast_tensors(q, r), 2)
    return R if R.shape[1] == n else R.expand(-1, n, -1, -1).contiguous()


@lru_cache(maxsize=16)
def _bags(rows: int, readers: int, K: int) -> tuple[Tensor, Tensor]:
    """Which lines of so many states each reader adds up, and where its lines begin."""
    lines = torch.arange(rows * K, dtype=torch.int32, device="cpu").view(rows, 1, K).expand(rows, readers, K)
    return lines.reshape(-1), torch.arange(0, rows * readers * K, K, dtype=torch.int32, device="cpu")


def _read(R: Tensor, S: Tensor, most: int) -> Tensor:
    """R S of R [rows, n, readers, K] and S [rows, n, K, V]; no block has more than `most` states.

    A reading is a weighted sum of a state's lines. Products of so few rows pack the states first and take twice as long.
    """
    rows, n, readers, K = R.shape
    if S.device.type != "cpu" or S.dtype is not torch.float32:
        return torch.matmul(R, S)
    lines, starts = _bags(most, readers, K)
    if rows * n != most:
        lines, starts = lines[: R.numel()], starts[: rows * n * readers]
    seen = torch.embedding_bag(S.view(-1, S.shape[3]), lines, starts, False, 0, False, R.view(-1), False)[0]
    return seen.view(rows, n, readers, -1)


def _step(p: Problem, t: Tokens, S: Tensor, into: Tensor | None, o: Tensor, spare: Tensor | None, most: int) -> None:
    """A token of every row: o [rows, n, V] is written, and the state after it goes from S [rows, n, K, V] to `into`, if there is one.

    spare: where there is room for what is written, if `into` is S.
    """
    read, write = _read(t.R, S, most), t.v  # [rows, n, readers, V]
    out, met = read.unbind(2) if read.shape[2] == 2 else (read[:, :, 0], read[:, :, 0])
    if t.value is not None:
        out = out if p.bonus else out * t.value
        met = met if p.before else met * t.value
    if p.rule is Rule.DELTA:
        write = write - met if t.beta is None else (write - met).mul_(t.beta)
    torch.addcmul(out, t.own, write, out=o)
    if t.own_w is not None:
        o.addcmul_(t.own_w, met)
    if into is None:
        return
    if t.D is None:
        torch.addcmul(S, t.k, write[:, :, None], out=into)
    else:
        written = torch.mul(t.k, write[:, :, None], out=into if spare is None else spare)
        torch.addcmul(written, S, t.D, out=into)
    if t.w is not None:
        into.addcmul_(t.w, met[:, :, None])


class States(NamedTuple):
    """States worked on together, all tokens of theirs before the next: a block that stays in the caches."""

    first: int  # row
    S: Tensor  # [rows, n, K, V]
    into: Tensor  # the same, or where they go


def _given(p: Problem, rows: Rows, S0: Tensor | None, size: int, made: list[Tensor]) -> Iterator[States]:
    """States of the caller's, or zeros. Those after go to made[0], in the order of the rows."""
    S = torch.zeros(p.N * p.H, rows.n, p.K, p.V, dtype=p.compute, device=rows.device) if S0 is None else rows.enter(S0)
    ours = S0 is None or S0.dtype is not p.compute or rows.packed is not None or not S0.is_contiguous()
    made.append(S if ours else room(*S.shape, dtype=S.dtype, device=S.device))
    if size >= len(S):
        yield States(0, S, made[0])
        return
    for a in range(0, len(S), size):
        here = S[a : a + size]
        yield States(a, here, here if ours else made[0][a : a + size])


def _pooled(p: Problem, rows: Rows, pool: Tensor, slots: Sequence[int], size: int) -> Iterator[States]:
    """States of a pool [slots, HV, K, V], changed in place. Neighbours go together; small states that are none are gathered."""
    slots, most = slots if rows.packed is None else [slots[n] for n in rows.packed.order], size // p.H
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
            work = (S if S.dtype is p.compute else S.to(p.compute)).contiguous()
            flat = work.view(-1, rows.n, p.K, p.V)
            yield States(a * p.H, flat, flat)
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
    tokens = _tokens(p, x, rows)
    starts = [0, *accumulate(m * p.H for m in rows.alive)]
    size = p.N * p.H if rows.device.type != "cpu" else min(p.N * p.H, max(1, BLOCK // (rows.n * p.K * p.V)))
    size = size if slots is None else max(1, size // p.H) * p.H  # whole slots
    skips = slots is not None and any(n < 0 for n in slots)
    o = (torch.zeros if skips else torch.empty)(starts[-1], rows.n, p.V, dtype=p.compute, device=rows.device)
    last = None if final or slots is not None else len(rows.alive) - 1
    spare: Tensor | None = None
    for first, S, into in _given(p, rows, S0, size, made) if slots is None else _pooled(p, rows, given(S0), slots, size):
        for i, (a, b) in enumerate(zip(starts, starts[1:])):
            m = min(b - a - first, len(S))  # rows that have such a token
            if m <= 0:
                break
            if m < len(S) and S is not into:
                S = into.copy_(S)
            if S is into and tokens.D is not None and (spare is None or len(spare) < m):
                spare = torch.empty(S.shape, dtype=S.dtype, device=S.device)
            a += first
            now, to = (S, into) if m == len(S) else (S[:m], into[:m])
            t = tokens if m == starts[-1] else Tokens._make(None if z is None else z[a : a + m] for z in tokens)
            extra = None if spare is None or S is not into else spare if m == len(spare) else spare[:m]
            _step(p, t, now, None if i == last else to, o if t is tokens else o[a : a + m], extra, size * rows.n)
            S = into
        if S is not into and final:
            into.copy_(S)
    return rows.put(o.mul_(p.scale)), rows.leave(made[0]) if final and made else None, None
