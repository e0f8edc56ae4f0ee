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
    """Tokens in the order they are taken: first tokens of all sequences, second ones, and so on. Packed: longest sequences first."""

    def __init__(self, p: Problem, device: torch.device):
        self.p, self.n = p, p.HV // p.H
        self.packed: Layout | None = None if p.cu_seqlens is None else layout(dataclasses.replace(p, C=1), device)
        self.alive = [p.B] * p.T if self.packed is None else self.packed.alive  # per step: sequences that have such a token
        self.count = p.B * p.T

    def take(self, x: Tensor) -> Tensor:
        """[B, T, heads, D], or [B, T, heads] with D = 1 -> [rows, H, n, D] in the compute dtype; a view where rows lie so."""
        p, heads, D = self.p, x.shape[2], x.shape[3] if x.ndim == 4 else 1
        if self.packed is not None:
            x = x[0].index_select(0, self.packed.rows)
        elif p.B != 1 and p.T != 1:
            x = x.transpose(0, 1)
        x = x if x.dtype is p.compute else x.to(p.compute)
        return x.reshape(self.count, p.H, heads // p.H, D)

    def put(self, o: Tensor) -> Tensor:
        """[rows, H, n, D] -> [B, T, HV, D] in the problem's dtype."""
        p, o = self.p, o.to(self.p.dtype)
        if self.packed is not None:
            return torch.empty_like(o).index_copy_(0, self.packed.rows, o).view(1, p.T, p.HV, -1)
        if p.B == 1 or p.T == 1:
            return o.view(p.B, p.T, p.HV, p.V)
        return o.view(p.T, p.B, p.HV, p.V).transpose(0, 1).contiguous()

    def cut(self, z: Tensor | None) -> Sequence[Tensor | None] | repeat[None]:
        """Step by step: views of [rows, ...]."""
        return repeat(None) if z is None else (z,) if len(self.alive) == 1 else z.split(self.alive)

    def sort(self, S: Tensor) -> Tensor:
        """States [N, ...] from the caller's order to that of the rows."""
        return S if self.packed is None else self.packed.sort(S)

    def unsort(self, S: Tensor) -> Tensor:
        """The inverse of `sort`."""
        return S if self.packed is None else self.packed.unsort(S)


class Tokens(NamedTuple):
    """All a step needs, [rows, H, n, ...]; absent where the rule has none."""

    R: Tensor  # [.., readers, K]: q, then who erases, as they meet the state before the step
    k: Tensor  # [.., K, 1]
    v: Tensor
    own: Tensor  # [.., 1], what q reads of k's write
    beta: Tensor | None  # [.., 1]
    w: Tensor | None  # [.., K, 1]
    own_w: Tensor | None
    D: Tensor | None  # [.., K or 1, 1] or [.., 1, V], what is left of the state
    value: Tensor | None  # [.., V], the same of what was read, where it is a matter of value channels


def _tokens(p: Problem, x: Streams, rows: Rows) -> Tokens:
    q, k, v, n, delta = rows.take(x.q) * p.scale, rows.take(x.k), rows.take(x.v), p.HV // p.H, p.rule is Rule.DELTA
    key = value = None
    if x.g is not None and p.gate is not Gate.NONE:
        left = rows.take(x.g.expand(p.B, p.T, p.HV) if p.gate is Gate.HEAD else x.g).exp()
        key, value = (None, left) if p.gate is Gate.VALUE else (left, None)
    readers = [q if p.bonus or key is None else q * key]
    erase = (x.a if p.before else x.e) if delta else x.a
    if delta or erase is not None:
        r = k if erase is None else rows.take(erase)
        readers.append(r if p.before or key is None else r * key)
    if any(r.shape[2] != n for r in readers):
        readers = [r.expand(-1, -1, n, -1) for r in readers]
    w = None if delta or x.b is None else rows.take(x.b)
    return Tokens(
        torch.stack(readers, -2), k[..., None], v,
        own=torch.linalg.vecdot(q if x.u is None else q * x.u.to(q.dtype).view(p.H, n, p.K), k)[..., None],
        beta=rows.take(x.beta) if delta and x.beta is not None else None,
        w=None if w is None else w[..., None], own_w=None if w is None else torch.linalg.vecdot(q, w)[..., None],
        D=key[..., None] if key is not None else None if value is None else value[..., None, :], value=value,
    )  # fmt: skip


def forward(p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool) -> tuple[Tensor, Tensor | None, None]:
    """o [B, T, HV, V], the last state [N, HV, K, V] if `final`, and nothing to save."""
    rows, n = Rows(p, x.q.device), p.HV // p.H
    S = x.q.new_zeros(p.N, p.HV, p.K, p.V, dtype=p.compute) if S0 is None else rows.sort(S0 if S0.dtype is p.compute else S0.to(p.compute))
    S, mine, o = S.unflatten(1, (p.H, n)), S0 is None, []  # not mine: S is the caller's
    for t in map(Tokens._make, zip(*map(rows.cut, _tokens(p, x, rows)))):
        m, write = t.v.shape[0], t.v
        read = torch.bmm(t.R.flatten(0, 2), S[:m].flatten(0, 2)).view(m, p.H, n, -1, p.V).unbind(-2)
        out, met = read[0], read[-1]
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
        if mine or t.D is None or m < p.N:
            S = S if mine else S.clone()
            if t.D is not None:
                S[:m].mul_(t.D)
        else:
            S = S * t.D  # the copy and the first forgetting in one pass
        mine = True
        S[:m].addcmul_(t.k, write[..., None, :])
        if t.w is not None:
            S[:m].addcmul_(t.w, met[..., None, :])
    out = rows.put(torch.cat(o) if len(o) != 1 else o[0]) if o else x.v.new_empty(p.B, p.T, p.HV, p.V)
    return out, rows.unsort(S if mine else S.clone()).flatten(1, 2) if final else None, None
