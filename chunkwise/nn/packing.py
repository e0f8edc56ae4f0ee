"""Which tokens of a batch belong together: padding, packed documents, and where each token stands in its sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from .boundary import WHOLE


@dataclass(frozen=True)
class Packing:
    """How the tokens of one call lie in memory, decided once and handed to every layer.

    A dense call keeps its shape [B, T, ...]. Padded batches and rows that hold several documents become one packed row
    [1, n, ...] with offsets `cu_seqlens`, so that padding is never computed and documents never meet.
    """

    batch: int  # B of the call
    length: int  # T of the call
    positions: Tensor  # int64: [B or 1, T] dense, [1, n] packed; a token's index in its own sequence
    cu_seqlens: Tensor | None = None  # [N + 1] int64 when packed
    index: Tensor | None = None  # [n] int64: which of the B * T tokens were kept; None keeps all
    documents: bool = False  # a row may hold several sequences: N is not B
    idle: bool = False  # the last sequence is what was not kept, at the end of the row: of it there is no state, and no result

    @property
    def sequences(self) -> int:
        """N, the number of sequences, hence of states."""
        return self.batch if self.cu_seqlens is None else self.cu_seqlens.numel() - 1 - self.idle

    @property
    def lengths(self) -> Tensor | int:
        """Tokens of each sequence: [N], or T when dense."""
        return self.length if self.cu_seqlens is None else self.cu_seqlens.diff()[: self.sequences]

    @property
    def kept(self) -> Tensor | None:
        """[n] bool: the tokens of a packed row that are real; None when all are."""
        if not self.idle or self.cu_seqlens is None:
            return None
        return torch.arange(self.positions.shape[1], device=self.positions.device) < self.cu_seqlens[-2]

    def enter(self, state: Tensor | None) -> Tensor | None:
        """A state [N, ...] as layers take it: what is idle has one too, which nobody reads."""
        return state if state is None or not self.idle else torch.cat([state, torch.zeros_like(state[:1])])

    def leave(self, state: Tensor | None) -> Tensor | None:
        """The states that layers leave, without that of what is idle."""
        return state if state is None or not self.idle else state[:-1].clone()

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, n, ...]; a dense call passes through."""
        if self.cu_seqlens is None:
            return x
        x = x.flatten(0, 1)
        return (x if self.index is None else x.index_select(0, self.index)).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """[1, n, ...] -> [B, T, ...], zero where nothing was kept; a dense call passes through."""
        if self.cu_seqlens is None:
            return x
        x, kept = x.squeeze(0), self.kept
        if kept is not None:
            x = torch.where(kept.view(-1, *[1] * (x.ndim - 1)), x, 0)
        if self.index is not None:
            x = x.new_zeros(self.batch * self.length, *x.shape[1:]).index_copy(0, self.index, x)
        return x.unflatten(0, (self.batch, self.length))


def first_rows(seq_idx: Tensor) -> Tensor:
    """[B * T] int32: the first row of the run of equal numbers that each row belongs to, rows counted through the batch."""
    row = torch.arange(seq_idx.numel(), device=seq_idx.device).view(seq_idx.shape)
    begins = torch.nn.functional.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
    return torch.where(begins, row, 0).cummax(1).values.flatten().int() if seq_idx.numel() else row.flatten().int()


def sequence_index(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[n] int64: the sequence that each of the packed tokens belongs to; empty sequences own none."""
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1  # not [1:]: inductor of torch 2.11 asks a slice for strides


def check_offsets(cu_seqlens: Tensor, batch: int, tokens: int) -> None:
    """Refuse offsets that do not describe one packed row of `tokens` tokens.

    The values are read only where that costs nothing, on the CPU, and under torch.compile there when the graph runs; shapes and dtypes
    always.

    Raises:
        ValueError: naming what is wrong; under torch.compile, of values, RuntimeError.
    """
    if batch != 1:
        raise ValueError(f"cu_seqlens describes one packed row: flatten the batch to B = 1, got B = {batch}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be [N + 1] int32 or int64, got {list(cu_seqlens.shape)} {cu_seqlens.dtype}")
    if cu_seqlens.device.type != "cpu":
        return
    fits = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == tokens) & (cu_seqlens.diff() >= 0).all()
    if torch.compiler.is_compiling():
        torch._assert_async(fits, "cu_seqlens must rise from 0 to T")
    elif not bool(fits):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {tokens}, got {cu_seqlens.tolist()}")


def plan_packing(
    batch: int,
    length: int,
    *,
    device: torch.device | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    offset: Tensor | None = None,
    keep: bool = False,
) -> Packing:
    """Decide how a call of shape [B, T] is laid out.

    Under torch.compile no value of a mask or of positions is read: padding is computed, as a sequence of its own that leaves no state, the
    number of documents is the graph's own, and rows of which it is not known that they hold one document are packed.

    Args:
        attention_mask: [B, S], S >= T, nonzero where a token is real; its last T columns are this call's. Left, right and inner padding.
        position_ids: [B, T] or [1, T]; a position that does not rise begins a new document. T = 1 never does.
        cu_seqlens: [N + 1] offsets of documents in one row; B must be 1. They win over `position_ids` and an all-ones mask.
        offset: [N] int64, tokens that each sequence saw in earlier calls.
        keep: states come or are wanted. Under torch.compile `position_ids` that begin anew are then refused, when the graph runs.

    Raises:
        ValueError: shapes that contradict B and T, offsets that are not offsets, a mask with holes beside `cu_seqlens`,
            more or fewer sequences than `offset` has; TypeError: a mask that is no tensor, others that are none of integers;
            RuntimeError: under torch.compile, what only values say.
    """
    for label, t in (("position_ids", position_ids), ("offset", offset), ("cu_seqlens", cu_seqlens)):
        if t is not None and (not isinstance(t, Tensor) or t.dtype not in WHOLE):
            raise TypeError(f"{label} must be a tensor of integers, got {t.dtype if isinstance(t, Tensor) else type(t).__name__}")
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    packing = _plan(batch, length, device, attention_mask, position_ids, cu_seqlens, offset, keep or offset is not None)
    if offset is not None and offset.shape != (packing.sequences,):
        raise ValueError(f"the state holds N = {offset.numel()} sequences, the call has {packing.sequences}")
    return packing


def _plan(
    batch: int,
    length: int,
    device: torch.device | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: Tensor | None,
    keep: bool,
) -> Packing:
    traced = torch.compiler.is_compiling()
    mask: Tensor | None = None
    if attention_mask is not None:
        if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
            raise ValueError(f"attention_mask must be [B, S] with B = {batch} and S >= T = {length}, got {list(attention_mask.shape)}")
        mask = attention_mask[:, attention_mask.shape[1] - length :].bool()
        if not traced and bool(mask.all()):
            mask = None
    if position_ids is not None:
        if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
            raise ValueError(f"position_ids must be [B, T] = [{batch}, {length}] or [1, {length}], got {list(position_ids.shape)}")
        position_ids = position_ids.to(torch.int64)

    if cu_seqlens is not None:
        check_offsets(cu_seqlens, batch, length)
        if mask is not None:
            said = "attention_mask marks padding while cu_seqlens is given: remove the padding from the packed row"
            if not traced:
                raise ValueError(said)
            torch._assert_async(mask.all(), said)
        cu_seqlens = cu_seqlens.to(torch.int64)
        positions = _within(cu_seqlens, length, offset) if position_ids is None else position_ids
        return Packing(batch, length, positions, cu_seqlens, documents=True)

    # What is kept, in its order; a compiled call, whose shapes know no value, moves the rest behind it.
    index = None if mask is None else mask.flatten().logical_not().argsort(stable=True) if traced else mask.flatten().nonzero().squeeze(1)
    n = batch * length if index is None else index.numel()
    real = None if mask is None or not traced else torch.arange(n, device=mask.device) < mask.sum()
    starts = _document_starts(batch, length, index, real, position_ids, keep)
    if mask is None and starts is None:
        if position_ids is None:
            position_ids = torch.arange(length, device=device).unsqueeze(0)
            if offset is not None and offset.shape == (batch,):
                position_ids = position_ids + offset.unsqueeze(1)
        return Packing(batch, length, position_ids)

    if starts is not None:
        begin, end = starts.nonzero().squeeze(1), starts.new_full((1,), n, dtype=torch.int64)
        cu_seqlens = torch.cat([begin, end] if real is None else [begin, real.sum()[None], end])
    else:
        lengths = cast(Tensor, mask).sum(1)
        lengths = lengths if real is None else torch.cat([lengths, n - lengths.sum()[None]])
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    packing = Packing(batch, length, cu_seqlens, cu_seqlens, index, documents=starts is not None, idle=real is not None)
    if position_ids is None:
        positions = _within(cu_seqlens, n, packing.enter(offset))
    else:
        positions = packing.pack(position_ids.expand(batch, length))
    return replace(packing, positions=positions)


def _within(cu_seqlens: Tensor, tokens: int, offset: Tensor | None) -> Tensor:
    """[1, n]: each packed token's index in its own sequence, counted from what the sequence saw before."""
    sequence = sequence_index(cu_seqlens, tokens)
    begin = cu_seqlens[:-1]
    if offset is not None and offset.shape == begin.shape:
        begin = begin - offset
    return (torch.arange(tokens, device=cu_seqlens.device) - begin[sequence]).unsqueeze(0)


def _document_starts(
    batch: int, length: int, index: Tensor | None, real: Tensor | None, position_ids: Tensor | None, keep: bool
) -> Tensor | None:
    """[n] bool over the tokens `index`, true where a document begins; None when every row is one document, so far as can be known."""
    if position_ids is None or length <= 1:
        return None
    positions = position_ids.expand(batch, length).flatten()
    row = torch.arange(batch, device=positions.device).repeat_interleave(length)
    if index is not None:
        positions, row = positions[index], row[index]
    if positions.numel() == 0:
        return None
    same_row = row[1:] == row[:-1]
    reset = same_row & (positions[1:] <= positions[:-1])
    if real is not None:
        reset = reset & real[1:]
    if torch.compiler.is_compiling():
        if keep:
            torch._assert_async(~reset.any(), "position_ids begin anew while a cache is kept: under torch.compile pass cu_seqlens")
            return None
    elif not bool(reset.any()):
        return None
    starts = torch.nn.functional.pad(reset | ~same_row, (1, 0), value=True)
    return starts if real is None else starts & real
