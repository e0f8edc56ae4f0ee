"""Stages `scores` and `grads` on a GPU for gates per key channel: first what has its decays in reach, then the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.bounded import score_bounded_kernel
from ..kernels.grad_key import grad_key_kernel, strength_kernel
from ..kernels.grad_key_blocks import grad_key_blocks_kernel
from ..kernels.score import GROUPED, score_kernel
from ..spec import Rule, Streams
from .launch import constant, descriptor, launch
from .problem import Problem, given
from .stages_triton import Decayed, Index, alike, can_describe, chunks, dense, described, exact, solves, switches
from .tune import Config, card, config, padded

NOWHERE = -1.0  # as a reach: no chunk has forgotten less than nothing


def reach(p: Problem) -> float | None:
    """What rows may have forgotten since their chunk's start, as exponents of 2, to be scored from there; None: too little for a kernel."""
    return 100.0 if p.dtype == torch.bfloat16 else None


def reach_of_scores(p: Problem) -> float | None:
    """The same where operands of fp16 have fp32's range (kernels/bounded.py)."""
    return 100.0 if p.dtype == torch.float16 else reach(p)


def reach_back(p: Problem) -> float:
    """The same of its gradients: bf16 keeps its digits at any exponent; fp16 overflows, fp32 loses digits of the sum."""
    return {torch.bfloat16: 100.0, torch.float16: 8.0}.get(p.dtype, 4.0)


def group(blocks: int) -> int:
    """Of how many blocks a program of the kernels that do what is left looks whether there is anything to do."""
    return GROUPED.value if blocks >= 4096 else 1


def sets(p: Problem, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """[3 * LEVELS + 4, C, C] in q's dtype or another: which gates make up the decays of score.py (row i: of token i; -1: backwards).

    Blocks of 2^level rows whose pairs meet across their border, then around their middle; then from the chunk's start and to its end.
    Then the levels and the chunk's start again, as rows that read before their own token forgets meet them (affine.py).
    """
    return _sets(p.C, dtype or p.dtype, device=device)


@constant
def _sets(C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    o = torch.arange(C, device=device)
    i, t = o[:, None], o[None, :]
    levels = [1 << n for n in range(C.bit_length() - 1)]
    out = [(i // s == t // s) & ((i // s % 2 == 1) == (t <= i)) for s in levels]
    for s in (*levels, C):
        middle = i // s * s + (s - 1) // 2
        out.append(((t > middle) & (t <= i)).int() - ((t > i) & (t <= middle)).int())
    early = [(i // s == t // s) & torch.where(i // s % 2 == 1, t < i, t > i) for s in levels]
    return torch.stack([m.to(dtype) for m in (*out, t <= i, t > i, *early, t < i)])


def _on(p: Problem, x: Streams) -> dict[str, object]:
    """constexpr arguments of all kernels here."""
    on = {n: s for n, s in switches(p).items() if n not in ("GATE", "SPLIT")}
    return on | dict(GROUP=p.HV // p.H, DELTA=p.rule is Rule.DELTA, USE_BETA=x.beta is not None, IPG=exact(3))


def scores(
    p: Problem, x: Streams, at: Index, kept: Tensor | None = None, into: Tensor | None = None, tokens: Tensor | None = None
) -> tuple[Tensor, Decayed]:
    """Stage `scores`: what can be kept, [1 or 2, B, T, HV, C]: scale M_qk and, delta, T = (I - M_rw)^-1; and the scan's operands.

    into: where that goes; tokens: where what the scans ask of each token goes.
    kept: from an earlier call; then only the operands are made, whose decays need no pairs of tokens, and what `grads` asks of every chunk.
    """
    (q, k, e), sk = alike(x.q, x.k, x.k if x.e is None else x.e)
    delta, device, rows = p.rule is Rule.DELTA, q.device, (p.B, p.T, p.HV)

    def empty(*shape: int, dtype: torch.dtype = p.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    pairs = kept is None
    bound = reach_of_scores(p) if pairs else reach_back(p)
    if kept is None:
        kept = empty(1 + delta, *rows, p.C) if into is None else into
    M, T = kept[0], kept[-1]
    qd, kr = empty(*rows, p.K), empty(*rows, p.K)
    kd = empty(*rows, p.K) if delta else kr
    decay = empty(at.slots, p.HV, p.K, dtype=torch.float32)
    c = config("score_bounded" if pairs else "decay", p)
    near = torch.empty(at.slots, p.HV, dtype=torch.uint8, device=device)
    g, beta, table = dense(x.g, q), dense(x.beta, q), sets(p, device)
    read, made, last = [q, e, k, g], [T, M, qd, kd, kr], (chunks(at, q), table, near)
    blocks, on = at.slots * p.HV, _on(p, x) | dict(IPT=solves(p))
    tma = c.tma and g.data_ptr() % 16 == 0 and can_describe(p, (q, sk), (k, sk), (e, sk))
    if tma:
        read = [described(t, d, p.C, c.BK) for t, d in zip(read, (sk, sk, sk, p.HV * p.K))]
        made = [described(t, p.HV * t.shape[3], p.C, d) for t, d in zip(made, (p.C, p.C, c.BK, c.BK, c.BK))]
    launch(
        score_bounded_kernel, blocks, *read, beta, *last, *made, decay, decay if tokens is None else tokens,
        sk, p.T, p.HV, p.scale, BK=c.BK, ERASE=x.e is not None, PAIRS=pairs and bound is not None, TOKENS=tokens is not None,
        LIMIT=NOWHERE if bound is None else bound, TMA=tma, **on, config=c,
    )  # fmt: skip
    if pairs:
        c, n = config("score", p), group(blocks)
        launch(
            score_kernel, -(-blocks // n), q, e, k, g, beta, *last, T, M, sk, p.T, p.HV, p.scale, n, blocks,
            BK=c.BK, **on, config=c,
        )  # fmt: skip
    return kept, Decayed(M, qd, kd if delta else None, kr, decay, None if pairs else near)


def at_once(p: Problem) -> bool:
    """Whether gradients of chunks in reach are made of all values at once (kernels/grad_key.py).

    Of fewer than 32 channels ptxas 12.8 builds wgmma's descriptors from registers nobody wrote, and wrong.
    """
    return p.dtype != torch.float32 and p.C > 16 and p.K >= 32 <= p.V <= 128 and card().arch == "sm_90"


def grads(
    p: Problem, x: Streams, at: Index, do: Tensor, *, S: Tensor, dS: Tensor, X: Tensor | None, U: Tensor | None, decayed: Decayed,
    rest: float,
) -> Streams:  # fmt: skip
    """Stage `grads`, as in stages_triton_grad: gradients per value head, dq and dk (and de) in fp32 where value heads share keys."""
    (q, k, e), sk = alike(x.q, x.k, x.k if x.e is None else x.e)
    (v, do), sv = alike(x.v, do)
    delta, erase, tokens = p.rule is Rule.DELTA, x.e is not None, (p.B, p.T, p.HV)

    def empty(dtype: torch.dtype, *last: int) -> Tensor:
        return torch.empty(*tokens, *last, dtype=dtype, device=q.device)

    NK, wide = -(-p.K // config("grad_far", p).BK), p.dtype if p.HV == p.H else torch.float32
    dg = empty(given(x.g).dtype, p.K)
    if wide == p.dtype:  # every block is read, once, before it is written
        dq, dk, de = decayed.qd, decayed.kr, given(decayed.kd) if erase else q
    else:
        dq, dk, de = empty(wide, p.K), empty(wide, p.K), empty(wide, p.K) if erase else q
    parts = q if x.beta is None else empty(torch.float32, NK)
    y, sy = (given(X), p.HV * p.V) if delta else (v, sv)
    D, near, decay = given(U) if delta else y, given(decayed.near), decayed.decay
    g, beta, blocks, table = dense(x.g, q), dense(x.beta, q), at.slots * p.HV * NK, sets(p, q.device)
    on = _on(p, x) | dict(V=p.V, ERASE=erase)
    tma, once, places = can_describe(p, (v, sv), (do, sv), (y, sy)), at_once(p), (sv, sy, p.T, p.HV, p.scale, rest)

    def states(c: Config, BV: int) -> tuple[Any, ...]:
        return tuple(descriptor(t, t.shape, t.stride(), [1, 1, BV, c.BK]) if tma and c.tma else t for t in (S, dS))

    def values(c: Config, BV: int) -> tuple[Any, ...]:
        return tuple(described(t, d, p.C, BV) if tma and c.tma else t for t, d in ((do, sv), (y, sy), (D, sy)))

    if once:
        c, BV = config("grad_key", p), padded(p.V)
        sums = sets(p, q.device, torch.bfloat16)  # once is never of fp32
        out = [described(t, p.HV * p.K, p.C, c.BK) if tma and c.tma and t is not q else t for t in (dq, de, dk, dg)]
        few = {n: s for n, s in on.items() if n != "GROUP"}
        launch(
            grad_key_kernel, at.slots * p.HV, decayed.qd, decayed.kr if decayed.kd is None else decayed.kd, decayed.kr, g, beta, v,
            *values(c, BV), chunks(at, q), sums, near, decay, *states(c, BV), *out, parts, *places,
            BK=c.BK, BV=BV, PARTS=NK, TMA=tma and c.tma, **few, config=c,
        )  # fmt: skip
    for near_by in (False,) if once else (True, False):
        c = config("grad_key_blocks" if near_by else "grad_far", p)
        n = 1 if near_by else group(blocks)
        launch(
            grad_key_blocks_kernel, -(-blocks // n), q, e, k, g, beta, v, *values(c, c.BV), D, chunks(at, q), table, near, decay,
            *states(c, c.BV), dq, de, dk, dg, parts, sk, *places, n, blocks,
            BK=c.BK, BV=c.BV, NEAR=near_by, TMA=tma and c.tma, LIMIT=reach_back(p), **on, config=c,
        )  # fmt: skip
    dbeta = None if x.beta is None else torch.empty_like(beta)
    if dbeta is not None:
        launch(
            strength_kernel, -(-beta.numel() // 1024), parts, beta, dbeta, D, beta.numel(), V=p.V, BV=min(128, padded(p.V)), PARTS=NK,
            BLOCK=1024, config=config("index", p),
        )  # fmt: skip
    return Streams(q=dq, k=dk, v=given(U), g=dg, beta=dbeta, e=de if erase else None)
