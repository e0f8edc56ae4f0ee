"""Stages `scores` and `grads` on a GPU for gates per key channel: first what has its decays in reach, then the rest."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.bounded import grad_bounded_kernel, score_bounded_kernel
from ..kernels.grad_key import grad_key_kernel, grad_value_kernel
from ..kernels.score import score_kernel
from ..spec import Rule, Streams
from .problem import Problem, given
from .stages_triton import Decayed, Index, alike, chunks, dense, exact, solves, switches
from .tune import config


class Scores(NamedTuple):
    """What the state pass reads in place of q, k and g; T and kd of the delta rule only."""

    T: Tensor | None  # [B, T, HV, C] (I - M_rw)^-1
    M: Tensor  # [B, T, HV, C] scale M_qk
    qd: Tensor  # [B, T, HV, K] scale q e^G
    kd: Tensor | None  # [B, T, HV, K] e e^G, e = k unless another key erases
    kr: Tensor  # [B, T, HV, K] k e^(G_C - G)
    decay: Tensor  # [slots, HV, K] G_C, log2 units, fp32


def limit(p: Problem) -> float:
    """Exponents of 2 a decayed operand of the gradients may have above zero, either side of the middle.

    bf16 keeps its digits at any; fp16 overflows, fp32 loses digits of the sum.
    """
    return 60.0 if p.dtype == torch.bfloat16 else 4.0


def reach(p: Problem) -> float | None:
    """As `limit`, of the scores from the chunk's start; None: too little for a kernel of its own."""
    return 100.0 if p.dtype == torch.bfloat16 else None


def sets(p: Problem, device: torch.device) -> Tensor:
    """[2 * LEVELS + 3, C, C] in q's dtype: which gates make up the decays of score.py (row i: of token i; -1: counted backwards).

    Blocks of 2^level rows whose pairs meet across their border, then around their middle; then from the chunk's start and to its end.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _sets.__wrapped__(p.C, p.dtype, device)  # what a graph makes belongs to the graph
    return _sets(p.C, p.dtype, device)


@cache
def _sets(C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    o = torch.arange(C, device=device)
    i, t = o[:, None], o[None, :]
    levels = [1 << n for n in range(C.bit_length() - 1)]
    out = [(i // s == t // s) & ((i // s % 2 == 1) == (t <= i)) for s in levels]
    for s in (*levels, C):
        middle = i // s * s + (s - 1) // 2
        out.append(((t > middle) & (t <= i)).int() - ((t > i) & (t <= middle)).int())
    return torch.stack([m.to(dtype) for m in (*out, t <= i, t > i)])


def _on(p: Problem, x: Streams) -> dict[str, object]:
    """constexpr arguments of all kernels here."""
    on = {n: s for n, s in switches(p).items() if n not in ("GATE", "SPLIT")}
    return on | dict(GROUP=p.HV // p.H, DELTA=p.rule is Rule.DELTA, USE_BETA=x.beta is not None, IPG=exact(3))


def scores(p: Problem, x: Streams, at: Index) -> Scores:
    """Stage `scores`: M_qk, the inverse and the decayed operands of every chunk, once."""
    (q, k, e), sk = alike(x.q, x.k, x.k if x.e is None else x.e)
    delta, device = p.rule is Rule.DELTA, q.device

    def empty(*shape: int, dtype: torch.dtype = p.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tokens = (p.B, p.T, p.HV)
    T = empty(*tokens, p.C) if delta else None
    M = empty(*tokens, p.C)
    qd, kr = empty(*tokens, p.K), empty(*tokens, p.K)
    kd = empty(*tokens, p.K) if delta else None
    decay = empty(at.slots, p.HV, p.K, dtype=torch.float32)
    bound = reach(p)
    near = (torch.zeros if bound is None else torch.empty)(at.slots, p.HV, dtype=torch.uint8, device=device)
    inputs = (q, e, k, dense(x.g, q), dense(x.beta, q), chunks(at, q), sets(p, device), near)
    outputs = (q if T is None else T, M, qd, q if kd is None else kd, kr, decay, sk, p.T, p.HV, p.scale)
    grid, on = (at.slots * p.HV,), _on(p, x) | dict(IPT=solves(p))
    if bound is not None:
        c = config("score_bounded", p)
        score_bounded_kernel[grid](*inputs, *outputs, BK=c.BK, LIMIT=bound, **on, **c.launch)
    c = config("score", p)
    score_kernel[grid](*inputs, *outputs, BK=c.BK, **on, **c.launch)
    return Scores(T, M, qd, kd, kr, decay)


def grads(
    p: Problem, x: Streams, at: Index, do: Tensor, *, S: Tensor, dS: Tensor, X: Tensor | None, U: Tensor | None, decayed: Decayed
) -> Streams:
    """Stage `grads`, as in stages_triton_grad: gradients per value head, dq and dk (and de) in fp32 where value heads share keys."""
    (q, k, e), sk = alike(x.q, x.k, x.k if x.e is None else x.e)
    (v, do), sv = alike(x.v, do)
    delta, erase, keys = p.rule is Rule.DELTA, x.e is not None, (p.B, p.T, p.HV, p.K)
    wide = p.dtype if p.HV == p.H else torch.float32
    dq, dk = (torch.empty(keys, dtype=wide, device=q.device) for _ in "qk")
    de = torch.empty(keys, dtype=wide, device=q.device) if erase else q
    dv, dg = torch.empty_like(v, memory_format=torch.contiguous_format), torch.empty(keys, dtype=given(x.g).dtype, device=q.device)
    dMqk = torch.empty(p.B, p.T, p.HV, p.C, dtype=p.dtype, device=q.device)
    dMrw = torch.empty_like(dMqk) if delta else q
    dbeta = q if x.beta is None else torch.empty(p.B, p.T, p.HV, dtype=torch.float32, device=q.device)
    near = torch.empty(at.slots, p.HV, dtype=torch.uint8, device=q.device)
    y, sy = (given(X), p.HV * p.V) if delta else (v, sv)
    u, beta, grid, on = (given(U) if delta else q), dense(x.beta, q), (at.slots * p.HV,), _on(p, x)
    c = config("grad_value", p)
    few = {n: on[n] for n in ("K", "C", "DELTA", "USE_BETA", "PACKED", "IP")}
    grad_value_kernel[grid](
        do, v, y, u, beta, decayed[0], decayed[3], dS, chunks(at, q), dMqk, dMrw, dv, dbeta, sv, sy, p.T, p.HV, p.scale,
        V=p.V, BK=c.BK, BV=c.BV, **few, **c.launch,
    )  # fmt: skip
    for kernel, c in (grad_bounded_kernel, config("grad_bounded", p)), (grad_key_kernel, config("grad_key", p)):
        kernel[grid](
            q, e, k, dense(x.g, q), beta, do, y, u, chunks(at, q), sets(p, q.device), near, dMqk, dMrw, S, dS, dq, de, dk, dg, dbeta,
            sk, sv, sy, p.T, p.HV, p.scale, V=p.V, BK=c.BK, BV=c.BV, ERASE=erase, LIMIT=limit(p), **on, **c.launch,
        )  # fmt: skip
    return Streams(q=dq, k=dk, v=dv, g=dg, beta=None if x.beta is None else dbeta.to(x.beta.dtype), e=de if erase else None)
