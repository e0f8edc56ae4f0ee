"""The stages in PyTorch: the CPU path, and each kernel's oracle. Any device, float32 and float64; half types are computed in float32.

Tensors are in the layout of `layout.py`: [S, H, n, C, D] with n = 1 where a head's value heads share a stream; states are
[N, H, n, K, V], sequences in the layout's order. Letters as in the design: G cumulated log decay, T the inverse, X the correction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..spec import Gate, Rule, Streams
from .decay import ChannelDecay, Decay, NoDecay, ScalarDecay
from .layout import Layout
from .problem import Problem, given

LEAF = 16  # the inverse is substituted row by row in blocks of so many rows, then merged


@dataclass
class Chunks:
    """The streams of a problem in chunks: readers q and e, writers k (of v) and w (of X)."""

    layout: Layout
    q: Tensor  # [S, H, 1, C, K], scaled
    k: Tensor  # [S, H, 1, C, K]
    v: Tensor  # [S, H, n, C, V]
    key: Decay  # on the key side of the state
    value: Decay  # on its value side
    delta: bool = False  # X = T beta (v - e'S), not T (M_rk v + e'S)
    beta: Tensor | None = None  # [S, H, n, C, 1]
    e: Tensor | None = None  # whose reading is erased (delta: a key; dplr: a), [S, H, 1 or n, C, K]
    w: Tensor | None = None  # writer of X, [S, H, 1 or n, C, K]
    u: Tensor | None = None  # [H, n, 1, K]
    qe: Tensor | None = None  # q and e, where they lie together: [S, H, 1, 2 C, K]

    @cached_property
    def r(self) -> Tensor | None:
        """The erase reader, [S, H, 1 or n, C, K]: what X adds up is its reading of the state."""
        if self.e is None or not self.delta:
            return self.e
        return -self.e if self.beta is None else -self.beta * self.e


@dataclass
class Scores:
    """Decayed reader x writer products of a chunk, each [S, H, n, C, C], zero above the diagonal; None where the rule has none."""

    qk: Tensor | None = None
    qw: Tensor | None = None
    rk: Tensor | None = None
    rw: Tensor | None = None


def decays(p: Problem, x: Streams, to: Layout) -> tuple[Decay, Decay]:
    """Stage `cumsum`: the gate as a decay of the state's key side and of its value side."""
    none = NoDecay()
    if x.g is None or p.gate is Gate.NONE:
        return none, none
    g = x.g.expand(p.B, p.T, p.HV) if p.gate is Gate.HEAD else x.g
    g = to.split(g, p.compute)
    if p.gate is Gate.VALUE:
        return none, ChannelDecay(g)
    return (ChannelDecay(g) if p.gate is Gate.KEY else ScalarDecay(g)), none


def enter(p: Problem, x: Streams, to: Layout, whole: ScalarDecay | None = None) -> Chunks:
    """Cut the streams into chunks. whole: the decay of all slots, of which `to` may be a part."""
    dtype, delta = p.compute, p.rule is Rule.DELTA
    key, value = decays(p, x, to) if whole is None else (whole[to.skipped : to.skipped + to.slots], NoDecay())
    erase = (x.a if p.before else x.e if x.e is not None else x.k) if delta else x.a if p.rule is Rule.DPLR else None
    q = e = qe = None
    if erase is not None and erase.shape[2] == p.H:  # together, so that one product makes both of the scores of a writer
        both = x.q.new_empty(to.slots, p.H, 1, 2, p.C, p.K, dtype=dtype)
        q, e, qe = both[..., 0, :, :], both[..., 1, :, :], both.flatten(3, 4)
    q = to.split(x.q, dtype, q)
    e = None if erase is None else to.split(erase, dtype, e)
    k = e if e is not None and erase is x.k else to.split(x.k, dtype)
    beta = to.split(x.beta, dtype)[..., None] if delta and x.beta is not None else None
    w = k if delta else to.split(given(x.b), dtype) if e is not None else None
    u = None if x.u is None else x.u.to(dtype).contiguous().view(p.H, p.HV // p.H, 1, p.K)
    return Chunks(to, q.mul_(p.scale), k, to.split(x.v, dtype), key, value, delta, beta, e, w, u, qe)


def scores(p: Problem, c: Chunks) -> Scores:
    """Stage `scores`: M_qk, M_qw, M_rk, M_rw."""
    M = Scores()
    if p.rule is not Rule.DELTA:
        M.qk = c.key.scores(c.q, c.k, strict=p.bonus, before=p.bonus)
        if c.u is not None:
            M.qk = M.qk + torch.diag_embed((c.q * c.u * c.k).sum(-1))
    if c.e is not None and c.w is not None:
        if c.qe is not None and isinstance(c.key, (NoDecay, ScalarDecay)):
            qw, ew = (c.qe @ c.w.mT).unflatten(3, (2, p.C)).unbind(3)
            M.qw, M.rw = c.key.decayed(qw), c.key.decayed(ew, strict=True, before=p.before)
        else:
            M.qw, M.rw = c.key.scores(c.q, c.w), c.key.scores(c.e, c.w, strict=True, before=p.before)
        if p.rule is Rule.DPLR:
            M.rk = c.key.scores(c.e, c.k, strict=True, before=True)
        else:
            M.rw = -M.rw if c.beta is None else M.rw * -c.beta
    return M


def inverse(L: Tensor) -> Tensor:
    """Stage `inverse`: T = (I - L)^-1 of strictly lower triangular L [..., C, C] (T of the WY form, without diag(beta)).

    Forward substitution inside LEAF x LEAF diagonal blocks, all blocks side by side, then merges T21 = T22 L21 T11 of doubling size: as
    stable as substitution (no powers of L are formed), and mostly matrix products. C: a power of two, or at most LEAF.
    """
    C, shape = L.shape[-1], L.shape
    leaf = min(LEAF, C)
    L = L.reshape(-1, C, C)
    size = L.shape[0] * (C // leaf)
    blocks = L.unflatten(-1, (-1, leaf)).unflatten(-3, (-1, leaf)).diagonal(0, -4, -2)  # [.., leaf, leaf, C / leaf]
    low = blocks.permute(1, 2, 0, 3).reshape(leaf, leaf, size)
    solved = torch.zeros_like(low)
    solved.diagonal(0, 0, 1).fill_(1)
    for j in range(leaf - 1):  # rows to j are solved: what they are worth to all rows below
        solved[j + 1 :, : j + 1].addcmul_(low[j + 1 :, j, None], solved[j, None, : j + 1])
    T = torch.zeros_like(L)
    places = T.unflatten(-1, (-1, leaf)).unflatten(-3, (-1, leaf)).diagonal(0, -4, -2)
    places.copy_(solved.view(leaf, leaf, -1, C // leaf).permute(2, 0, 1, 3))
    s = leaf
    while s < C:
        for i in range(0, C, 2 * s):
            low_left = L[:, i + s : i + 2 * s, i : i + s]
            T21 = torch.bmm(torch.bmm(T[:, i + s : i + 2 * s, i + s : i + 2 * s], low_left), T[:, i : i + s, i : i + s])
            T[:, i + s : i + 2 * s, i : i + s] = T21
        s *= 2
    return T.view(shape)


def base(p: Problem, c: Chunks, M: Scores) -> Tensor | None:
    """What X would be without the state, before the solve: beta v (delta) or M_rk v (dplr)."""
    if c.delta:
        return c.v if c.beta is None else c.beta * c.v
    return M.rk @ c.v if M.rk is not None else None


def wy(p: Problem, c: Chunks, M: Scores, T: Tensor) -> tuple[Tensor, Tensor]:
    """The WY form (u, w~): X = u + w~ S with u = T base, w~ = T (r e^G). For who looks: the pipeline reads the state first."""
    return T @ given(base(p, c, M)), T @ c.key.start(given(c.r), before=p.before)


@dataclass
class Pass:
    """What a state pass leaves behind."""

    last: Tensor  # [N, H, n, K, V]
    X: Tensor | None = None  # [slots, H, n, C, V]
    Q: Tensor | None = None  # [slots, H, n, C, V]
    met: Tensor | None = None  # [slots, H, n, K, V], the state each chunk met


@dataclass
class Solve:
    """What makes X of the reading r of the state: T (base + r), or for the delta rule T beta (base - r)."""

    T: Tensor  # [S, H, n, C, C]
    base: Tensor  # [S, H, n, C, V]
    delta: bool = False
    beta: Tensor | None = None  # [S, H, n, C, 1]

    def __call__(self, at: slice, r: Tensor, out: Tensor) -> None:
        """Of the matrices `at`."""
        X = self.base[at] - r if self.delta else self.base[at] + r
        torch.bmm(self.T[at], X if self.beta is None else X.mul_(self.beta[at]), out=out)


def state_pass(
    to: Layout, S: Tensor, key: Decay, value: Decay, *,
    read: Tensor | None = None, query: bool = False, solve: Solve | None = None, write: Tensor | None = None,
    xk: Tensor | None = None, xv: Tensor | None = None, reverse: bool = False, keep: bool = False, ours: bool = False,
) -> Pass:  # fmt: skip
    """Stage `state pass`: the only sequential one, forwards on states and, reversed, backwards on their gradients. Per chunk

        Q, R = readings of S;   X = solve R;   S <- D S E + write' X + xk' xv

    read: [S, H, n, C or 2 C, K], q's rows (if `query`) and then the erase reader's (if there is a `solve`); write, xk: [S, H, n, C, K]; all
    decayed as the direction wants. xv: [S, H, n, C, V]. `keep` keeps the state each slot met. S is changed where it is `ours`.
    """
    heads, (K, V), slots = S.shape[1:3], S.shape[3:], to.slots
    n = heads.numel()  # matrices a slot

    def rows(x: Tensor | None) -> Tensor | None:
        """One batch of matrices: [slots * H * n, ...]."""
        return None if x is None else x.expand(slots, *heads, *x.shape[3:]).reshape(slots * n, *x.shape[3:])

    read, write, xk, xv = map(rows, (read, write, xk, xv))
    if solve is not None:
        solve = Solve(given(rows(solve.T)), given(rows(solve.base)), solve.delta, rows(solve.beta))
    D, E = rows(key.total()), rows(value.total())
    last = (S if ours else S.clone()).view(-1, K, V)
    met = S.new_empty(slots * n, K, V) if keep else None
    X = S.new_empty(slots * n, to.C, V) if solve is not None else None
    seen = S.new_empty(slots * n, read.shape[1], V) if read is not None else None
    for now, m in reversed(to.steps) if reverse else to.steps:
        at, state = slice(now.start * n, now.stop * n), last[: m * n]
        if met is not None:
            met[at] = state
        if read is not None and seen is not None:
            torch.bmm(read[at], state, out=seen[at])
            if solve is not None and X is not None:
                solve(at, seen[at, -to.C :], X[at])
        if D is not None:
            state *= D[at, :, None]
        if E is not None:
            state *= E[at, None, :]
        if xk is not None and xv is not None:
            state.baddbmm_(xk[at].mT, xv[at])
        if X is not None and write is not None:
            state.baddbmm_(write[at].mT, X[at])
    tokens, states = (slots, *heads, to.C, V), (slots, *heads, K, V)
    return Pass(
        last.view(S.shape),
        None if X is None else X.view(tokens),
        seen.view(slots, *heads, -1, V)[..., : to.C, :] if query and seen is not None else None,
        None if met is None else met.view(states),
    )


def output(c: Chunks, M: Scores, out: Pass) -> Tensor:
    """Stage `output`: o = (q e^G) S + M_qk v + M_qw X; the pass's Q is the first term. [S, H, n, C, V]."""
    o = c.value.start(given(out.Q))
    if M.qk is not None:
        o = c.value.rows(M.qk, c.v).add_(o)
    if M.qw is not None:
        X = given(out.X)
        shared = M.qw.expand(*X.shape[:3], -1, -1)
        o = torch.baddbmm(o.flatten(0, 2), shared.flatten(0, 2), X.flatten(0, 2)).view(X.shape)
    return o
