"""The recurrence token by token: decoding, and short inputs. Its gradient is the chunk form's: the same function, recomputed.

A token reads the state once, for o and for X together, and writes it once: o = q D S + (q.k) v + (q.w) X by what it is about to write.
One token of one sequence is a few small steps around two passes over the state, so every view counts: what needs no step has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import Gate, Rule, Streams
from .layout import Layout, layout
from .problem import Problem


class Rows:
    """Tokens in the order they are taken: first tokens of all sequences, second ones, and so on. Packed: longest sequences first.

    A row is a token's value head: [rows, D].
    """

    def __init__(self, p: Problem, device: torch.device):
        self.p, self.n = p, p.HV // p.H
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

    def cut(self, z: Tensor | None) -> Sequence[Tensor | None] | repeat[None]:
        """Step by step: views of [rows, ...]."""
        return repeat(None) if z is None else (z,) if len(self.alive) == 1 else z.split([m * self.p.HV for m in self.alive])

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


def forward(p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool) -> tuple[Tensor, Tensor | None, None]:
    """o [B, T, HV, V], the last state [N, HV, K, V] if `final`, and nothing to save."""
    rows = Rows(p, x.q.device)
    S = x.q.new_zeros(p.N * p.HV, p.K, p.V, dtype=p.compute) if S0 is None else rows.enter(S0)
    mine, count, o = S0 is None, p.N * p.HV, []  # not mine: S is the caller's
    for t in map(Tokens._make, zip(*map(rows.cut, _tokens(p, x, rows)))):
        m, write = t.v.shape[0], t.v
        now = S if m == count else S[:m]
        read = torch.bmm(t.R, now)  # [m, readers, V]
        out, met = read[:, 0], read[:, -1]
        if t.value is not None:
            out = out if p.bonus else out * t.value
            met = met if p.before else met * t.value
        if p.rule is Rule.DELTA:
            write = write - met if t.beta is None else (write - met) * t.beta
        o.append(torch.addcmul(out, t.own, write))
        if t.own_w is not None:
            o[-1].addcmul_(t.own_w, met)
        if not final and len(o) == len(rows.alive):
            break
        if t.D is not None and m == count and not mine:
            S = now = S * t.D  # the copy and the first forgetting in one pass
        else:
            S = S if mine else S.clone()
            now = S if m == count else S[:m]
            if t.D is not None:
                now.mul_(t.D)
        mine = True
        now.addcmul_(t.k, write[:, None])
        if t.w is not None:
            now.addcmul_(t.w, met[:, None])
    done = rows.put((o[0] if len(o) == 1 else torch.cat(o)).mul_(p.scale)) if o else x.v.new_empty(p.B, p.T, p.HV, p.V)
    return done, rows.leave(S if mine else S.clone()) if final else None, None
