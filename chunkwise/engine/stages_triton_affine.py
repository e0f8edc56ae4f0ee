"""Stages `affine` and `grads` on a GPU for the dplr rule, and for additive ones whose q reads before the write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.affine import affine_kernel, affine_score_kernel
from ..kernels.grad_pair import grad_pair_kernel
from ..kernels.grad_reader import grad_reader_kernel, grad_writer_kernel
from ..kernels.grad_reader_far import grad_reader_far_kernel
from ..spec import Gate, Rule, Streams
from .launch import descriptor, launch
from .problem import Problem, given
from .stages_triton import Decayed, Index, alike, can_describe, chunks, dense, described, exact, solves, switches
from .stages_triton_score import reach, sets
from .tune import config, padded


class Apart(NamedTuple):
    """What the gradients need of the affine stage besides the scan's operands."""

    T: Tensor  # (I - M_rw)^-1 [B, T, HV, C]
    near: Tensor  # [slots, HV, blocks of keys] uint8, whether a chunk's pairs may meet around its middle
    middle: Tensor  # [slots, HV, K] G at the middle, log2 units, fp32


def limit(p: Problem) -> float:
    """Exponents of 2 a decayed operand of the gradients may have above zero, either side of the middle.

    bf16 keeps its digits at any; fp16 overflows, fp32 loses digits of the sum.
    """
    return 60.0 if p.dtype == torch.bfloat16 else 4.0


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


def affine(
    p: Problem, x: Streams, at: Index, kept: Tensor | None = None, into: Tensor | None = None
) -> tuple[Tensor, Decayed, Apart]:
    """Stage `affine`: what can be kept, and what every chunk makes of the state it meets.

    into: where that goes. kept: from an earlier call; then only the operands are made, and what the gradients ask of every chunk.
    """
    (q, k, a, b), sk, sa = _keys(x)
    g, table, low_rank, gated = dense(x.g, q), sets(p, q.device), p.rule is Rule.DPLR, p.gate is Gate.KEY
    back = kept is not None
    halves, bound, grid, on = gated and back, reach(p), at.slots * p.HV, _on(p, x)

    places = (sk, sa, p.T, p.HV, p.scale)

    def keys() -> Tensor:
        return torch.empty(p.B, p.T, p.HV, p.K, dtype=p.dtype, device=q.device)

    if kept is None:
        kept = torch.empty(4 if low_rank else 1, p.B, p.T, p.HV, p.C, dtype=p.dtype, device=q.device) if into is None else into
        near = (torch.zeros if bound is None else torch.empty)(at.slots, p.HV, dtype=torch.uint8, device=q.device) if gated else q
        c = config("affine_score", p)
        tma = c.tma and can_describe(p, (q, sk), (k, sk), (a, sa), (b, sa), (g, 8))
        read = ((q, sk), (k, sk), (a, sa), (b, sa), (g, p.HV * p.K if gated else sk))
        for far in (False,) if not gated else (True,) if bound is None else (False, True):
            launch(
                affine_score_kernel, grid, *(described(t, d, p.C, c.BK) if tma and not far else t for t, d in read),
                dense(x.u, q), chunks(at, q), table, near, *kept, *[q] * (4 - len(kept)),
                *places, BK=c.BK, FAR=far, LIMIT=bound or 0.0, IPT=solves(p), TMA=tma and not far, **on, config=c,
            )  # fmt: skip
    M, T, A, Mqw = kept if low_rank else (kept[0], q, q, q)
    qm, km, wm, bm = keys(), keys(), keys() if low_rank else q, keys() if low_rank else q
    c = replace(config("affine", p), BK=config("grad_reader", p).BK) if halves else config("affine", p)
    NK = -(-p.K // c.BK)
    decay = torch.empty(at.slots, p.HV, p.K, dtype=torch.float32, device=q.device)
    near, middle = (torch.empty(at.slots, p.HV, NK, dtype=torch.uint8, device=q.device), torch.empty_like(decay)) if halves else (q, decay)
    launch(
        affine_kernel, grid * NK, q, k, a, b, g, chunks(at, q), table, T, qm, wm, km, bm, decay, near, middle,
        *places, BK=c.BK, HALVES=halves, LIMIT=limit(p), **on, config=c,
    )  # fmt: skip
    decayed = Decayed(M, qm, wm, km, decay, w=bm, A=A, Mqw=Mqw) if low_rank else Decayed(M, qm, None, km, decay)
    return kept, decayed, Apart(T, near, middle)


def grads(
    p: Problem, x: Streams, at: Index, do: Tensor, *, S: Tensor, dS: Tensor, X: Tensor | None, U: Tensor, decayed: Decayed,
    apart: Apart,
) -> Streams:  # fmt: skip
    """Stage `grads`: gradients per value head; those of q, k, a, b in fp32 where value heads share them, u's per chunk.

    X, U: what the scans left: X and dX, which is overwritten; additive: none and dv.
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
    backs = torch.empty(at.slots, p.HV, 4, dtype=torch.float32, device=q.device) if p.dtype == torch.float16 else met
    grid, on = at.slots * p.HV, _on(p, x)
    x_, u_ = (given(X), U) if low_rank else (v, v)
    c = config("grad_pair", p)
    few = {n: on[n] for n in ("K", "C", "LOW_RANK", "PACKED", "IP")}
    launch(
        grad_pair_kernel, grid, do, v, x_, u_, chunks(at, q), decayed.M, decayed.kr, q if decayed.A is None else decayed.A, apart.T, dS,
        *dM, met, backs, dv, sv, p.B * p.T, p.T, p.HV, p.scale,
        V=p.V, BK=c.BK, BV=c.BV, **few, config=c,
    )  # fmt: skip
    dq, dk = keys(q), keys(k)
    da, db = (keys(a), keys(b)) if low_rank else (q, q)
    dg = empty(x.g.dtype, p.K) if gated and x.g is not None else q
    filled = torch.empty if p.cu_seqlens is None else torch.zeros  # packed: of slots that are not used too
    du = filled(at.slots, p.HV, p.K, dtype=torch.float32, device=q.device) if p.bonus else q
    g, u, table = dense(x.g, q), dense(x.u, q), sets(p, q.device)
    sizes, part = (sk, sa, sv, p.B * p.T, p.T, p.HV), dg if dg.dtype == torch.float32 or not gated else empty(torch.float32, p.K)
    c = config("grad_reader", p)
    wide = max(c.BV, padded(p.V)) if p.dtype != torch.float32 and p.V <= 128 else c.BV
    tma = wide >= p.V and c.tma and can_describe(p)

    def states_of(t: Tensor) -> Any:
        return descriptor(t, t.shape, t.stride(), [1, 1, wide, c.BK]) if tma else t

    out = (dq, da if low_rank else dq, part if gated else dq, dk, db if low_rank else dk, dg if gated else dk)
    part = part if gated else q
    dq_, da_, part_, dk_, db_, dg_ = (described(t, p.HV * p.K, p.C, c.BK) if tma else t for t in out)
    streams = (q, k, a, b, g, u)
    found = (chunks(at, q), table, apart.near, apart.middle, decayed.decay, *dM, met, backs, states_of(S))
    blocks, both = grid * -(-p.K // c.BK), dict(V=p.V, BK=c.BK, BV=wide, TMA=tma, **on)
    launch(grad_reader_kernel, blocks, *streams, do, u_, *found, dq_, da_, part_, du, *sizes, p.scale, **both, config=c)
    launch(grad_writer_kernel, blocks, *streams, v, x_, *found, states_of(dS), dk_, db_, part, dg_, *sizes, **both, config=c)
    if gated:
        far = config("grad_reader_far", p)
        on = {n: s for n, s in both.items() if n not in ("GATED", "TMA")} | dict(BK=far.BK, BV=far.BV, EACH=c.BK // far.BK)
        launch(
            grad_reader_far_kernel, grid * -(-p.K // far.BK),
            *streams, do, v, x_, u_, chunks(at, q), table, apart.near, *dM, met, backs, S, dS, dq, dk, da, db, dg, du, *sizes, p.scale,
            **on, config=far,
        )  # fmt: skip
    return Streams(dq, dk, dv, g=dg if gated else None, a=da if low_rank else None, b=db if low_rank else None, u=du if p.bonus else None)
