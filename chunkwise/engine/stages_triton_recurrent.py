"""The recurrence token by token on a GPU: one launch, whatever the gate, the rule and the place the states are in."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor
from triton import knobs

from ..kernels.recurrent import recurrent_kernel
from ..spec import Gate, Streams
from .launch import launch
from .problem import Problem
from .raw import NOTHING, Raw
from .stages_triton import dense, rows
from .tune import card, config


class States(NamedTuple):
    """Where states are: [N, HV, K, V], or with v_first [N, HV, V, K]; lines are dense, their strides the same in both. `slots`: a pool."""

    first: Tensor | None  # before the first token; None: zeros
    last: Tensor | None  # after the last one, or `into` says; None: nobody wants it
    v_first: bool = False
    slots: Tensor | None = None  # [N] slot of each sequence, or with `accepted` [N, columns]; negative: it is skipped and its output is 0
    into: Tensor | None = None  # [N, columns] the slot for the state after each token; negative: not kept
    accepted: Tensor | None = None  # [N]: the first state is in column accepted - 1 of `slots`; below 1: skipped
    parents: Tensor | None = None  # [N, columns]: the token whose state each token goes on from; -1: the first state


def recurrent(p: Problem, x: Streams, s: States, raw: Raw = NOTHING) -> Tensor:
    """o [B, T, HV, V] in q's dtype; the states are written where `s` says."""
    states = [t for t in s[:2] if t is not None]
    size = states[0].element_size() if states else 4
    c = config("recurrent_v_first" if s.v_first else "recurrent_half" if size == 2 else "recurrent", p)
    if raw.norm or raw.norm_erase or raw.A_log is not None:
        c = replace(c, registers=None)  # what it prepares needs some more, and would be spilled
    erase = x.e if x.a is None else x.a
    (q, sq), (k, sk), (v, sv) = rows(x.q), rows(x.k), rows(x.v)
    unused = o = q.new_empty(p.B, p.T, p.HV, p.V)
    streams = p.gate in (Gate.KEY, Gate.VALUE)
    g, sg = (dense(x.g, unused), 0) if x.g is None or p.gate is Gate.HEAD else rows(x.g if streams else x.g[..., None])
    beta, sbeta = (unused, 0) if x.beta is None else rows(x.beta[..., None])
    a, sa = (unused, 0) if erase is None else rows(erase)
    b, sb = (unused, 0) if x.b is None else rows(x.b)
    first, last = (unused if t is None else t for t in s[:2])
    head, line = (states[0].stride(1), states[0].stride(2)) if states else (0, 0)
    columns = next((t.shape[1] for t in (s.into, s.slots) if t is not None and t.ndim > 1), 1)
    launch(
        recurrent_kernel, p.N * p.HV * -(-p.V // c.BV),
        q, k, v, g, beta, a, b, dense(x.u, unused), dense(raw.A_log, unused), dense(raw.dt_bias, unused),
        first, last, *(dense(t, unused) for t in (p.cu_seqlens, s.slots, s.into, s.accepted, s.parents)), o,
        sq, sk, sv, sg, sbeta, sa, sb, first.stride(0), last.stride(0), p.T, p.HV, columns,
        p.scale, 0.0 if raw.lower_bound is None else raw.lower_bound, raw.strength,
        K=p.K, V=p.V, KB=c.BK, NK=-(-p.K // c.BK), BV=c.BV, GROUP=p.HV // p.H, GROUP_A=1 if erase is None else p.HV // erase.shape[2],
        GROUP_B=1 if x.b is None else p.HV // x.b.shape[2], LINE=line, HEAD=head, GATE=p.gate.value, RULE=p.rule.value,
        ERASE=erase is not None, BEFORE=x.a is not None, BONUS=p.bonus, USE_BETA=x.beta is not None, PACKED=p.cu_seqlens is not None,
        V_FIRST=s.v_first, INITIAL=s.first is not None, FINAL=s.last is not None and s.into is None, INDEXED=s.slots is not None,
        EACH=s.into is not None, ACCEPTED=s.accepted is not None, TREE=s.parents is not None, NORM=raw.norm, NORM_A=raw.norm_erase,
        RAW="" if raw.A_log is None else "softplus" if raw.lower_bound is None else "bounded", BIAS=raw.dt_bias is not None,
        SIGMOID=raw.sigmoid, ONE=p.T == 1 and p.cu_seqlens is None,
        PTX=not s.v_first and card().arch.startswith("sm_") and not knobs.runtime.interpret,
        config=replace(c, fuse=False),  # the kernel says what is
    )  # fmt: skip
    return o
