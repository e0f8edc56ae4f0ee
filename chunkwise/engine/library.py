"""The library's two torch operators, chunkwise::forward and chunkwise::backward, with shapes for tracing, and the function that joins them.

One boundary per call: whatever plan runs inside, torch.compile sees one node. Absent tensors come back as empty ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..spec import Gate, Rule, Streams
from .plan import PLANS
from .problem import Problem, compute_dtype, partition, problem

STREAM_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? a, Tensor? b, Tensor? e, Tensor? u"
_INPUTS = f"{STREAM_INPUTS}, Tensor? S0"
_SWITCHES = "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, str gate, str rule, str plan, int chunk, float scale, str precision"
_LIBRARY = torch.library.Library("chunkwise", "DEF")
_LIBRARY.define(f"forward({_INPUTS}, {_SWITCHES}, bool final, bool save) -> (Tensor o, Tensor ST, Tensor saved)")
_LIBRARY.define(
    f"backward({_INPUTS}, {_SWITCHES}, Tensor saved, Tensor do, Tensor? dST) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor da, Tensor db, Tensor de, Tensor du, Tensor dS0)"
)
STREAMS = len(Streams._fields)


def resolve(
    streams: tuple[Any, ...],
    cu: Tensor | None,
    cu_cpu: Tensor | None,
    gate: str,
    rule: str,
    plan: str,
    chunk: int,
    scale: float,
    precision: str,
) -> tuple[Any, Problem, Streams]:
    """The plan, the problem and the streams that an operator's arguments stand for."""
    x = Streams(*streams)
    p = problem(x, cu, cu_cpu, gate=Gate(gate), rule=Rule(rule), chunk=chunk, scale=scale, precision=precision)
    ways = PLANS[plan]()
    if hasattr(ways, "chunk"):
        p = replace(p, C=ways.chunk(p.dtype, chunk))
    return ways, p, x


def _present(t: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if t is None else t


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *streams, S0 = args[: STREAMS + 1]
    *switches, final, save = args[STREAMS + 1 :]
    plan, p, x = resolve(tuple(streams), *switches)
    with torch.autocast(x.q.device.type, enabled=False):
        o, ST, saved = plan.forward(p, x, S0, final=final, save=save)
    return o, _present(ST, o), _present(saved, o)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    *streams, S0 = args[: STREAMS + 1]
    *switches, saved, do, dST = args[STREAMS + 1 :]
    plan, p, x = resolve(tuple(streams), *switches)
    with torch.autocast(x.q.device.type, enabled=False):
        d, dS0 = plan.backward(p, x, S0, saved if saved.numel() else None, do, dST)
    dS0 = None if S0 is None or dS0 is None else dS0.to(S0.dtype)
    return tuple(_present(t, do) for t in (*d, dS0))


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Streams(*args[:STREAMS])
    *switches, final, save = args[STREAMS + 1 :]
    B, T, _, K = x.q.shape
    HV, V = x.v.shape[2:]
    N = B if switches[0] is None else switches[0].shape[0] - 1
    o = x.q.new_empty(B, T, HV, V)
    state = compute_dtype(x.q.dtype)
    ST = x.q.new_empty((N, HV, K, V) if final else (0,), dtype=state if final else o.dtype)
    plan, chunk = switches[4], switches[5]
    saved: tuple[int, ...] = (0,)
    if save and plan == "triton":
        n = PLANS[plan]().kept(switches[2], switches[3])
        return o, ST, x.q.new_empty((n, B, T, HV, PLANS[plan]().chunk(x.q.dtype, chunk)) if n else (0,))
    if save and plan == "chunk":
        saved = (partition(N, T, HV, max(K, V), chunk)[1], N, HV, K, V)
    return o, ST, x.q.new_empty(saved, dtype=state if saved != (0,) else o.dtype)


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    do = args[-2]
    shape = [do.new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in args[: STREAMS + 1]]
    return tuple(shape)


for _name, _impl, _fake in (("forward", _forward, _fake_forward), ("backward", _backward, _fake_backward)):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"chunkwise::{_name}", _fake, lib=_LIBRARY)


class Recurrence(torch.autograd.Function):
    """The two operators as one differentiable function; its arguments are those of chunkwise::forward."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.chunkwise.forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        cu, cu_cpu, *ctx.switches, ctx.final, _ = inputs[STREAMS + 1 :]
        ctx.save_for_backward(*inputs[: STREAMS + 1], cu, cu_cpu, output[2])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dST: Tensor, _: Tensor) -> tuple[Any, ...]:
        *inputs, saved = ctx.saved_tensors
        d = torch.ops.chunkwise.backward(*inputs, *ctx.switches, saved, do, dST if ctx.final else None)
        wanted = zip(d, inputs, ctx.needs_input_grad)
        return (*(t if x is not None and need else None for t, x, need in wanted), *[None] * (len(ctx.switches) + 4))
