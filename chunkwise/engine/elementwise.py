"""The elementwise scan, outside the pipeline: a memory of one number per channel.

    h_t = exp(g_t) h_{t-1} + x_t

All chunks go row by row at once, as if each began with nothing; then a loop over chunks carries the last row, and what a chunk met is
added to its rows, times the product of the forget factors since. No factor is above one. Packed sequences begin chunks of their own.
The gradient is the same scan run backwards: with l_t = dh_t + exp(g_{t+1}) l_{t+1},  dx = l,  dg_t = exp(g_t) h_{t-1} l_t.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layout import Layout
from .problem import power_of_two

CHUNK = 64  # rows: so many steps inside a chunk, T / CHUNK between

_LIBRARY = torch.library.Library("chunkwise", "FRAGMENT")
_PACKED = "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu"
_LIBRARY.define(f"elementwise(Tensor x, Tensor g, Tensor? h0, {_PACKED}) -> (Tensor h, Tensor hT)")
_LIBRARY.define(
    f"elementwise_backward(Tensor x, Tensor g, Tensor? h0, {_PACKED}, Tensor dh, Tensor dhT) -> (Tensor dx, Tensor dg, Tensor dh0)"
)
_LIBRARY.define("running_max(Tensor x, Tensor? h0, Tensor? starts) -> Tensor")


def _chunks(x: Tensor, cu: Tensor | None, cpu: Tensor | None) -> Layout:
    B, T = x.shape[:2]
    C = min(CHUNK, power_of_two(T))
    if cu is None:
        return Layout(B, T, 1, C, B, None, x.device)
    ends = (cu if cpu is None else cpu).tolist()
    return Layout(B, T, 1, C, len(ends) - 1, tuple(b - a for a, b in zip(ends, ends[1:])), x.device)


def _split(to: Layout, x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, D] -> [slots, C, D]; rows past a sequence's end are zeros."""
    return to.split(x[:, :, None], dtype)[:, 0, 0]


def _join(to: Layout, x: Tensor, dtype: torch.dtype) -> Tensor:
    return to.join(x[:, None, None], dtype)[:, :, 0]


def _inside(x: Tensor, f: Tensor, rows: range) -> tuple[Tensor, Tensor]:
    """Every row's sum over its chunk, with f [slots, C, D] the forget factors, and the factors' products so far. Takes rows in order, all
    chunks at once, and changes x."""
    F, last = f.clone(), None
    for i in rows:
        if last is not None:
            x[:, i] += f[:, i] * x[:, last]
            F[:, i] *= F[:, last]
        last = i
    return x, F


def _states(to: Layout, x: Tensor, f: Tensor, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All h [slots, C, D], the state each chunk met [slots, D], and the last state of each sequence [N, D]."""
    h, F = _inside(x, f, range(to.C))
    met, S = torch.empty_like(h[:, 0]), S.clone()
    for now, m in to.steps:
        met[now] = S[:m]
        S[:m] = h[now, -1] + F[now, -1] * S[:m]
    return h.add_(F.mul_(met[:, None])), met, S


def _start(to: Layout, x: Tensor, h0: Tensor | None, dtype: torch.dtype) -> Tensor:
    return x.new_zeros(to.N, x.shape[2], dtype=dtype) if h0 is None else to.sort(h0.to(dtype))


def _forward(x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None, cpu: Tensor | None) -> tuple[Tensor, Tensor]:
    to, dtype = _chunks(x, cu, cpu), _state_dtype(x)
    h, _, hT = _states(to, _split(to, x, dtype), _split(to, g, dtype).exp_(), _start(to, x, h0, dtype))
    return _join(to, h, x.dtype), to.unsort(hT)


def _backward(
    x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None, cpu: Tensor | None, dh: Tensor, dhT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    to, dtype = _chunks(x, cu, cpu), _state_dtype(x)
    f = _split(to, g, dtype).exp_()
    h, met, _ = _states(to, _split(to, x, dtype), f, _start(to, x, h0, dtype))
    after = torch.cat((f[:, 1:], torch.ones_like(f[:, :1])), 1)  # exp(g_{t+1}); over a chunk's end it is in what arrives
    grad, start = _split(to, dh, dtype), to.sort(dhT.to(dtype)).clone()
    inside, F = _inside(grad, after, range(to.C - 1, -1, -1))
    arrives = torch.empty_like(met)
    for now, m in reversed(to.steps):
        arrives[now] = start[:m]
        start[:m] = f[now, 0] * (inside[now, 0] + F[now, 0] * start[:m])
    dx = inside.add_(F.mul_(arrives[:, None]))
    dg = f * torch.cat((met[:, None], h[:, :-1]), 1) * dx
    return _join(to, dx, x.dtype), _join(to, dg, g.dtype), to.unsort(start)


def _state_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fake_forward(x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None, cpu: Tensor | None) -> tuple[Tensor, Tensor]:
    N = x.shape[0] if cu is None else cu.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty((N, x.shape[2]), dtype=_state_dtype(x))


def _fake_backward(
    x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None, cpu: Tensor | None, dh: Tensor, dhT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), g.new_empty(g.shape), dhT.new_empty(dhT.shape)


def _running_max(x: Tensor, h0: Tensor | None, starts: Tensor | None) -> Tensor:
    T = x.shape[1]
    place = torch.arange(T, device=x.device) - (0 if starts is None else starts)
    x, s = (x.clone() if h0 is None else torch.where((place == 0)[:, None], torch.maximum(x, h0), x)), 1
    while s < T:
        x[:, s:] = torch.where((place >= s)[s:, None], torch.maximum(x[:, s:], x[:, :-s]), x[:, s:])
        s *= 2
    return x


def _fake_running_max(x: Tensor, h0: Tensor | None, starts: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


for _name, _impl, _fake in (
    ("elementwise", _forward, _fake_forward),
    ("elementwise_backward", _backward, _fake_backward),
    ("running_max", _running_max, _fake_running_max),
):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"chunkwise::{_name}", _fake, lib=_LIBRARY)


class ElementwiseScan(torch.autograd.Function):
    """The two operators as one differentiable function."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.chunkwise.elementwise(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dhT: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: checkpointing hands it out once
        h0 = saved[2]
        dx, dg, dh0 = torch.ops.chunkwise.elementwise_backward(*saved, dh, dhT)
        return dx, dg, None if h0 is None else dh0.to(h0.dtype), None, None


def scan(
    x: Tensor, g: Tensor, h0: Tensor | None = None, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h_t = exp(g_t) h_{t-1} + x_t, entry by entry. x, g: [B, T, ...], g natural logarithms, at most 0; h0: [N, ...] or None (zeros).

    Returns all h [B, T, ...] in x's dtype, and each sequence's last [N, ...] in float32 (float64 for float64 inputs). Differentiable.
    """
    shape = x.shape[2:]
    h, hT = ElementwiseScan.apply(x.flatten(2), g.flatten(2), None if h0 is None else h0.flatten(1), cu_seqlens, cu_seqlens_cpu)
    return h.unflatten(2, shape), hT.unflatten(1, shape)


def running_max(x: Tensor, h0: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
    """Each token's maximum over its sequence so far, [B, T, ...], a constant to autograd: who only rescales by it is exact without.

    h0: [B or 1, T, ...], what each token's sequence began with; starts: [T], where it begins (None: at 0).
    """
    h0 = None if h0 is None else h0.detach().expand_as(x).flatten(2)
    return torch.ops.chunkwise.running_max(x.detach().flatten(2), h0, starts).unflatten(2, x.shape[2:])
