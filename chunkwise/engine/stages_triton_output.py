"""Stage `output` on a GPU: chunks side by side, from states that a scan has stored (kernels/output.py)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.output import output_kernel
from ..spec import Streams
from . import stages_triton as stages
from .launch import launch
from .problem import Problem, given
from .stages_triton import Index, alike, chunks, dense, rows, switches
from .stages_triton_grad import summed
from .tune import config


def output(
    p: Problem, at: Index, x: Tensor, y: Tensor, z: Tensor, g: Tensor | None, S: Tensor, *, reverse: bool, turned: bool, rest: float = 1.0
) -> Tensor:  # fmt: skip
    """[B, T, HV, Z] of x and y [B, T, heads, X], z [B, T, heads, Z] and the states or their gradients, as kernels/output.py names them.

    turned: x and y have p.HV heads and V columns, z p.H and K; else p.H and K, p.HV and V.
    rest: what states' gradients lack, and p's scale: see `stages_triton.binary`.
    """
    (x, y), sx = alike(x, y)
    z, sz = rows(z)
    X, Z = x.shape[3], z.shape[3]
    c = config("output", replace(p, K=X, V=Z))
    o = torch.empty(p.B, p.T, p.HV, Z, dtype=torch.float32 if turned and p.HV > p.H else p.dtype, device=x.device)
    on = {n: s for n, s in switches(p).items() if n != "K"}
    launch(
        output_kernel, at.slots * p.HV * -(-Z // c.BV), x, y, z, dense(g, x), chunks(at, x), S, o, sx, sz, p.T, p.HV, p.scale, rest,
        X=X, Z=Z, BX=c.BK, BZ=c.BV, GROUP=p.HV // p.H, REVERSE=reverse, TURNED=turned, **on, config=c,
    )  # fmt: skip
    return o


def forward(p: Problem, x: Streams, S0: Tensor | None, *, final: bool, room: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """o and the last state: the states that every 64 tokens meet, then the rows."""
    thin, wide = replace(p, C=stages.SCANNED), replace(p, C=64)
    at = stages.index(wide)
    made = stages.state_pass(thin, x, at, S0, final=final, store=wide.C // thin.C, room=room)
    return output(wide, at, x.q, x.k, x.v, x.g, given(made.S), reverse=False, turned=False), made.ST


def grads(p: Problem, x: Streams, at: Index, do: Tensor, *, S: Tensor, dS: Tensor, rest: float) -> Streams:
    """Gradients where no gate learns: of q, k and v. rest: of `output`."""
    dq = output(p, at, do, x.v, x.k, x.g, S, reverse=False, turned=True, rest=rest)
    dk = output(p, at, x.v, do, x.q, x.g, dS, reverse=True, turned=True, rest=rest)
    return Streams(summed(dq, x.q), summed(dk, x.k), values(p, x, at, do, dS, rest=rest))


def values(p: Problem, x: Streams, at: Index, do: Tensor, dS: Tensor, *, rest: float) -> Tensor:
    """dv. rest: of `output`."""
    return output(p, at, x.k, x.q, do, x.g, dS, reverse=True, turned=False, rest=rest)
