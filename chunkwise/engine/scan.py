"""One public call as its member sees it: what the caller asked for, and passes of the engine to answer it with.

A member that is one pass over its `lower` never meets this class. One that is not declares `passes(scan, S0, **inputs, **settings)`,
which runs `scan(streams, S0, ...)` as often as it needs and returns (o, the last state or None). S0 is the member's whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..spec import Gate, Op, Output, Rule, Streams
from . import elementwise
from .dispatch import Cell, Choice
from .library import Pass, recurrence
from .problem import given
from .raw import Prepared


@dataclass(eq=False, slots=True)  # torch 2.11's compiler asks for the hash of a half-made one; frozen ones cost every call 2 us
class Scan:
    """The options of one call."""

    op: Op
    choose: Callable[..., Choice]  # dispatch.choose, or who listens to it
    form: str
    backend: str
    chunk_size: int
    precision: str
    inverse: str
    scale: float | None
    final: bool  # the caller wants the last state
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    slots: Sequence[int] | None = None  # the state is a pool: see engine/recurrent.py
    passes: list[Pass | Prepared] | None = None  # who wants to know what was decided

    def __call__(
        self, x: Streams, S0: Tensor | None, *, gate: Gate | None = None, rule: Rule | None = None, scale: float | None = None,
        precision: str | None = None, tokens: int = 1,
    ) -> Output:  # fmt: skip
        """One pass of the engine: o [B, T, HV, V] and the last state [N, HV, K, V], or None unless `final`.

        tokens: rows of the streams per token of the caller. gate, rule, scale, precision: where they are not the member's or the caller's.
        """
        scale = self.scaled(x) if scale is None else scale
        cu, cpu = self.cu_seqlens, self.cu_seqlens_cpu
        if tokens > 1:
            cu, cpu = (None if t is None else t * tokens for t in (cu, cpu))
        grad = torch.is_grad_enabled() and (S0 is not None and S0.requires_grad or any(t.requires_grad for t in x if t is not None))
        cell = self.cell(x, gate, rule)
        c = self.choose(
            self.op, cell, T=x.q.shape[1], device=x.q.device.type, grad=grad, packed=cu is not None, form=self.form, backend=self.backend
        )
        return recurrence(
            x, S0, cu, cpu, gate=cell.gate, rule=cell.rule, plan=c.plan, chunk=c.chunk, scale=scale, precision=precision or self.precision,
            inverse=self.inverse, final=self.final, grad=grad, slots=self.slots, passes=self.passes,
        )  # fmt: skip

    def scaled(self, x: Streams) -> float:
        """What multiplies q."""
        scale = self.op.scale if self.scale is None else float(self.scale)
        return x.q.shape[-1] ** -0.5 if scale is None else scale

    def cell(self, x: Streams, gate: Gate | None = None, rule: Rule | None = None) -> Cell:
        """What decides whether there are kernels for a pass over these streams."""
        gate, rule = Gate.NONE if x.g is None else gate or self.op.gate, rule or self.op.rule
        before = rule is Rule.DELTA and x.a is not None
        return Cell(gate, rule, x.q.dtype, x.q.shape[-1], self.chunk_size, x.u is not None, x.e is not None, before, x.v.shape[-1])

    def elementwise(self, x: Tensor, g: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        """h_t = exp(g_t) h_{t-1} + x_t in every entry of x [B, T, ...]; h0: [N, ...]. Returns all h, and the last of each sequence."""
        return elementwise.scan(x, g, h0, self.cu_seqlens)

    def starts(self, T: int) -> Tensor | None:
        """Packed: the token at which each token's sequence begins, [T]. Dense (all begin at 0): None. Nothing is read on the host."""
        return None if self.cu_seqlens is None else self.cu_seqlens.long()[self.sequence(T)]

    def sequence(self, T: int) -> Tensor:
        """Packed: the number of each token's sequence, [T]."""
        cu = given(self.cu_seqlens).long()
        return torch.searchsorted(cu, torch.arange(T, device=cu.device), right=True) - 1

    def spread(self, z: Tensor | None, T: int) -> Tensor | None:
        """What belongs to sequences [N, ...] to their tokens: [B, 1, ...], packed [1, T, ...]."""
        return None if z is None else z[:, None] if self.cu_seqlens is None else z[self.sequence(T)][None]

    def shift(self, x: Tensor, first: Tensor) -> Tensor:
        """Of every token its predecessor's x [B, T, ...], of a sequence's first token `first`, broadcast."""
        starts = self.starts(x.shape[1])
        place = torch.arange(x.shape[1], device=x.device) - (0 if starts is None else starts)
        return torch.where((place == 0).view(-1, *[1] * (x.ndim - 2)), first, x.roll(1, 1))

    def last(self, x: Tensor, none: Tensor) -> Tensor:
        """Of every sequence its last token's x, [N, ...]; of an empty one `none` [N, ...]."""
        if x.shape[1] == 0:
            return none
        if self.cu_seqlens is None:
            return x[:, -1]
        ends = self.cu_seqlens.long()
        some = (ends[1:] > ends[:-1]).view(-1, *[1] * (x.ndim - 2))
        return torch.where(some, x[0, (ends[1:] - 1).clamp(min=0)], none)
