"""The stages in PyTorch: the CPU path, and each kernel's oracle. Any device, float32 and float64; half types are computed in float32.

Tensors are in the layout of `layout.py`: [S, H, n, C, D] with n = 1 where a head's value heads share a stream; states are
[N, H, n, K, V], sequences in the layout's order. Letters as in the design: G cumulated log decay, T the inverse, X the correction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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
    values: Tensor  # v as the caller gave it, [B, T, HV, V]
    key: Decay  # on the key side of the state
    value: Decay  # on its value side
    delta: bool = False  # X = T beta (v - e'S), not T (M_rk v + e'S)
    beta: Tensor | None = None  # [S, H, n, C, 1]
    e: Tensor | None = None  # whose reading is erased (delta: a key; dplr: a), [S, H, 1 or n, C, K]
    w: Tensor | None = None  # writer of X, [S, H, 1 or n, C, K]
    u: Tensor | None = None  # [H, n, 1, K]
    qe: Tensor | None = None  # q and e, where they lie together: [S, H, 1, 2 C, K]

    @cached_property
    def v(self) -> Tensor:
        """[S, H, n, C, V]; a state pass reads the caller's, step after step."""
        return self.layout.split(self.values, self.q.dtype)

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
    q = to.split(x.q, dtype, q, p.scale)
    e = None if erase is None else to.split(erase, dtype, e)
    k = e if e is not None and erase is x.k else to.split(x.k, dtype)
    beta = to.split(x.beta, dtype)[..., None] if delta and x.beta is not None else None
    w = k if delta else to.split(given(x.b), dtype) if e is not None else None
    u = None if x.u is None else x.u.to(dtype).contiguous().view(p.H, p.HV // p.H, 1, p.K)
    return Chunks(to, q, k, x.v, key, value, delta, beta, e, w, u, qe)


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


class Met(NamedTuple):
    """A stream and what it decays by until the state meets it: multiplied step after step, in room that stays in the caches."""

    x: Tensor  # [S, H, 1 or n, C, D]
    decay: Tensor | None  # [S, H, n, C, D or 1]

    def steps(self, sizes: list[int]) -> list[Met]:
        """Of steps of so many slots."""
        return list(map(Met, self.x.split(sizes), [None] * len(sizes) if self.decay is None else self.decay.split(sizes)))

    def into(self, room: Tensor) -> Tensor:
        """[m * H * n, C, D]: in room [m, H, n, C, D], or where it is so already."""
        if self.decay is not None:
            torch.mul(self.x, self.decay, out=room)
        elif self.x.shape == room.shape:
            return self.x.flatten(0, 2)
        else:
            room.copy_(self.x)
        return room.flatten(0, 2)


@dataclass
class Solve:
    """What makes X of the values v and of the reading of the state by r: T (mix v + r S), or for the delta rule T (v - r S)."""

    r: Met
    T: Tensor  # [S, H, n, C, C]
    mix: Tensor | None  # [S, H, 1 or n, C, C]; None: v itself
    sign: int = 1


@dataclass
class Pass:
    """What a state pass leaves behind."""

    last: Tensor  # [N, H, n, K, V]
    X: Tensor | None = None  # [slots, H, n, C, V]
    met: Tensor | None = None  # [slots, H, n, K, V], the state each chunk met


Move = Callable[[int, Tensor], None]  # rows of step i, into or out of [m, H, n, C, V]
Look = Callable[[int, Tensor, Tensor, Tensor | None, Tensor, Tensor], None]  # step i, its S, v and X in matrices; room for q, for o


def _steps(x: Tensor | None, sizes: list[int], heads: torch.Size) -> list[Any]:
    """[S, H, 1 or n, ...] as one batch of matrices for each step, [m * H * n, ...]."""
    if x is None:
        return [None] * len(sizes)
    flat = x.expand(x.shape[0], *heads, *x.shape[3:]).reshape(-1, *x.shape[3:])
    return list(flat.split([m * heads.numel() for m in sizes]))


def state_pass(
    to: Layout, S: Tensor, key: Decay, value: Decay, v: Move, *,
    look: Look | None = None, solve: Solve | None = None, k: Met | None = None, w: Met | None = None, beyond: Tensor | None = None,
    reverse: bool = False, keep: bool = False, ours: bool = False,
) -> Pass:  # fmt: skip
    """Stage `state pass`: the only sequential one, forwards on states and, reversed, backwards on their gradients. Per chunk

        X = solve (v, S);   look at (S, v, X);   S <- D S E + k' (v beyond) + w' X

    beyond: what v decays by until the state meets it, [S, H, n, C, V]. `keep` keeps X and the state that each slot met. S is changed
    where it is `ours`.
    """
    heads, (K, V), C = S.shape[1:3], S.shape[3:], to.C
    sizes, n = to.alive, heads.numel()  # slots of a step, matrices of a slot
    most, count = max(sizes, default=0), len(sizes)

    def met(x: Met | None) -> list[Any]:
        return [None] * count if x is None else x.steps(sizes)

    last = (S if ours else S.clone()).view(-1, K, V)
    kept = S.new_empty(to.slots, *heads, K, V) if keep else None
    X = S.new_empty(to.slots if keep else most, *heads, C, V) if solve is not None else None
    r, T, mix, sign = (None, None, None, 1) if solve is None else (solve.r, solve.T, solve.mix, solve.sign)
    streams = (
        met(k), met(w), met(r), *(_steps(x, sizes, heads) for x in (T, mix, X if keep else None, kept, key.total(), value.total())),
        [None] * count if beyond is None else beyond.split(sizes),
    )  # fmt: skip
    steps, width = list(enumerate(zip(sizes, *streams))), -1
    keys, values, spare = S.new_empty(most, *heads, C, K), S.new_empty(most, *heads, C, V), S.new_empty(most * n, C, V)
    for i, (m, k_i, w_i, r_i, T_i, mix_i, X_i, kept_i, D, E, beyond_i) in reversed(steps) if reverse else steps:
        if m != width:
            width, room, v_i, state, b = m, keys[:m], values[:m], last[: m * n], spare[: m * n]
            b_v, b_X = v_i.view(-1, C, V), None if X is None else X[:m].view(-1, C, V)
        if kept_i is not None:
            kept_i.copy_(state)
        v(i, v_i)
        if T_i is not None:
            base = b_v if mix_i is None else torch.bmm(mix_i, b_v, out=b)
            base.baddbmm_(r_i.into(room), state, alpha=sign)
            b_X = torch.bmm(T_i, base, out=b_X if X_i is None else X_i)
        if look is not None:
            look(i, state, b_v, b_X, room, b)
        if D is not None:
            state *= D[:, :, None]
        if E is not None:
            state *= E[:, None, :]
        if k_i is not None:
            if beyond_i is not None:
                v_i *= beyond_i
            state.baddbmm_(k_i.into(room).mT, b_v)
        if w_i is not None and b_X is not None:
            state.baddbmm_(w_i.into(room).mT, b_X)
    return Pass(last.view(S.shape), X if keep else None, kept)


def output(c: Chunks, M: Scores, q: Met, write: Move, heads: torch.Size) -> Look:
    """Stage `output`, step by step: o = (q e^G) S + M_qk v + M_qw X, which goes to `write`. heads: H, n."""
    sizes, starts = c.layout.alive, c.value.starts()
    inside = None if M.qk is None or starts is None else c.value.rows(M.qk, c.v)
    streams = (_steps(x, sizes, heads) for x in (starts, inside, M.qk if inside is None else None, M.qw))
    steps = list(zip(q.steps(sizes), *streams))

    def look(i: int, S: Tensor, v: Tensor, X: Tensor | None, room: Tensor, out: Tensor) -> None:
        q_i, E, P, qk, qw = steps[i]
        o = torch.bmm(q_i.into(room), S, out=out)
        if P is not None:
            o.mul_(E).add_(P)
        if qk is not None:
            o.baddbmm_(qk, v)
        if qw is not None and X is not None:
            o.baddbmm_(qw, X)
        write(i, o.view(-1, *heads, *o.shape[1:]))

    return look
