"""The parallel form on a GPU, where the rule adds and no gate is per channel: one kernel makes o, and again dq, dk and dv.

States, the last one and the first one's gradient, are those of a scan: linear in T, where pairs are quadratic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.parallel import factor_kernel, parallel_gate_kernel, parallel_kernel
from ..spec import Gate, Streams
from . import stages_triton as stages
from .config import card
from .launch import launch
from .plan_triton import chunk, initial, on_device
from .problem import Problem, given
from .stages_triton import Index, alike, can_describe, chunks, dense, described, switches
from .stages_triton_grad import summed
from .tune import config

__all__ = ["backward", "chunk", "forward"]  # what a plan has
COLUMNS = 64  # tokens of a block that is met
SUMMED = 1024  # tokens whose gates' gradients are summed at once


class Blocks(NamedTuple):
    """What all launches of a pass share."""

    p: Problem  # C: tokens of a block of rows
    at: Index  # of these blocks
    factors: Tensor | None  # [3, HV, B*T] fp32: see kernels/parallel.py


class Met(NamedTuple):
    """What the gate's gradient is summed of, each [blocks of keys, HV, B*T] fp32: see kernels/parallel.py."""

    pairs: Tensor
    ends: Tensor | None  # of dk, where the last state has a gradient
    inner: Tensor | None  # of dq in float32


def _blocks(p: Problem, x: Streams) -> Blocks:
    """Rows side by side: as many as fill the registers of an H200."""
    wide = replace(p, C=128 if p.dtype != torch.float32 and card().arch == "sm_90" else COLUMNS)
    at, factors = stages.index(wide), None
    if p.gate is Gate.SCALAR:
        g = given(x.g).contiguous()
        factors = torch.empty(3, p.HV, p.B * p.T, dtype=torch.float32, device=g.device)
        launch(
            factor_kernel, at.slots * p.HV, g, chunks(at, g), factors, p.T, p.HV, p.B * p.T,
            C=COLUMNS, ROWS=wide.C, PACKED=p.cu_seqlens is not None, SPLIT=p.dtype == torch.float32, config=config("token", p),
        )  # fmt: skip
    return Blocks(wide, at, factors)


def _rows(
    of: Blocks, x: Tensor, y: Tensor, z: Tensor, g: Tensor | None, S: Tensor | None, *, reverse: bool = False, turned: bool = False,
    w: Tensor | None = None,
) -> tuple[Tensor, Met | None]:  # fmt: skip
    """[B, T, HV, Z] of x and y [B, T, heads, X] and z [B, T, heads, Z], as kernels/parallel.py names them, from the state S [N, HV, K, V]
    or its gradient; with w, of z's shape, what the gate's gradient takes from there."""
    p, at, factors = of
    (x, y), sx = alike(x, y)
    learns, ((z, w), sz) = w is not None, alike(z, z if w is None else w)
    X, Z = x.shape[3], z.shape[3]
    c = config("parallel" if S is None else "parallel_state", replace(p, K=X, V=Z))
    NZ, BX = -(-Z // c.BV), c.BK
    o = torch.empty(p.B, p.T, p.HV, Z, dtype=torch.float32 if turned and p.HV > p.H else p.dtype, device=x.device)
    met = None
    if learns:
        made = torch.empty(2, NZ, p.HV, p.B * p.T, dtype=torch.float32, device=x.device)
        met = Met(made[0], made[1] if reverse and S is not None else None, made[1] if not reverse and p.dtype == torch.float32 else None)
    own, out, unused = z, o, x
    tma = c.tma and can_describe(p, (x, sx), (y, sx), (z, sz), (w, sz))
    if tma:
        x, y = described(x, sx, p.C, BX), described(y, sx, COLUMNS, BX)
        z, own, w = described(z, sz, COLUMNS, c.BV), described(z, sz, p.C, c.BV), described(w, sz, p.C, c.BV)
        out = described(o, p.HV * Z, p.C, c.BV)
    places = [dense(t, unused) for t in (g, factors, at.chunks, at.first, p.cu_seqlens, S)]
    sums = [unused if t is None else t for t in (met or (None, None, None))]
    launch(
        parallel_kernel, at.slots * p.HV * NZ, x, y, z, own, w, *places, out, *sums,
        sx, sz, p.T, p.HV, p.N, at.slots, p.B * p.T, p.scale,
        X=X, Z=Z, ROWS=p.C, BX=BX, BZ=c.BV, GROUP=p.HV // p.H, LEARNS=learns, INITIAL=S is not None, REVERSE=reverse, TURNED=turned,
        TMA=tma, **{n: s for n, s in switches(p).items() if n != "K"} | dict(C=COLUMNS), config=c,
    )  # fmt: skip
    return o, met


def forward(p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o [B, T, HV, V] in q's dtype, the last state [N, HV, K, V] fp32 if `final`, and nothing to save."""
    if p.T == 0 or p.N == 0:
        return torch.empty_like(x.v), initial(p, S0, x.q.device) if final else None, None
    with on_device(x.q):
        o, _ = _rows(_blocks(p, x), x.q, x.k, x.v, x.g, S0)
        ST = stages.state_pass(p, x, stages.index(p), S0, final=True).ST if final else None
    return o, ST, None


def backward(
    p: Problem, x: Streams, S0: Tensor | None, saved: Tensor | None, do: Tensor, dST: Tensor | None
) -> tuple[Streams, Tensor | None]:
    """Gradients of every stream, in its dtype and shape, and of the initial state (fp32) if there is one."""
    if p.T == 0 or p.N == 0:
        zeros = Streams._make(None if t is None else torch.zeros_like(t) for t in x)
        return zeros, None if S0 is None else initial(p, dST, x.q.device)
    learns = x.g is not None and not p.fixed
    with on_device(x.q):
        of, dS0 = _blocks(p, x), None
        dq, read = _rows(of, do, x.v, x.k, x.g, S0, turned=True, w=x.q if learns else None)
        dk, written = _rows(of, x.v, do, x.q, x.g, dST, reverse=True, turned=True, w=x.k if learns else None)
        dv, _ = _rows(of, x.k, x.q, do, x.g, dST, reverse=True)
        if S0 is not None:
            dS0 = stages.state_pass(p, x, stages.index(p), dST, do=do, final=True).ST
        dg = _gate(of, given(x.g), given(read), given(written), S0, dST) if learns else None
    return Streams(summed(dq, x.q), summed(dk, x.k), dv, dg), dS0


def _gate(of: Blocks, g: Tensor, read: Met, written: Met, S0: Tensor | None, dST: Tensor | None) -> Tensor:
    """dg, in g's shape and dtype; a head's is the sum over all tokens."""
    p = of.p
    each = torch.empty(p.B, p.T, p.HV, dtype=torch.float32 if p.gate is Gate.HEAD else g.dtype, device=g.device)
    unused = read.pairs
    exact = p.dtype == torch.float32
    others = [dense(t, unused) for t in (written.ends, read.inner, g, of.factors, p.cu_seqlens, S0, dST)]
    launch(
        parallel_gate_kernel, p.N * p.HV, read.pairs, written.pairs, *others, each, p.T, p.HV, p.N, p.B * p.T,
        SIZE=p.K * p.V, PARTS=read.pairs.shape[0], BLOCK=COLUMNS if exact else SUMMED, C=COLUMNS, GATE=p.gate.value, FINAL=dST is not None,
        INITIAL=S0 is not None, PACKED=p.cu_seqlens is not None, EXACT=exact, config=config("parallel_gate", p),
    )  # fmt: skip
    return each.sum((0, 1)).to(g.dtype) if p.gate is Gate.HEAD else each
