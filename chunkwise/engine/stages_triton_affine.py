"""Stages `affine` and `grads` on a GPU for the dplr rule, and for additive ones whose q reads before the write."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.affine import affine_kernel
from ..kernels.grad_pair import grad_pair_kernel
from ..kernels.grad_reader import grad_reader_kernel, grad_writer_kernel
from ..kernels.grad_reader_far import grad_reader_far_kernel
from ..spec import Gate, Rule, Streams
from .launch import descriptor, launch
from .problem import Problem, given
from .stages_triton import Decayed, Index, alike, can_describe, chunks, dense, described, exact, solves, switches
from .stages_triton_score import limit, reach, sets
from .tune import config, padded


class Apart(NamedTuple):
    """What the gradients need of the affine stage besides the scan's operands; each [B, T, HV, C]."""

    T: Tensor  # (I - M_rw)^-1
    A: Tensor  # T M_rk
    Mqw: Tensor


def _on(p: Problem, x: Streams) -> dict[str, object]:
    """constexpr arguments of all kernels here."""
    on = {n: s for n, s in switches(p).items() if n not in ("GATE", "SPLIT")}
    shared = dict(GROUP=p.HV // p.H, GROUP_A=1 if x.a is None else p.HV // x.a.shape[2])
    return on | shared | dict(GATED=p.gate is Gate.KEY, LOW_RANK=p.rule is Rule.DPLR, BONUS=p.bonus, IPG=exact(3))


def _keys(x: Streams) -> tuple[tuple[Tensor, ...], int, int]:
    """q, k, a, b and how far apart the rows of the first two and of the last two are."""
    (q, k), sk = alike(x.q, x.k)
    if x.a is None:
        return (q, k, q, k), sk, sk
    (a, b), sa = alike(x.a, given(x.b))
    return (q, k, a, b), sk, sa


def affine(p: Problem, x: Streams, at: Index, *, keep: bool = False) -> tuple[Decayed, Apart | None]:
    """Stage `affine`: what every chunk makes of the state it meets, and with `keep` what only the gradients need."""
    (q, k, a, b), sk, sa = _keys(x)
    low_rank = p.rule is Rule.DPLR

    def empty(*shape: int) -> Tensor:
        return torch.empty(p.B, p.T, p.HV, *shape, dtype=p.dtype, device=q.device)

    M, qm, km = empty(p.C), empty(p.K), empty(p.K)
    wm, bm = (empty(p.K), empty(p.K)) if low_rank else (q, q)
    decay = torch.empty(at.slots, p.HV, p.K, dtype=torch.float32, device=q.device)
    apart = Apart(empty(p.C), empty(p.C), empty(p.C)) if keep and low_rank else None
    bound, gated = reach(p) or 0.0, p.gate is Gate.KEY
    near = torch.empty(at.slots, p.HV, dtype=torch.uint8, device=q.device) if gated and bound else q
    c = config("affine", p)
    for far in (False,) if not gated else (False, True) if bound else (True,):
        launch(
            affine_kernel, at.slots * p.HV,
            q, k, a, b, dense(x.g, q), dense(x.u, q), chunks(at, q), sets(p, q.device), near, M, qm, wm, km, bm, decay,
            *(apart or (q, q, q)), sk, sa, p.T, p.HV, p.scale,
            BK=c.BK, KEEP=apart is not None, FAR=far, LIMIT=bound, IPT=solves(p), **_on(p, x), config=c,
        )  # fmt: skip
    return Decayed(M, qm, wm if low_rank else None, km, decay, None, bm if low_rank else None), apart


def grads(
    p: Problem, x: Streams, at: Index, do: Tensor, *, S: Tensor, dS: Tensor, X: Tensor | None, U: Tensor, decayed: Decayed,
    apart: Apart | None,
) -> Streams:  # fmt: skip
    """Stage `grads`: gradients per value head; those of q, k, a, b in fp32 where value heads share them, u's per chunk.

    X, U: what the scans left: w~ S and b dS, overwritten; additive: none and dv.
    """
    (q, k, a, b), sk, sa = _keys(x)
    (v, do), sv = alike(x.v, do)
    low_rank, gated = p.rule is Rule.DPLR, p.gate is Gate.KEY

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(p.B, p.T, p.HV, *shape, dtype=dtype, device=q.device)

    def keys(like: Tensor) -> Tensor:
        return empty(p.dtype if like.shape[2] == p.HV else torch.float32, p.K)

    dM = [empty(p.dtype, p.C) if low_rank or n == 0 else q for n in range(4)]
    dv = empty(p.dtype, p.V) if low_rank else U
    met = torch.empty(2, p.B, p.T, p.HV, dtype=torch.float32, device=q.device)
    grid, on = at.slots * p.HV, _on(p, x)
    x_, u_ = (given(X), U) if low_rank else (v, v)
    c = config("grad_pair", p)
    few = {n: on[n] for n in ("K", "C", "LOW_RANK", "PACKED", "IP")}
    t, A, Mqw = apart or (q, q, q)
    launch(
        grad_pair_kernel, grid, do, v, x_, u_, chunks(at, q), decayed.M, decayed.kr, A, Mqw, t, dS, *dM, met, dv,
        sv, p.B * p.T, p.T, p.HV, p.scale,
        V=p.V, BK=c.BK, BV=c.BV, **few, config=c,
    )  # fmt: skip
    dq, dk = keys(q), keys(k)
    da, db = (keys(a), keys(b)) if low_rank else (q, q)
    dg = empty(x.g.dtype, p.K) if gated and x.g is not None else q
    du = torch.zeros(at.slots, p.HV, p.K, dtype=torch.float32, device=q.device) if p.bonus else q
    near = torch.empty(at.slots, p.HV, dtype=torch.uint8, device=q.device) if gated else q
    streams, shared = (q, k, a, b, dense(x.g, q), dense(x.u, q)), (chunks(at, q), sets(p, q.device), near)
    places = (sk, sa, sv, p.B * p.T, p.T, p.HV)
    part = dg if dg.dtype == torch.float32 or not gated else empty(torch.float32, p.K)
    c = config("grad_reader", p)
    values, wide = [do, u_, v, x_], max(c.BV, padded(p.V)) if p.dtype != torch.float32 and p.V <= 128 else c.BV
    states, pairs, tma = [S, dS], dM, wide >= p.V and c.tma and can_describe(p, (v, sv), (do, sv))
    if tma:
        values = [described(z, d, p.C, wide) for z, d in zip(values, (sv, p.HV * p.V if low_rank else sv) * 2)]
        states = [descriptor(z, z.shape, z.stride(), [1, 1, wide, c.BK]) for z in states]
        pairs = [described(z, p.HV * p.C, p.C, p.C) if z is not q else values[0] for z in dM]
    both = dict(V=p.V, BK=c.BK, BV=wide, TMA=tma, **on)
    launch(
        grad_reader_kernel, grid, *streams, values[0], values[1], *shared, *pairs, met, states[0], dq, da, part, du, *places, p.scale,
        LIMIT=limit(p), **both, config=c,
    )  # fmt: skip
    launch(
        grad_writer_kernel, grid, *streams, values[2], values[3], *shared, *pairs, met, *states, dk, db, part, dg, *places, **both, config=c
    )  # fmt: skip
    if gated:
        c = config("grad_reader_far", p)
        on = {n: s for n, s in on.items() if n != "GATED"}
        launch(
            grad_reader_far_kernel, grid, *streams, do, v, x_, u_, *shared, *dM, met, S, dS, dq, dk, da, db, dg, du, *places, p.scale,
            V=p.V, BK=c.BK, BV=c.BV, **on, config=c,
        )  # fmt: skip
    return Streams(
        dq, dk, dv, g=dg if gated else None, a=da if low_rank else None, b=db if low_rank else None, u=du if p.bonus else None
    )
