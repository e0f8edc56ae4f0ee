"""The elementwise scan, outside the pipeline: a memory of one number per channel.

    h_t = exp(g_t) h_{t-1} + x_t

All chunks go row by row at once, as if each began with nothing; then what they leave is scanned over chunks by doubling distances, and
what a chunk met is added to its rows, times the product of the forget factors since. No factor is above one. Packed sequences begin
chunks of their own; where they lie is worked out on the device, so that nothing is read on the host and a call can be captured in a graph.
The gradient is the same scan run backwards: with l_t = dh_t + exp(g_{t+1}) l_{t+1},  dx = l,  dg_t = exp(g_t) h_{t-1} l_t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .derivative import Tensors, gradients
from .library import carried, transformed
from .problem import compute_dtype, power_of_two

CHUNK = 64  # rows: so many steps inside a chunk

_LIBRARY = torch.library.Library("chunkwise", "FRAGMENT")
_LIBRARY.define("elementwise(Tensor x, Tensor g, Tensor? h0, Tensor? cu_seqlens) -> (Tensor h, Tensor hT)")
_LIBRARY.define(
    "elementwise_backward(Tensor x, Tensor g, Tensor? h0, Tensor? cu_seqlens, Tensor dh, Tensor dhT) -> (Tensor dx, Tensor dg, Tensor dh0)"
)
_LIBRARY.define("running_max(Tensor x, Tensor? h0, Tensor? starts) -> Tensor")


@dataclass(frozen=True)
class Grid:
    """Rows [B, T, D] in chunks [slots, C, D], sequence after sequence. Packed calls have room for T // C + N chunks."""

    B: int
    T: int
    C: int
    longest: int  # chunks that a sequence may have
    sequence: Tensor  # [slots], of each chunk
    place: Tensor  # [slots]: its number inside the sequence
    left: Tensor  # [slots]: how many follow it there
    count: Tensor  # [N]: chunks of each sequence
    begin: Tensor  # [N]: its first chunk
    rows: Tensor | None = None  # packed: [slots * C], the token of every chunk row; T: none
    at: Tensor | None = None  # packed: [T], the chunk row of every token

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, D] -> a new [slots, C, D]; rows past a sequence's end are zeros."""
        if self.rows is not None:
            out = torch.cat((x[0], x.new_zeros(1, x.shape[2]))).index_select(0, self.rows).to(dtype)
        else:
            out = x.new_zeros(self.B, self.longest * self.C, x.shape[2], dtype=dtype)
            out[:, : self.T] = x
        return out.view(-1, self.C, x.shape[2])

    def join(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[slots, C, D] -> [B, T, D]."""
        x, D = x.to(dtype), x.shape[2]
        if self.at is not None:
            return x.view(-1, D).index_select(0, self.at)[None]
        return x.view(self.B, self.longest * self.C, D)[:, : self.T].contiguous()

    def ahead(self, x: Tensor, factor: Tensor) -> None:
        """x_i += factor_i x_{i-1} over the chunks [slots, D] of every sequence, in place; the bits depend on the sequence alone."""
        self._double(x, factor, self.place, slice(1, None), slice(None, -1))

    def back(self, x: Tensor, factor: Tensor) -> None:
        """x_i += factor_i x_{i+1}, likewise."""
        self._double(x, factor, self.left, slice(None, -1), slice(1, None))

    def _double(self, x: Tensor, factor: Tensor, room: Tensor, to: slice, of: slice) -> None:
        s, grow = 1, lambda i: None if i is None else i * s
        while s < self.longest:
            here, there = slice(grow(to.start), grow(to.stop)), slice(grow(of.start), grow(of.stop))
            within = (room[here] >= s)[:, None]
            x[here] = torch.where(within, x[here] + factor[here] * x[there], x[here])
            factor[here] = torch.where(within, factor[here] * factor[there], factor[here])
            s *= 2

    def neighbour(self, x: Tensor, step: int, outside: Tensor) -> Tensor:
        """x [slots, D] of the chunk before (step = 1) or behind (-1) in the same sequence; `outside` [N, D] at the sequence's end."""
        inside = (self.place if step > 0 else self.left) > 0
        return torch.where(inside[:, None], x.roll(step, 0), outside[self.sequence])

    def edge(self, x: Tensor, last: bool, empty: Tensor) -> Tensor:
        """x [slots, D] of every sequence's first or last chunk, [N, D]; `empty` [N, D] of those without."""
        if not x.shape[0]:
            return empty.clone()
        at = (self.begin + self.count - 1 if last else self.begin).clamp(0, x.shape[0] - 1)
        return torch.where((self.count > 0)[:, None], x[at], empty)


def _grid(x: Tensor, cu: Tensor | None) -> Grid:
    B, T = x.shape[:2]
    C = min(CHUNK, power_of_two(T))
    longest = -(-T // C)
    if cu is None:
        place = torch.arange(longest, device=x.device).repeat(B)
        sequence = torch.arange(B, device=x.device)
        count = torch.full_like(sequence, longest)
        return Grid(B, T, C, longest, sequence.repeat_interleave(longest), place, longest - 1 - place, count, sequence * longest)
    cu, N = cu.long(), cu.shape[0] - 1
    count = (cu.diff() + C - 1) // C
    ends = count.cumsum(0)
    begin = ends - count
    slot = torch.arange(T // C + N if N else 0, device=x.device)
    sequence = torch.searchsorted(ends, slot, right=True)
    used, sequence = sequence < N, sequence.clamp(max=N - 1)
    place = torch.where(used, slot - begin[sequence], 0)
    left = torch.where(used, count[sequence] - 1 - place, 0)
    rows = (cu[sequence] + place * C)[:, None] + torch.arange(C, device=x.device)
    rows = torch.where(used[:, None] & (rows < cu[sequence + 1][:, None]), rows, T)
    token = torch.arange(T if N else 0, device=x.device)
    of = torch.searchsorted(cu, token, right=True) - 1
    return Grid(B, T, C, longest, sequence, place, left, count, begin, rows.flatten(), begin[of] * C + token - cu[of])


def _inside(x: Tensor, f: Tensor, rows: range) -> tuple[Tensor, Tensor]:
    """Every row's sum over its chunk, with f [slots, C, D] the forget factors, and the factors' products so far. Takes rows in order, all
    chunks at once, and changes x."""
    P, last = f.clone(), None
    for i in rows:
        if last is not None:
            x[:, i] += f[:, i] * x[:, last]
            P[:, i] *= P[:, last]
        last = i
    return x, P


def _states(to: Grid, x: Tensor, f: Tensor, h0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All h [slots, C, D], the state each chunk met [slots, D], and the last state of each sequence [N, D]."""
    h, P = _inside(x, f, range(to.C))
    total, factor = h[:, -1].clone(), P[:, -1].clone()
    total += torch.where((to.place == 0)[:, None], factor * h0[to.sequence], 0)
    to.ahead(total, factor)
    met = to.neighbour(total, 1, h0)
    return h.add_(P.mul_(met[:, None])), met, to.edge(total, True, h0)


def _initial(x: Tensor, h0: Tensor | None, cu: Tensor | None) -> Tensor:
    dtype = compute_dtype(x.dtype)
    return x.new_zeros(x.shape[0] if cu is None else cu.shape[0] - 1, x.shape[2], dtype=dtype) if h0 is None else h0.to(dtype)


def forward(x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None) -> tuple[Tensor, Tensor]:
    to, dtype = _grid(x, cu), compute_dtype(x.dtype)
    h, _, hT = _states(to, to.split(x, dtype), to.split(g, dtype).exp_(), _initial(x, h0, cu))
    return to.join(h, x.dtype), hT


def backward(x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None, dh: Tensor, dhT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    to, dtype = _grid(x, cu), compute_dtype(x.dtype)
    f, dhT = to.split(g, dtype).exp_(), dhT.to(dtype)
    h, met, _ = _states(to, to.split(x, dtype), f, _initial(x, h0, cu))
    after = torch.cat((f[:, 1:], torch.ones_like(f[:, :1])), 1)  # exp(g_{t+1}); over a chunk's end it is in what arrives
    inside, P = _inside(to.split(dh, dtype), after, range(to.C - 1, -1, -1))
    first = f[:, 0]
    total = inside[:, 0] + torch.where((to.left == 0)[:, None], P[:, 0] * dhT[to.sequence], 0)
    to.back(total, P[:, 0] * first.roll(-1, 0))
    total *= first  # what every chunk hands to the one before it
    arrives = to.neighbour(total, -1, dhT)
    dx = inside.add_(P.mul_(arrives[:, None]))
    dg = f * torch.cat((met[:, None], h[:, :-1]), 1) * dx
    return to.join(dx, x.dtype), to.join(dg, g.dtype), to.edge(total, False, dhT)


def _fake_forward(x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None) -> tuple[Tensor, Tensor]:
    N = x.shape[0] if cu is None else cu.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty((N, x.shape[2]), dtype=compute_dtype(x.dtype))


def _fake_backward(x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None, dh: Tensor, dhT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    ("elementwise", forward, _fake_forward),
    ("elementwise_backward", backward, _fake_backward),
    ("running_max", _running_max, _fake_running_max),
):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"chunkwise::{_name}", _fake, lib=_LIBRARY)


class ElementwiseScan(torch.autograd.Function):
    """The two operators as one differentiable function."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.chunkwise.elementwise(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dhT: Tensor) -> tuple[Any, ...]:
        *x, cu = ctx.saved_tensors  # once: checkpointing hands it out once
        return *gradients(_found, _formula, ctx.needs_input_grad[:3], x, (dh, dhT), (cu,)), None


def _found(x: Tensors, dy: Tensors, beside: Tensors) -> tuple[Tensor | None, ...]:
    dx, dg, dh0 = torch.ops.chunkwise.elementwise_backward(*x, *beside, *dy)
    return dx, dg, None if x[2] is None else dh0.to(x[2].dtype)


def _formula(x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None) -> tuple[Tensor, Tensor]:
    """`forward` with nothing in place: sums over twice as many tokens, again and again."""
    (B, T, _), h0, s = x.shape, _initial(x, h0, cu), 1
    token = torch.arange(T, device=x.device)
    n = 0 * token if cu is None else torch.searchsorted(cu.long(), token, right=True) - 1  # a token's sequence
    first = token == 0 if cu is None else token == cu.long()[n]
    h, f = x.to(h0.dtype), g.to(h0.dtype).exp()
    h = torch.where(first[:, None], h + f * (h0[:, None] if cu is None else h0[n]), h)
    f = torch.where(first[:, None], 0, f)
    while s < T:
        h = h + f * F.pad(h, (0, 0, s, 0))[:, :T]
        f, s = f * F.pad(f, (0, 0, s, 0))[:, :T], 2 * s
    ends = torch.full((B,), T, device=x.device) if cu is None else cu.long()[1:]
    last = h[torch.arange(B, device=x.device) if cu is None else 0, (ends - 1).clamp(min=0)] if T else h0
    empty = ends == (0 if cu is None else cu.long()[:-1])
    return h.to(x.dtype), torch.where(empty[:, None], h0, last)


def scan(x: Tensor, g: Tensor, h0: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h_t = exp(g_t) h_{t-1} + x_t, entry by entry. x, g: [B, T, ...], g natural logarithms, at most 0; h0: [N, ...] or None (zeros).

    Returns all h [B, T, ...] in x's dtype, and each sequence's last [N, ...] in float32 (float64 for float64 inputs). Differentiable.
    """
    shape = x.shape[2:]
    # torch 2.13 cannot trace an autograd.Function of which nothing needs a gradient
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, g, h0))
    run = _formula if carried(x, g, h0) else ElementwiseScan.apply if grad or transformed() else torch.ops.chunkwise.elementwise
    h, hT = run(x.flatten(2), g.flatten(2), None if h0 is None else h0.flatten(1), cu_seqlens)
    return h.unflatten(2, shape), hT.unflatten(1, shape)


def running_max(x: Tensor, h0: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
    """Each token's maximum over its sequence so far, [B, T, ...], a constant to autograd: who only rescales by it is exact without.

    h0: [B or 1, T, ...], what each token's sequence began with; starts: [T], where it begins (None: at 0).
    """
    h0 = None if h0 is None else h0.detach().expand_as(x).flatten(2)
    return torch.ops.chunkwise.running_max(x.detach().flatten(2), h0, starts).unflatten(2, x.shape[2:])
