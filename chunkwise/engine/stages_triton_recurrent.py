"""The recurrence token by token on a GPU: one launch, whatever the gate, the rule, the memory and the place the states are in."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import NamedTuple

from torch import Tensor
from triton import knobs

from ..kernels.recurrent import recurrent_kernel
from ..kernels.slot import slot_kernel
from ..spec import NOTHING, Gate, Raw, Streams
from .launch import launch
from .problem import Problem
from .stages_triton import dense, rows
from .tune import card, config, padded

TINY = 2.0**-126  # is added to a column where nothing else is: keys past the last have seen nothing, and 0 log 0 would be no number


class States(NamedTuple):
    """Where states are: [N, HV, K, V], or with v_first [N, HV, V, K]; lines are dense, their strides the same in both. `slots`: a pool."""

    first: Tensor | None  # before the first token; None: zeros
    last: Tensor | None  # after the last one, or `into` says; None: nobody wants it
    v_first: bool = False
    slots: Tensor | None = None  # [N] slot of each sequence, or with `accepted` [N, columns]; negative: it is skipped and its output is 0
    into: Tensor | None = None  # [N, columns] the slot for the state after each token; negative: not kept
    accepted: Tensor | None = None  # [N]: the first state is in column accepted - 1 of `slots`; below 1: skipped
    parents: Tensor | None = None  # [N, columns]: the token whose state each token goes on from; -1: the first state

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return next((t.element_size() for t in self[:2] if t is not None), 4)

    @property
    def odd(self) -> bool:
        """Whether lines cannot be read 16 bytes at a time."""
        return any(t is not None and t.stride(2) * t.element_size() % 16 for t in self[:2])

    @property
    def columns(self) -> int:
        return next((t.shape[1] for t in (self.into, self.slots) if t is not None and t.ndim > 1), 1)


def recurrent(p: Problem, x: Streams, s: States, raw: Raw = NOTHING) -> Tensor:
    """o [B, T, HV, V] in q's dtype; the states are written where `s` says."""
    if raw.memory == "slots":
        return slots(p, x, s)
    states = [t for t in s[:2] if t is not None]
    odd = s.odd if states else p.V % 4 != 0  # as the last state's would be, if anybody wanted it: outputs have the same bits
    c = config("recurrent_v_first" if s.v_first else "recurrent_odd" if odd else "recurrent_half" if s.size == 2 else "recurrent", p)
    erase, many = x.e if x.a is None else x.a, x.v.shape[1] // p.T if p.T else 1
    one = p.T == many == 1 and p.cu_seqlens is None
    if raw != NOTHING or not one:
        c = replace(c, registers=None)  # what it prepares, or goes on from, needs some more and would be spilled
    unused = o = x.q.new_empty(p.B, p.T, p.HV, p.V)
    (q, sq), (k, sk), (v, sv) = rows(x.q), rows(x.k), rows(x.v)
    (g, sg), (beta, sbeta), (a, sa), (b, sb), (writes, swrites), (g_seen, sg_seen), (beta_seen, sbeta_seen) = (
        _rows(t, unused) for t in (x.g, x.beta, erase, x.b, raw.writes, raw.g_seen, raw.beta_seen)
    )
    first, last = (unused if t is None else t for t in s[:2])
    head, line = (states[0].stride(1), states[0].stride(2)) if states else (0, 0)
    blocks = -(-p.V // c.BV)
    launch(
        recurrent_kernel, p.N * p.HV * (1 if raw.memory else blocks),
        q, k, v, g, beta, a, b, *(dense(t, unused) for t in (x.u, raw.A_log if raw.rate is None else raw.rate, raw.dt_bias)),
        writes, dense(raw.skip, unused), g_seen, beta_seen, dense(raw.centre, unused),
        first, last, *(dense(t, unused) for t in (p.cu_seqlens, s.slots, s.into, s.accepted, s.parents)), o,
        sq, sk, sv, sg, sbeta, sa, sb, swrites, sg_seen, sbeta_seen, first.stride(0), last.stride(0), p.T, p.HV, s.columns,
        p.scale, 0.0 if raw.lower_bound is None else raw.lower_bound, raw.strength, raw.middle, log(raw.most), max(raw.eps, TINY),
        K=p.K, V=p.V, KB=c.BK, NK=-(-p.K // c.BK), BV=c.BV, GROUP=p.HV // p.H, GROUP_A=1 if erase is None else p.HV // erase.shape[2],
        GROUP_B=1 if x.b is None else p.HV // x.b.shape[2], GROUP_G=1 if p.gate is not Gate.KEY or x.g is None else p.HV // x.g.shape[2],
        LINE=line, HEAD=head, GATE=p.gate.value, RULE=p.rule.value, ERASE=erase is not None, BEFORE=x.a is not None, BONUS=p.bonus,
        USE_BETA=x.beta is not None, PACKED=p.cu_seqlens is not None, V_FIRST=s.v_first, INITIAL=s.first is not None,
        FINAL=s.last is not None and s.into is None, INDEXED=s.slots is not None, EACH=s.into is not None,
        ACCEPTED=s.accepted is not None, TREE=s.parents is not None, NORM=raw.norm, NORM_A=raw.norm_erase,
        RAW=raw.activation, BIAS=raw.dt_bias is not None,
        SIGMOID=raw.sigmoid, TIME=raw.rate is not None, SOFTPLUS=raw.softplus, SKIP=raw.skip is not None, KEYS=raw.keys,
        ERASES=raw.erases, WRITES=raw.writes is not None, ROWS=many, COLUMN=raw.memory, CENTRE=raw.centre is not None,
        ONE=one, MEET=s.odd or p.V % (16 // s.size) != 0 or o.element_size() > s.size,
        PTX=not s.v_first and card().arch.startswith("sm_") and not knobs.runtime.interpret,
        config=replace(c, fuse=False),  # the kernel says what is
    )  # fmt: skip
    return o


def _rows(x: Tensor | None, unused: Tensor) -> tuple[Tensor, int]:
    """`rows` of [B, T, heads] or [B, T, heads, D], and of what has none: absent streams, a gate per head."""
    if x is None or x.ndim == 1:
        return dense(x, unused), 0
    return rows(x if x.ndim == 4 else x[..., None])


def slots(p: Problem, x: Streams, s: States) -> Tensor:
    """The same where a state is a memory of slots, [N, HV, M, K + V], or without gates of one number more: x.beta is what slots take."""
    pool, given = s.last, x.beta
    if pool is None or given is None or s.first is not pool:
        raise ValueError("chunkwise engine: slots are updated in place, by their strengths")
    M, o = given.shape[3], x.q.new_empty(p.B, p.T, p.HV, p.V)
    c = config("slot_odd" if s.odd else "slot", replace(p, V=M))
    (q, sq), (k, sk), (v, sv), (t, st), (g, sg) = rows(x.q), rows(x.k), rows(x.v), rows(given), _rows(x.g, o)
    spare = o if s.into is None else pool.new_empty(p.N if s.parents is None else 2 * p.N, *pool.shape[1:])
    launch(
        slot_kernel, p.N * p.HV,
        q, k, v, t, g, pool, spare, *(dense(t, o) for t in (p.cu_seqlens, s.slots, s.into, s.accepted, s.parents)), o,
        sq, sk, sv, st, sg, pool.stride(0), p.T, p.HV, s.columns, p.scale,
        M=M, K=p.K, V=p.V, BM=padded(M), BD=c.BK, GROUP=p.HV // p.H, LINE=pool.stride(2),
        HEAD=pool.shape[2] * pool.shape[3],  # of a single head any stride is dense
        RUNNING=x.g is None, PACKED=p.cu_seqlens is not None, TURNED=s.v_first, INDEXED=s.slots is not None, EACH=s.into is not None,
        ACCEPTED=s.accepted is not None, TREE=s.parents is not None,
        config=replace(c, fuse=False),
    )  # fmt: skip
    return o
