"""The stages in PyTorch: the CPU path, and each kernel's oracle. Any device, float32 and float64; half types are computed in float32.

Tensors are in the layout of `layout.py`: [S, H, n, C, D] with n = 1 where a head's value heads share a stream; states are
[N, H, n, K, V], sequences in the layout's order. Letters as in the design: G cumulated log decay, T the inverse, X the correction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..spec import Gate, Rule, Streams
from .decay import ChannelDecay, Decay, NoDecay, ScalarDecay
from .layout import Layout
from .problem import Problem, given

LEAF = 16  # the inverse is substituted row by row in blocks of so many rows, then merged


@dataclass
class Chunks:
    """The streams of a problem in chunks: readers q and r, writers k (of v) and w (of X)."""

    layout: Layout
    q: Tensor  # [S, H, 1, C, K], scaled
    k: Tensor  # [S, H, 1, C, K]
    v: Tensor  # [S, H, n, C, V]
    key: Decay  # on the key side of the state
    value: Decay  # on its value side
    beta: Tensor | None = None  # [S, H, n, C, 1]
    e: Tensor | None = None  # delta: the erase key, [S, H, 1 or n, C, K]
    r: Tensor | None = None  # erase reader, [S, H, n, C, K]
    w: Tensor | None = None  # writer of X, [S, H, 1 or n, C, K]
    u: Tensor | None = None  # [H, n, 1, K]


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


def enter(p: Problem, x: Streams, to: Layout) -> Chunks:
    """Cut the streams into chunks."""
    dtype = p.compute
    key, value = decays(p, x, to)
    c = Chunks(to, to.split(x.q, dtype).mul_(p.scale), to.split(x.k, dtype), to.split(x.v, dtype), key, value)
    if p.rule is Rule.DELTA:
        erase = x.a if p.before else x.e
        c.e = c.k if erase is None else to.split(erase, dtype)
        c.beta = None if x.beta is None else to.split(x.beta, dtype)[..., None]
        c.r = -c.e if c.beta is None else -c.beta * c.e
        c.w = c.k
    elif p.rule is Rule.DPLR:
        c.r, c.w = to.split(given(x.a), dtype), to.split(given(x.b), dtype)
    if x.u is not None:
        c.u = x.u.to(dtype).contiguous().view(p.H, p.HV // p.H, 1, p.K)
    return c


def scores(p: Problem, c: Chunks) -> Scores:
    """Stage `scores`: M_qk, M_qw, M_rk, M_rw."""
    M = Scores()
    if p.rule is not Rule.DELTA:
        M.qk = c.key.scores(c.q, c.k, strict=p.bonus, before=p.bonus)
        if c.u is not None:
            M.qk = M.qk + torch.diag_embed((c.q * c.u * c.k).sum(-1))
    if c.r is not None and c.w is not None:
        M.qw = c.key.scores(c.q, c.w)
        M.rw = c.key.scores(c.r, c.w, strict=True, before=p.before)
        if p.rule is Rule.DPLR:
            M.rk = c.key.scores(c.r, c.k, strict=True, before=True)
    return M


def inverse(L: Tensor) -> Tensor:
    """Stage `inverse`: T = (I - L)^-1 of strictly lower triangular L [..., C, C] (T of the WY form, without diag(beta)).

    Forward substitution inside LEAF x LEAF diagonal blocks, then merges T21 = T22 L21 T11 of doubling size: as stable as
    substitution (no powers of L are formed), and mostly matrix products. C: a power of two, or at most LEAF.
    """
    C = L.shape[-1]
    T = torch.zeros_like(L)
    T.diagonal(0, -2, -1).fill_(1)
    leaf = min(LEAF, C)
    block = (
        L.unflatten(-1, (-1, leaf)).unflatten(-3, (-1, leaf)).diagonal(0, -4, -2).movedim(-1, -3).contiguous()
    )  # [..., C / leaf, leaf, leaf]
    solved = torch.zeros_like(block)
    solved.diagonal(0, -2, -1).fill_(1)
    for i in range(1, leaf):
        solved[..., i, :i] = (block[..., i, :i, None] * solved[..., :i, :i]).sum(-2)
    T.unflatten(-1, (-1, leaf)).unflatten(-3, (-1, leaf)).diagonal(0, -4, -2).copy_(solved.movedim(-3, -1))
    s = leaf
    while s < C:
        grid, low = (z.unflatten(-1, (-1, 2, s)).unflatten(-4, (-1, 2, s)) for z in (T, L))
        T11, T22 = (grid[..., i, :, :, i, :].diagonal(0, -4, -2).movedim(-1, -3) for i in (0, 1))  # [..., C / 2s, s, s]
        L21 = low[..., 1, :, :, 0, :].diagonal(0, -4, -2).movedim(-1, -3)
        grid[..., 1, :, :, 0, :].diagonal(0, -4, -2).copy_((T22 @ L21 @ T11).movedim(-3, -1))
        s *= 2
    return T


def base(p: Problem, c: Chunks, M: Scores) -> Tensor | None:
    """What X would be without the state, before the solve: beta v (delta) or M_rk v (dplr)."""
    if p.rule is Rule.DELTA:
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


def state_pass(
    to: Layout, S: Tensor, key: Decay, value: Decay, *,
    read: Tensor | None = None, T: Tensor | None = None, base: Tensor | None = None, write: Tensor | None = None,
    xk: Tensor | None = None, xv: Tensor | None = None, query: Tensor | None = None,
    reverse: bool = False, keep: bool = False, read_out: bool = True,
) -> Pass:  # fmt: skip
    """Stage `state pass`: the only sequential one, forwards on states and, reversed, backwards on their gradients. Per chunk

        X = T (base + read S);   Q = query S;   S <- D S E + write' X + xk' xv

    read, write, xk, query: [S, H, n, C, K], decayed as the direction wants; T: [S, H, n, C, C]; base, xv: [S, H, n, C, V].
    `keep` keeps the state each slot met; `read_out` = False leaves Q out.
    """
    heads, (K, V), slots = S.shape[1:3], S.shape[3:], to.slots
    n = heads.numel()  # matrices a slot

    def rows(x: Tensor | None) -> Tensor | None:
        """One batch of matrices: [slots * H * n, ...]."""
        return None if x is None else x.expand(slots, *heads, *x.shape[3:]).reshape(slots * n, *x.shape[3:])

    read, T, base, write, xk, xv, query = map(rows, (read, T, base, write, xk, xv, query))
    D, E = rows(key.total()), rows(value.total())
    last = S.clone().view(-1, K, V)
    met = S.new_empty(slots * n, K, V) if keep else None
    X = S.new_empty(slots * n, to.C, V) if read is not None else None
    Q = S.new_empty(slots * n, to.C, V) if query is not None and read_out else None
    for now, m in reversed(to.steps) if reverse else to.steps:
        at, state = slice(now.start * n, now.stop * n), last[: m * n]
        if met is not None:
            met[at] = state
        if Q is not None and query is not None:
            torch.bmm(query[at], state, out=Q[at])
        if X is not None and read is not None and base is not None and T is not None:
            torch.bmm(T[at], torch.baddbmm(base[at], read[at], state), out=X[at])
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
        None if Q is None else Q.view(tokens),
        None if met is None else met.view(states),
    )


def output(c: Chunks, M: Scores, out: Pass) -> Tensor:
    """Stage `output`: o = (q e^G) S + M_qk v + M_qw X; the pass's Q is the first term. [S, H, n, C, V]."""
    o = c.value.start(given(out.Q))
    if M.qk is not None:
        o = o + c.value.rows(M.qk, c.v)
    if M.qw is not None:
        o = o + M.qw @ given(out.X)
    return o
