"""The short convolution: forward, backward, states, and new tokens on states in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...engine.config import card
from ...kernels.conv import conv_kernel, conv_state_grad_kernel, conv_state_kernel, conv_update_kernel, place_kernel
from .row import rows, start

BLOCK, WARPS = 512, 4  # channels of a program: 8 bytes a load in 16 bits
AHEAD, BACK = 8, 8  # rows loaded at a time
PARTS, LEAST = 3, 64  # parts that outputs and their gradients may lie in, and channels of the smallest block then
ROWS = 256  # of a program that finds sequences
FEWER = 128  # registers of a thread of a backward pass on an H200, of whose programs four then run side by side
PIECE, PIECE_BACK = 64, 256  # rows of a program, which reads the W - 1 before (and, for gradients, after) them too


class Place(NamedTuple):
    """Which sequence each row belongs to. Dense: T rows each. Packed: tables of each row's sequence's first row and number."""

    N: int
    T: int
    first: Tensor | None = None  # [R] int32
    sequence: Tensor | None = None  # [R] int32
    offsets: Tensor | None = None  # [N + 1]

    def tables(self, none: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What kernels are given of them; `none` stands for one there is not."""
        return tuple(none if t is None else t for t in (self.first, self.sequence, self.offsets))  # type: ignore[return-value]


def place(x: Tensor, offsets: Tensor | None, first: Tensor | None) -> Place:
    """Tables are made on the device: nothing waits for it."""
    B, T, _ = x.shape
    if first is not None:
        return Place(B, T, first.contiguous())
    if offsets is None:
        return Place(B, max(T, 1))
    R, N, offsets = B * T, offsets.shape[0] - 1, offsets.contiguous()
    first, sequence = (torch.empty(R, dtype=torch.int32, device=x.device) for _ in range(2))
    if R:
        start(place_kernel, -(-R // ROWS), offsets, first, sequence, R, N, N.bit_length(), BLOCK=ROWS, warps=4)
    return Place(N, T, first, sequence, offsets)


def _pieces(R: int, D: int, BD: int, U: int, L: int) -> int:
    """Rows of a program: fewer than L where there would be too few programs for the multiprocessors."""
    while L > 2 * U and -(-R // L) * -(-D // BD) < 528:
        L //= 2
    return L


def _block(D: int) -> tuple[int, int]:
    BD = min(BLOCK, max(32, 1 << (D - 1).bit_length()))
    return BD, max(1, BD * WARPS // BLOCK)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, state: Tensor | None, offsets: Tensor | None,
    first: Tensor | None, silu: bool, final: bool, sizes: Sequence[int],
) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """(y, in parts [B, T, channels] of these sizes, final state [N, D, W - 1] or None)."""
    at, (a, sx), (r, sr) = place(x, offsets, first), rows(x), rows(x if residual is None else residual)
    R, D = x.shape[0] * x.shape[1], x.shape[2]
    W = weight.shape[1]
    weight, past = weight.contiguous(), x if state is None else state.contiguous()
    BD, warps, fit = _common(*_block(D), sizes, state)
    made, packed = [x.new_empty(*x.shape[:2], n) for n in (sizes if fit else (D,))], at.first is not None
    y, y1, y2 = made + made[-1:] * (PARTS - len(made))
    if R * D:
        L = _pieces(R, D, BD, AHEAD, PIECE)
        start(
            conv_kernel, (-(-R // L), -(-D // BD)),
            a, weight, x if bias is None else bias, r, y, y1, y2, past, a, *at.tables(a), a, sx, sr, y.shape[2], y1.shape[2], y2.shape[2],
            sizes[0], sum(sizes[:2]), R, at.T, D, L, W=W, U=AHEAD, BD=BD, PACKED=packed, ALIGNED=not packed and at.T % AHEAD == 0,
            STATE=state is not None, LAST=False, BIAS=bias is not None, RESIDUAL=residual is not None, SILU=silu, PARTS=len(made) > 1,
            GRAD=False, warps=warps,
        )  # fmt: skip
    last = torch.empty(at.N, D, W - 1, dtype=x.dtype, device=x.device) if final else None
    if last is not None and last.numel():
        T = x.shape[1]
        conv_state_kernel[(at.N, -(-D // BD))](
            a, past, at.tables(a)[2], last, sx, T, D, W=W, BD=BD, PACKED=offsets is not None,
            STATE=state is not None, num_warps=warps,
        )  # fmt: skip
    return made if fit else [t.contiguous() for t in y.split(list(sizes), 2)], last


def _common(BD: int, warps: int, sizes: Sequence[int], state: Tensor | None) -> tuple[int, int, bool]:
    """Blocks of channels of which each lies in one of the parts, their warps, and whether there are such: beside a state, which takes
    registers too, of one part alone; on AMD's cards too, where Triton 3.6.0 builds no stores to a tensor that was chosen."""
    if len(sizes) == 1:
        return BD, warps, True
    part = min(BD, *(n & -n for n in sizes))
    fit = len(sizes) <= PARTS and part >= min(BD, LEAST) and state is None and not card().arch.startswith("gfx")
    return (part, max(1, warps * part // BD), True) if fit else (BD, warps, False)


def backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, offsets: Tensor | None, first: Tensor | None,
    dy: Sequence[Tensor], dlast: Tensor | None, silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dx, dweight, dbias, dstate), the last two None where there is none. dy: one, or that of so many channels each."""
    R, D = x.shape[0] * x.shape[1], x.shape[2]
    W, few = weight.shape[1], int(bias is not None)
    (BD, warps), U = _block(D), BACK
    if state is not None or dlast is not None:  # they take registers too
        BD, U = max(32, BD // 2), BACK // 2
    BD, warps, fit = _common(BD, warps, [t.shape[2] for t in dy], state)
    dy = dy if fit else (torch.cat(tuple(dy), 2),)
    at, (a, sx), ups = place(x, offsets, first), rows(x), [rows(t) for t in dy]
    (u, sy), (u1, s1), (u2, s2) = ups + ups[-1:] * (PARTS - len(ups))
    e1, e2 = dy[0].shape[2], sum(t.shape[2] for t in dy[:2])
    flat, past = weight.contiguous(), x if state is None else state.contiguous()
    last = x if dlast is None else dlast.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    L = _pieces(R, D, BD, U, PIECE_BACK)
    parts = torch.empty(-(-R // L), W + few, D, dtype=torch.float32, device=x.device)
    if dx.numel():
        start(
            conv_kernel, (-(-R // L), -(-D // BD)),
            a, flat, x if bias is None else bias, dx, u, u1, u2, past, last, *at.tables(a), parts, sx, D, sy, s1, s2, e1, e2, R, at.T, D, L,
            W=W, U=U, BD=BD, PACKED=at.first is not None, ALIGNED=at.first is None and at.T % U == 0, STATE=state is not None,
            LAST=dlast is not None, BIAS=bias is not None, RESIDUAL=False, SILU=silu, PARTS=len(dy) > 1, GRAD=True, warps=warps,
            registers=FEWER if x.element_size() == 2 and W <= 4 and U == BACK and card().arch == "sm_90" else None,
        )  # fmt: skip
    sums = parts.sum(0)  # [W + BIAS, D]
    dw, db = sums[:W].t().to(weight.dtype).contiguous(), None
    if bias is not None:
        db = sums[W].to(bias.dtype, copy=True)  # aligned
    dstate = None if state is None else torch.empty(state.shape, dtype=state.dtype, device=x.device)
    if dstate is not None and dstate.numel():
        conv_state_grad_kernel[(at.N, -(-D // BD))](
            a, flat, x if bias is None else bias, u, past, last, at.tables(a)[2], dstate, sx, sy, x.shape[1], D, W=W, BD=BD,
            PACKED=offsets is not None, LAST=dlast is not None, BIAS=bias is not None, SILU=silu, num_warps=warps,
        )  # fmt: skip
    return dx, dw, db, dstate


def update(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor | None, silu: bool) -> Tensor:
    """New tokens x [B, T, D] on state [slots, D, S], in place."""
    x = x if x.stride(2) == 1 else x.contiguous()
    B, T, D = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    BD, S, W = min(256, max(32, 1 << (D - 1).bit_length())), state.shape[2], weight.shape[1]
    whole = state.stride()[1:] == (S, 1) and not (S & (S - 1) or W & (W - 1)) and D * max(S, W) < 2**31
    if y.numel():
        start(
            conv_update_kernel, (B, -(-D // BD)),
            x, state, weight.contiguous(), x if bias is None else bias, x if index is None else index.contiguous(), y, x.stride(0),
            x.stride(1), *state.stride(), T, D, S=S, W=W, BD=BD, WHOLE=whole, INDEX=index is not None, BIAS=bias is not None, SILU=silu,
            warps=max(1, BD // 128),
        )  # fmt: skip
        torch.autograd.graph.increment_version(state)
    return y
