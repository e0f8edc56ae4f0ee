"""Gates and write strengths from what projections say; on a GPU one kernel each way, elsewhere PyTorch's operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine import prologue
from ..engine.derivative import gradients
from .boundary import define, differentiable, present, uses_kernels


def _forward(*args: Any) -> Tensor:
    from .launch.gate import forward

    return forward(*args)


def _backward(*args: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    from .launch.gate import backward

    return backward(*args)


def _fake_backward(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), *(present(None if t is None else t.new_empty(t.shape), x) for t in (A_log, dt_bias))


_gate_op = define(
    "gate(Tensor x, Tensor? A_log, Tensor? dt_bias, str kind, float bound) -> Tensor",
    _forward,
    lambda x, *_: x.new_empty(x.shape, dtype=torch.float32),
)
_gate_backward_op = define(
    "gate_backward(Tensor x, Tensor? A_log, Tensor? dt_bias, Tensor dy, str kind, float bound) -> (Tensor dx, Tensor dA, Tensor dbias)",
    _backward,
    _fake_backward,
)


class _Gate(torch.autograd.Function):
    """The kernels as one differentiable function of x, A_log and dt_bias; it keeps those alone."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _gate_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.kind, ctx.bound = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        how = ctx.kind, ctx.bound
        find = lambda x, dy, _: _gate_backward_op(*x, *dy, *how)
        plain = lambda x, A_log, dt_bias: (_plain(x, A_log, dt_bias, *how),)
        return *gradients(find, plain, ctx.needs_input_grad[:3], ctx.saved_tensors, grads), None, None


_gate_function = differentiable(_Gate)


def _plain(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, kind: str, bound: float) -> Tensor:
    """By PyTorch's operators."""
    if A_log is None:
        return prologue.activate_strength(x, bound)
    return prologue.activate_gate(x, A_log, dt_bias, bound if kind == "bounded" else None)


def log_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float | None = None) -> Tensor:
    """The natural log of a forget factor, float32 (float64 of float64), from a raw gate g [B, T, HV] or [B, T, HV, K].

    -exp(A_log) softplus(g + dt_bias), or with `lower_bound` (negative): lower_bound sigmoid(exp(A_log) (g + dt_bias)).
    A_log: HV numbers; dt_bias: as many as g has channels a token, or None.
    """
    if not uses_kernels(g):
        return prologue.activate_gate(g, A_log, dt_bias, lower_bound)
    bias = None if dt_bias is None else dt_bias.contiguous()
    return _gate_function(g, A_log.contiguous(), bias, "softplus" if lower_bound is None else "bounded", float(lower_bound or 0.0))


def write_strength(beta: Tensor, factor: float = 1.0) -> Tensor:
    """factor sigmoid(beta) of a raw write strength, float32 (float64 of float64)."""
    if not uses_kernels(beta) or beta.ndim < 3:
        return prologue.activate_strength(beta, factor)
    return _gate_function(beta, None, None, "sigmoid", factor)
