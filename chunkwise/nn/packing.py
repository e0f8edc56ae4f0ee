"""Which tokens of a batch belong together: padding, packed documents, and where each token stands in its sequence."""

from __future__ import annotations

from dataclasses import dataclass
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

    @property
    def sequences(self) -> int:
        """N, the number of sequences, hence of states."""
        return self.batch if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> Tensor | int:
        """Tokens of each sequence: [N], or T when dense."""
        return self.length if self.cu_seqlens is None else self.cu_seqlens.diff()

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
        x = x.squeeze(0)
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
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)


def check_offsets(cu_seqlens: Tensor, batch: int, tokens: int) -> None:
    """Refuse offsets that do not describe one packed row of `tokens` tokens.

    The values are read only where that costs nothing (on the CPU, outside torch.compile); shapes and dtypes always.

    Raises:
        ValueError: naming what is wrong.
    """
    if batch != 1:
        raise ValueError(f"cu_seqlens describes one packed row: flatten the batch to B = 1, got B = {batch}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be [N + 1] int32 or int64, got {list(cu_seqlens.shape)} {cu_seqlens.dtype}")
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != tokens or bool((cu_seqlens.diff() < 0).any()):
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
) -> Packing:
    """Decide how a call of shape [B, T] is laid out.

    Args:
        attention_mask: [B, S], S >= T, nonzero where a token is real; its last T columns are this call's. Left, right and inner padding.
        position_ids: [B, T] or [1, T]; a position that does not rise begins a new document. T = 1 never does.
        cu_seqlens: [N + 1] offsets of documents in one row; B must be 1. They win over `position_ids` and an all-ones mask.
        offset: [N] int64, tokens that each sequence saw in earlier calls.

    Raises:
        ValueError: shapes that contradict B and T, offsets that are not offsets, a mask with holes beside `cu_seqlens`,
            more or fewer sequences than `offset` has; TypeError: position_ids or an offset that are no integers.
    """
    for label, t in (("position_ids", position_ids), ("offset", offset)):
        if t is not None and (not isinstance(t, Tensor) or t.dtype not in WHOLE):
            raise TypeError(f"{label} must be a tensor of integers, got {t.dtype if isinstance(t, Tensor) else type(t).__name__}")
    packing = _plan(batch, length, device, attention_mask, position_ids, cu_seqlens, offset)
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
) -> Packing:
    mask: Tensor | None = None
    if attention_mask is not None:
        if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
            raise ValueError(f"attention_mask must be [B, S] with B = {batch} and S >= T = {length}, got {list(attention_mask.shape)}")
        mask = attention_mask[:, attention_mask.shape[1] - length :].bool()
        if bool(mask.all()):
            mask = None
    if position_ids is not None:
        if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
            raise ValueError(f"position_ids must be [B, T] = [{batch}, {length}] or [1, {length}], got {list(position_ids.shape)}")
        position_ids = position_ids.to(torch.int64)

    if cu_seqlens is not None:
        check_offsets(cu_seqlens, batch, length)
        if mask is not None:
            raise ValueError("attention_mask marks padding while cu_seqlens is given: remove the padding from the packed row")
        cu_seqlens = cu_seqlens.to(torch.int64)
        positions = _within(cu_seqlens, length, offset) if position_ids is None else position_ids
        return Packing(batch, length, positions, cu_seqlens, documents=True)

    starts = _document_starts(batch, length, mask, position_ids)
    if mask is None and starts is None:
        if position_ids is None:
            position_ids = torch.arange(length, device=device).unsqueeze(0)
            if offset is not None and offset.shape == (batch,):
                position_ids = position_ids + offset.unsqueeze(1)
        return Packing(batch, length, position_ids)

    index = None if mask is None else mask.flatten().nonzero().squeeze(1)
    kept = batch * length if index is None else index.numel()
    if starts is not None:
        cu_seqlens = torch.cat([starts.nonzero().squeeze(1), starts.new_full((1,), kept, dtype=torch.int64)])
    else:
        cu_seqlens = torch.nn.functional.pad(cast(Tensor, mask).sum(1).cumsum(0), (1, 0))
    packing = Packing(batch, length, cu_seqlens, cu_seqlens, index, documents=starts is not None)
    if position_ids is None:
        positions = _within(cu_seqlens, kept, offset)
    else:
        positions = packing.pack(position_ids.expand(batch, length))
    return Packing(batch, length, positions, cu_seqlens, index, documents=starts is not None)


def _within(cu_seqlens: Tensor, tokens: int, offset: Tensor | None) -> Tensor:
    """[1, n]: each packed token's index in its own sequence, counted from what the sequence saw before."""
    sequence = sequence_index(cu_seqlens, tokens)
    begin = cu_seqlens[:-1]
    if offset is not None and offset.shape == begin.shape:
        begin = begin - offset
    return (torch.arange(tokens, device=cu_seqlens.device) - begin[sequence]).unsqueeze(0)


def _document_starts(batch: int, length: int, mask: Tensor | None, position_ids: Tensor | None) -> Tensor | None:
    """[n] bool over the kept tokens, true where a document begins; None when every row is one document."""
    if position_ids is None or length <= 1:
        return None
    positions = position_ids.expand(batch, length).flatten()
    row = torch.arange(batch, device=positions.device).repeat_interleave(length)
    if mask is not None:
        positions, row = positions[mask.flatten()], row[mask.flatten()]
    if positions.numel() == 0:
        return None
    same_row = row[1:] == row[:-1]
    reset = same_row & (positions[1:] <= positions[:-1])
    if not bool(reset.any()):
        return None
    return torch.nn.functional.pad(reset | ~same_row, (1, 0), value=True)
