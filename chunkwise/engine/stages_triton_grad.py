"""Stage `grads` on a GPU: every gradient of a chunk in one kernel."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.grad import grad_kernel, passed_kernel, small_strength_kernel
from ..kernels.grad_blocks import grad_blocks_kernel
from ..kernels.head import head_kernel
from ..spec import Gate, Rule, Streams
from . import stages_triton as stages
from .config import Config, card
from .launch import descriptor, launch
from .problem import Problem, given
from .stages_triton import AT_ONCE, Decayed, Index, alike, at_once, can_describe, chunks, dense, described, switches
from .stages_triton_affine import Apart
from .stages_triton_split import Carried
from .tune import config, padded


def _outputs(p: Problem, x: Streams, like: Tensor, dv: Tensor | None = None, dq: Tensor | None = None) -> Streams:
    """Gradients to fill: [B, T, HV, ...], per value head; of q, k, e in fp32 where value heads share them, and of g for a head's gate.

    dv, dq: what is given already, or may be overwritten.
    """
    keys = torch.float32 if p.HV > p.H else p.dtype

    def empty(dtype: torch.dtype, *last: int) -> Tensor:
        return torch.empty(p.B, p.T, p.HV, *last, dtype=dtype, device=like.device)

    return Streams(
        q=empty(keys, p.K) if dq is None or dq.dtype != keys or p.K != p.V else dq,
        k=empty(keys, p.K),
        v=empty(p.dtype, p.V) if dv is None else dv,
        g=None if x.g is None or p.fixed else empty(torch.float32 if p.gate is Gate.HEAD else x.g.dtype),
        beta=None if x.beta is None else empty(x.beta.dtype),
        e=None if x.e is None else empty(keys, p.K),
    )


def _parted(p: Problem, x: Streams, at: Index, do: Tensor, S: Tensor, dS: Tensor, X: Tensor | None, dv: Tensor, rest: float) -> Streams:
    """A head of many values is several of fewer that share keys, gates and strengths: every gradient is the sum of theirs."""
    n = p.V // AT_ONCE

    def apart(t: Tensor) -> Tensor:
        return t.unflatten(3, (n, AT_ONCE)).flatten(2, 3)

    def again(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.repeat_interleave(n, -1)

    def together(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.unflatten(2, (p.HV, n)).sum(3)

    S, dS = (t.view(t.shape[0], n * p.HV, AT_ONCE, p.K) for t in (S, dS))
    y = x._replace(v=apart(x.v), g=again(x.g), beta=again(x.beta))
    d = _tiled(replace(p, HV=n * p.HV, V=AT_ONCE), y, at, apart(do), S, dS, None if X is None else apart(X), apart(dv), rest)
    return d._replace(v=given(d.v).view(dv.shape), g=together(d.g), beta=together(d.beta))


def _tiled(p: Problem, x: Streams, at: Index, do: Tensor, S: Tensor, dS: Tensor, X: Tensor | None, dv: Tensor, rest: float) -> Streams:
    """All values at once, one program a (chunk, value head). dq is written over X."""
    if p.V > AT_ONCE:
        return _parted(p, x, at, do, S, dS, X, dv, rest)
    c = config("grad", p)
    delta = p.rule is Rule.DELTA
    (q, k), sk = alike(x.q, x.k)
    (v, do), sv = alike(x.v, do)
    y, sy = (given(X), p.HV * p.V) if delta else (v, sv)
    d = _outputs(p, x, q, dv, X)
    D, unused, BV = dv if delta else y, q, padded(p.V)
    g, beta, on = dense(x.g, unused), dense(x.beta, unused), {n: s for n, s in switches(p).items() if n != "SPLIT"}
    if delta and d.beta is not None:
        rare = config("small_strength", p)
        launch(
            small_strength_kernel, at.slots, k, v, y, D, S, g, beta, chunks(at, unused), d.beta, sk, sv, sy, p.T, p.HV,
            V=p.V, BK=rare.BK, BV=BV, BH=padded(p.HV), GROUP=p.HV // p.H, **on, config=rare,
        )  # fmt: skip
    states, out = [S, dS], [given(d.q), given(d.k)]
    tma = c.tma and can_describe(p, (q, sk), (k, sk), (v, sv), (do, sv))
    if tma:
        q, k = (described(t, sk, p.C, c.BK) for t in (q, k))
        y, D, do = described(y, sy, p.C, BV), described(D, sy, p.C, BV), described(do, sv, p.C, BV)
        states = [descriptor(t, t.shape, t.stride(), [1, 1, BV, c.BK]) for t in states]
        out = [described(t, p.HV * p.K, p.C, c.BK) for t in out]
    parts = None
    if not delta and d.g is not None and d.g.dtype == torch.float32:
        parts = torch.empty(at.slots, p.HV, 4, dtype=torch.float32, device=d.g.device)
    launch(
        grad_kernel, at.slots * p.HV, q, k, v, y, D, do, *states, g, beta, chunks(at, unused),
        *out, dv, unused if d.g is None else d.g, unused if d.beta is None else d.beta,
        unused if parts is None else parts, sk, sv, sy, p.T, p.HV, p.scale, rest,
        V=p.V, BK=c.BK, BV=BV, GROUP=p.HV // p.H, DELTA=delta, USE_BETA=x.beta is not None, LEARNS=d.g is not None, PARTS=parts is not None,
        TMA=tma, **on, config=c,
    )  # fmt: skip
    if parts is not None:
        launch(
            passed_kernel, at.slots * p.HV, parts, chunks(at, unused), dense(at.first, unused), d.g, p.T, p.HV, p.N,
            C=p.C, PACKED=p.cu_seqlens is not None, config=config("index", p),
        )  # fmt: skip
    return d


def _blocks(
    p: Problem, x: Streams, at: Index, do: Tensor, S: Tensor, dS: Tensor, X: Tensor | None, U: Tensor | None, rest: float
) -> Streams:
    """Values in blocks, one program a (chunk, value head)."""
    c = config("grad_blocks", p)
    delta = p.rule is Rule.DELTA
    (q, k, e), sk = alike(x.q, x.k, x.k if x.e is None else x.e)
    (v, do), sv = alike(x.v, do)
    d = _outputs(p, x, q, None if delta else given(U))
    launch(
        grad_blocks_kernel, at.slots * p.HV,
        q, e, k, v, dense(x.g, q), dense(x.beta, q), do, chunks(at, q), given(X) if delta else q, given(U) if delta else q, S, dS,
        d.q, q if d.e is None else d.e, d.k, d.v, q if d.g is None else d.g, q if d.beta is None else d.beta,
        sk, sv, p.T, p.HV, p.scale, rest,
        V=p.V, BK=c.BK, BV=c.BV, GROUP=p.HV // p.H, DELTA=delta, ERASE=x.e is not None, BEFORE=p.before, USE_BETA=x.beta is not None,
        LEARNS=d.g is not None,
        **switches(p), config=c,
    )  # fmt: skip
    return d


def summed(dx: Tensor, like: Tensor) -> Tensor:
    """[B, T, HV, D] -> like's heads and dtype."""
    if dx.shape == like.shape:
        return dx
    D, rows = like.shape[3], like.shape[0] * like.shape[1] * like.shape[2]
    made = torch.empty(like.shape, dtype=like.dtype, device=dx.device)
    c = Config(padded(D), 0, 4, 1)
    many, n = max(1, 2048 // c.BK), dx.shape[2] // like.shape[2]
    launch(head_kernel, -(-rows // many), dx.contiguous(), made, rows, D=D, BD=c.BK, ROWS=many, GROUP=n, config=c)
    return made


def by_scans(p: Problem, x: Streams) -> bool:
    """Whether every gradient is the output of a scan: nothing is corrected, no gate learns, and a sample's scans keep a card busy.

    That is asked neither of a whole batch nor of how long it is, which must not change the bits of a sample, alone or packed. Forward and
    backward of linear attention on an H200, ms, by scans and by stage `grads`, K=V=128: B=4, T=4096, H=8 0.301 0.325; B=1, T=8192, H=8
    in 16 pieces 0.136 0.172; B=1, T=4096, H=8 0.257 0.201; B=1, T=8192, H=1 0.074 0.069; of 64 channels B=4, T=4096, H=16 0.265 0.275,
    H=8 0.226 0.200; of 256 B=2, T=4096, H=16 0.638, else 0.991. In fp32 they are slower.
    """
    fixed = p.rule is Rule.ADD and not p.bonus and p.gate is not Gate.KEY and (x.g is None or p.fixed)
    if not fixed or p.dtype == torch.float32:
        return False
    return p.HV * p.V >= ENOUGH if max(p.K, p.V) <= 128 else max(p.K, p.V) <= 256 and card().arch == "sm_90"


ENOUGH = 8 * 128  # values of a sample


def scanned(
    p: Problem, x: Streams, at: Index, S0: Tensor | None, do: Tensor, dST: Tensor | None, carried: Carried | None
) -> tuple[Streams, Tensor | None]:
    """Gradients of every stream, in its dtype and shape, and of the initial state: no states but those between pieces are stored.

    carried: those, of a scan forwards.
    Reversed, the scale's power of two multiplies do (or, turned, q) and the rest of it the outputs: no digit of a product's operands
    is lost, so turned scans find the very states that those of dv leave between pieces.
    """
    mirrored, rest = stages.binary(p)
    ahead, back = carried or stages.starts(p, x, at, S0), stages.starts(mirrored, x, at, dST, do=do, rest=rest)
    turned, y = replace(p, K=p.V, V=p.K), x._replace(q=do, k=x.v, v=x.k)

    def room(p: Problem, way: Carried | None, final: bool, turned: bool) -> stages.Scan:
        return stages.scan_room(p, at, do.device, final=final, output=True, store=0, turned=turned)._replace(carried=way)

    dq = stages.scan(turned, y, at, S0, made=room(turned, ahead, False, True), turned=True)
    dv = stages.scan(mirrored, x, at, dST, do=do, made=room(p, back, S0 is not None, False), rest=rest)
    turned = replace(turned, scale=mirrored.scale)
    dk = stages.scan(turned, y, at, dST, do=x.q, made=room(turned, back, False, True), turned=True, rest=rest)
    return Streams(summed(given(dq.o), x.q), summed(given(dk.o), x.k), given(dv.o)), dv.ST


def grads(
    p: Problem, x: Streams, at: Index, do: Tensor, *, S: Tensor, dS: Tensor, X: Tensor | None = None, U: Tensor | None = None,
    decayed: Decayed | None = None, apart: Apart | None = None, rest: float = 1.0,
) -> Streams:  # fmt: skip
    """Gradients of every stream, in its dtype and shape.

    do [B, T, HV, V]; S, dS [slots, HV, V, K]: the state before, its gradient after each chunk; X (delta) and U: [B, T, HV, V], as the scans
    left them. U may become dv, and X dq.
    decayed: of the score stage in the backward pass (gates per key channel) or, with `apart`, of the affine stage.
    rest: what dS lacks, under gates per key the score stage's operands too: see `stages_triton.binary`.
    Value heads that share a key head each write dq and dk in fp32, summed here: the order of the sum never changes.
    """
    if p.rule is Rule.DPLR or p.bonus:
        from .stages_triton_affine import grads as by_reader

        d = by_reader(p, x, at, do, S=S, dS=dS, X=X, U=given(U), decayed=given(decayed), apart=given(apart))
    elif p.gate is Gate.KEY:
        from .stages_triton_score import grads as by_key

        if decayed is None:
            raise ValueError("chunkwise engine: gradients of gates per key channel need what the score stage found")
        d = by_key(p, x, at, do, S=S, dS=dS, X=X, U=U, decayed=decayed, rest=rest)
    else:
        d = (_tiled if at_once(p) else _blocks)(p, x, at, do, S, dS, X, given(U), rest)

    return Streams(
        q=summed(given(d.q), x.q),
        k=summed(given(d.k), x.k),
        v=d.v,
        g=d.g.sum((0, 1)).to(x.g.dtype) if d.g is not None and x.g is not None and p.gate is Gate.HEAD else d.g,
        beta=d.beta,
        e=None if x.e is None else summed(given(d.e), x.e),
        a=None if x.a is None else summed(given(d.a), x.a),
        b=None if x.b is None else summed(given(d.b), x.b),
        u=None if x.u is None else given(d.u).sum(0).to(x.u.dtype),
    )
