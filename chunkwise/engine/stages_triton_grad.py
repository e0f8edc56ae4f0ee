"""Stage `grads` on a GPU: every gradient of a chunk in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.grad import grad_kernel
from ..kernels.grad_blocks import grad_blocks_kernel
from ..spec import Gate, Rule, Streams
from .launch import descriptor, launch
from .problem import Problem, given
from .stages_triton import Decayed, Index, alike, can_describe, chunks, dense, described, switches
from .stages_triton_affine import Apart
from .tune import card, config, padded


def _outputs(p: Problem, x: Streams, like: Tensor, U: Tensor | None) -> Streams:
    """Gradients to fill: [B, T, HV, ...], per value head; of q, k, e in fp32 where value heads share them, and of g for a head's gate.

    That of v is U already where the rule adds.
    """
    keys = torch.float32 if p.HV > p.H else p.dtype

    def empty(dtype: torch.dtype, *last: int) -> Tensor:
        return torch.empty(p.B, p.T, p.HV, *last, dtype=dtype, device=like.device)

    return Streams(
        q=empty(keys, p.K),
        k=empty(keys, p.K),
        v=empty(p.dtype, p.V) if p.rule is Rule.DELTA else given(U),
        g=None if x.g is None else empty(torch.float32 if p.gate is Gate.HEAD else x.g.dtype),
        beta=None if x.beta is None else empty(x.beta.dtype),
        e=None if x.e is None else empty(keys, p.K),
    )


def _fits(p: Problem, x: Streams) -> bool:
    """Whether two programs of all values of a chunk fit a multiprocessor of the card the kernel was made for."""
    return p.dtype != torch.float32 and p.V <= 128 and x.e is None and card().arch == "sm_90"


def _tiled(p: Problem, x: Streams, at: Index, do: Tensor, S: Tensor, dS: Tensor, X: Tensor | None, U: Tensor | None) -> Streams:
    """All values at once, one program a (chunk, value head)."""
    c = config("grad", p)
    delta = p.rule is Rule.DELTA
    (q, k), sk = alike(x.q, x.k)
    (v, do), sv = alike(x.v, do)
    y, sy = (given(X), p.HV * p.V) if delta else (v, sv)
    d = _outputs(p, x, q, U)
    U = rows = given(U) if delta else y
    unused, BV = q, padded(p.V)
    tokens, states, out = [q, k], [S, dS], [given(d.q), given(d.k)]
    tma = c.tma and can_describe(p, (q, sk), (k, sk), (v, sv), (do, sv))
    if tma:
        q, k = (described(t, sk, p.C, c.BK) for t in tokens)
        y, U, do = described(y, sy, p.C, BV), described(U, sy, p.C, BV), described(do, sv, p.C, BV)
        states = [descriptor(t, t.shape, t.stride(), [1, 1, BV, c.BK]) for t in states]
        out = [described(t, p.HV * p.K, p.C, c.BK) for t in out]
    on = {n: s for n, s in switches(p).items() if n != "SPLIT"}
    launch(
        grad_kernel, at.slots * p.HV, q, k, v, y, U, do, *states, dense(x.g, unused), dense(x.beta, unused), chunks(at, unused),
        *out, d.v, unused if d.g is None else d.g, unused if d.beta is None else d.beta, rows, sk, sv, sy, p.T, p.HV, p.scale,
        V=p.V, BK=c.BK, BV=BV, GROUP=p.HV // p.H, DELTA=delta, USE_BETA=x.beta is not None, TMA=tma, **on, config=c,
    )  # fmt: skip
    return d


def _blocks(p: Problem, x: Streams, at: Index, do: Tensor, S: Tensor, dS: Tensor, X: Tensor | None, U: Tensor | None) -> Streams:
    """Values in blocks, one program a (chunk, value head)."""
    c = config("grad_blocks", p)
    delta = p.rule is Rule.DELTA
    (q, k, e), sk = alike(x.q, x.k, x.k if x.e is None else x.e)
    (v, do), sv = alike(x.v, do)
    d = _outputs(p, x, q, U)
    launch(
        grad_blocks_kernel, at.slots * p.HV,
        q, e, k, v, dense(x.g, q), dense(x.beta, q), do, chunks(at, q), given(X) if delta else q, given(U) if delta else q, S, dS,
        d.q, q if d.e is None else d.e, d.k, d.v, q if d.g is None else d.g, q if d.beta is None else d.beta, sk, sv, p.T, p.HV, p.scale,
        V=p.V, BK=c.BK, BV=c.BV, GROUP=p.HV // p.H, DELTA=delta, ERASE=x.e is not None, BEFORE=p.before, USE_BETA=x.beta is not None,
        **switches(p), config=c,
    )  # fmt: skip
    return d


def grads(
    p: Problem, x: Streams, at: Index, do: Tensor, *, S: Tensor, dS: Tensor, X: Tensor | None = None, U: Tensor | None = None,
    decayed: Decayed | None = None, apart: Apart | None = None,
) -> Streams:  # fmt: skip
    """Gradients of every stream, in its dtype and shape.

    do [B, T, HV, V]; S, dS [slots, HV, V, K]: the state before, its gradient after each chunk; X (delta) and U: [B, T, HV, V].
    decayed: of the score stage in the backward pass (gates per key channel) or, with `apart`, of the affine stage.
    Value heads that share a key head each write dq and dk in fp32, summed here: the order of the sum never changes.
    """
    if p.rule is Rule.DPLR or p.bonus:
        from .stages_triton_affine import grads as by_reader

        d = by_reader(p, x, at, do, S=S, dS=dS, X=X, U=given(U), decayed=given(decayed), apart=apart)
    elif p.gate is Gate.KEY:
        from .stages_triton_score import grads as by_key

        if decayed is None:
            raise ValueError("chunkwise engine: gradients of gates per key channel need what the score stage found")
        d = by_key(p, x, at, do, S=S, dS=dS, X=X, U=U, decayed=decayed)
    else:
        d = (_tiled if _fits(p, x) else _blocks)(p, x, at, do, S, dS, X, U)

    def summed(dx: Tensor, like: Tensor) -> Tensor:
        return dx.unflatten(2, (like.shape[2], -1)).sum(3).to(like.dtype) if p.HV > like.shape[2] else dx

    return Streams(
        q=summed(given(d.q), x.q),
        k=summed(given(d.k), x.k),
        v=d.v,
        g=given(d.g).sum((0, 1)).to(x.g.dtype) if x.g is not None and p.gate is Gate.HEAD else d.g,
        beta=d.beta,
        e=None if x.e is None else summed(given(d.e), x.e),
        a=None if x.a is None else summed(given(d.a), x.a),
        b=None if x.b is None else summed(given(d.b), x.b),
        u=None if x.u is None else given(d.u).sum(0).to(x.u.dtype),
    )
