"""The taps of a causal convolution by PyTorch's operators, a block of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..engine.derivative import Tensors, gradients
from ..engine.library import carried, transformed
from ..engine.memory import room


class _Taps(torch.autograd.Function):
    """y_t = act(bias + sum_j w[j] x_{t - (W - 1) + j}), act silu or nothing; x [B, T, D] after past [B, W - 1, D], w [W, D], bias [D].

    A block of tokens at a time goes through all of it while caches hold it; x, past, w and bias alone are kept for the backward pass.
    """

    @staticmethod
    def forward(x: Tensor, past: Tensor, w: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        y = room(*x.shape, dtype=x.dtype, device=x.device)
        for n, a, b in _stretches(x):
            into = y[n, a:b] if _in_place(x) else None
            z = _taps(_window(x[n], past[n], a, b), w, bias, into)
            z = nn.functional.silu(z, inplace=into is not None) if silu else z
            if into is None:
                y[n, a:b] = z
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.silu = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        silu = ctx.silu
        find = lambda x, dy, _: _taps_backward(silu, *x, *dy)
        plain = lambda x, past, w, bias: (_formula(x, past, w, bias, silu),)
        return *gradients(find, plain, ctx.needs_input_grad[:4], ctx.saved_tensors, grads), None


def _taps_backward(silu: bool, x: Tensor, past: Tensor, w: Tensor, bias: Tensor | None, dy: Tensor) -> Tensors:
    (B, T, D), W = x.shape, w.shape[0]
    d = room(B, W - 1 + T, D, dtype=x.dtype, device=x.device)  # of past and x
    d[:, : W - 1] = 0
    dw, db = [torch.zeros_like(row) for row in w], None if bias is None else torch.zeros_like(bias)
    for n, a, b in _stretches(x):
        rows, dz = _window(x[n], past[n], a, b), dy[n, a:b]
        z, product = x.new_empty(2, *dz.shape) if _in_place(x) else (None, None)
        if silu:
            place = {} if z is None else {"grad_input": z}
            dz = torch.ops.aten.silu_backward(dz, _taps(rows, w, bias, z), **place)
        into = d[n, a + W - 1 : b + W - 1]  # where no block before has been: written, not added to
        if z is None:
            into.copy_(dz * w[-1])
        else:
            torch.mul(dz, w[-1], out=into)
        for j in range(W):
            if j < W - 1:
                d[n, a + j : b + j].addcmul_(dz, w[j])
            dw[j] += torch.mul(dz, rows[:, j : j + b - a], out=product).sum((0, 1))
        if db is not None:
            db += dz.sum((0, 1))
    return d[:, W - 1 :], d[:, : W - 1], torch.stack(dw), db


def _formula(x: Tensor, past: Tensor, w: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """The same at once, with nothing in place."""
    z = _taps(torch.cat([past, x], 1), w, bias)
    return nn.functional.silu(z) if silu else z


def taps_of(*args: Any) -> Tensor:
    """Without gradients past autograd, which costs as much as a token's convolution."""
    return (_formula if transformed() or carried(*args[:4]) else _Taps.apply if torch.is_grad_enabled() else _Taps.forward)(*args)


STRETCH = 1 << 18  # numbers that a block of tokens has, about


def _stretches(x: Tensor) -> list[tuple[slice, int, int]]:
    """Samples, first and last token of every block. Blocks of long samples hold one each, and tokens by 16, for whole vectors of lanes."""
    B, T, D = x.shape
    if torch.compiler.is_compiling():
        return [(slice(None), 0, T)]
    n = max(16, STRETCH // max(1, D) // 16 * 16)
    group = max(1, STRETCH // max(1, T * D))
    return [(slice(i, i + group), a, min(T, a + n)) for i in range(0, B, group) for a in range(0, T, n)]


def _in_place(x: Tensor) -> bool:
    """Whether blocks are made where their results lie: not while a graph is made of what is done, and not across x's order in memory."""
    return not torch.compiler.is_compiling() and x.stride(-1) == 1


def _window(x: Tensor, past: Tensor, a: int, b: int) -> Tensor:
    """The tokens that outputs a to b read, [B, W - 1 + b - a, D]."""
    before = past.shape[1]
    return x[:, a - before : b] if a >= before else torch.cat([past[:, a:], x[:, :b]], 1)


def _taps(rows: Tensor, w: Tensor, bias: Tensor | None, into: Tensor | None = None) -> Tensor:
    """bias + sum_j w[j] rows_{t + j}, in `into` where that is given."""
    T = rows.shape[1] - w.shape[0] + 1
    y = torch.mul(rows[:, :T], w[0], out=into)
    for j in range(1, w.shape[0]):
        y = torch.addcmul(y, rows[:, j : j + T], w[j], out=into)
    return y if bias is None else torch.add(y, bias, out=into)
