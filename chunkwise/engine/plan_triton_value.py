"""Gates per value channel (additive) on a GPU, by duality with gates per key.

With do the output's gradient, the loss <do, o> is linear in each of do, q, k and v, and the same number is the loss <q, o'> of gates per
key with do, v, k in the places of q, k, v, and the state transposed:

    sum_i do_i' S_i' q_i,   S_t = S_{t-1} diag(e^g) + k v'   <=>   sum_i q_i' R_i' do_i,   R = S',   R_t = diag(e^g) R_{t-1} + v k'

So dq is that pass's output, and dk, dv, dg its gradients of values, keys and gates: no kernel but the output's own is needed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.value import value_output_kernel
from ..spec import Gate, Streams
from . import stages_triton as stages
from .launch import launch
from .plan_triton import chunk
from .problem import Problem, given
from .stages_triton_grad import grads
from .stages_triton_score import reach, scores, sets
from .tune import config


def _turn(S: Tensor | None) -> Tensor | None:
    return None if S is None else S.mT


def _chunked(p: Problem) -> Problem:
    """Values are the dual's keys, whose channels decide how long a chunk is."""
    return replace(p, C=chunk(p.dtype, max(p.K, p.V), p.C))


def _dual(p: Problem, x: Streams, do: Tensor) -> tuple[Problem, Streams, Tensor]:
    """The problem of gates per key, its streams, and its output's gradient."""
    q, k = (t if p.H == p.HV else t.repeat_interleave(p.HV // p.H, 2) for t in (x.q, x.k))
    return replace(p, gate=Gate.KEY, H=p.HV, K=p.V, V=p.K), Streams(do, x.v, k, g=x.g), q


def forward(p: Problem, x: Streams, S0: Tensor | None, final: bool) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] and the last state [N, HV, K, V] if `final`."""
    p = _chunked(p)
    d, y, _ = _dual(p, x, x.v)
    at = stages.index(d)
    unread = torch.empty(1, p.B, p.T, p.HV, p.C, dtype=p.dtype, device=x.q.device)
    _, decayed = scores(d, y, at, unread)  # no output is made of this pass, so no scores are read
    made = stages.state_pass(d, y, at, _turn(S0), decayed=decayed, final=final, store=1)
    (q, k), sk = stages.alike(x.q, x.k)
    v, sv = stages.rows(x.v)
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=v.device)
    c = config("value_output", p)
    on = {n: s for n, s in stages.switches(p).items() if n in ("K", "C", "PACKED", "IP")}
    launch(
        value_output_kernel, at.slots * p.HV * -(-p.V // c.BV),
        q, k, v, stages.dense(x.g, v), stages.chunks(at, v), sets(p, v.device), given(made.S), o, sk, sv, p.T, p.HV, p.scale,
        V=p.V, BK=c.BK, BV=c.BV, GROUP=p.HV // p.H, LIMIT=reach(p) or 0.0, IPG=stages.exact(3), **on, config=c,
    )  # fmt: skip
    return o, _turn(made.ST)


def backward(p: Problem, x: Streams, S0: Tensor | None, do: Tensor, dST: Tensor | None) -> tuple[Streams, Tensor | None]:
    """Gradients of every stream, and of the initial state (fp32) if there is one."""
    p = _chunked(p)
    d, y, q = _dual(p, x, do)
    at = stages.index(d)
    S0, dST = _turn(S0), _turn(dST)
    _, decayed = scores(d, y, at, scores(d, y, at)[0])
    there = stages.state_pass(d, y, at, S0, decayed=decayed, output=True, store=1)
    back = stages.state_pass(d, y, at, dST, decayed=decayed, do=q, store=1, output=True, final=S0 is not None, carried=there.carried)
    made = grads(d, y, at, q, S=given(there.S), dS=given(back.S), U=back.o, decayed=decayed)
    dq, dk = (t if p.H == p.HV else t.unflatten(2, (p.H, -1)).sum(3) for t in (given(there.o), made.v))
    return Streams(dq, dk, made.k, g=made.g), _turn(back.ST)
