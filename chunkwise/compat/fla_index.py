"""Index arithmetic of packed sequences under fla's names, and the padding helpers that came with flash-attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..nn.packing import sequence_index


def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """[N]: tokens of each sequence."""
    return cu_seqlens.diff()


def prepare_lens_from_mask(mask: Tensor) -> Tensor:
    """[B] int32: tokens of each row that count."""
    return mask.sum(-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """[N + 1]: offsets."""
    return F.pad(lens.cumsum(0, dtype=dtype), (1, 0))


def prepare_cu_seqlens_from_mask(mask: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def prepare_sequence_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """[T]: the sequence of each token. Where cu_seqlens_cpu is given nothing is synchronised."""
    tokens = int((cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)[-1])
    return sequence_index(cu_seqlens, tokens).to(cu_seqlens.dtype)


def prepare_position_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """[T]: the place of each token in its sequence."""
    sequence = prepare_sequence_ids(cu_seqlens, cu_seqlens_cpu)
    return torch.arange(sequence.numel(), device=cu_seqlens.device, dtype=cu_seqlens.dtype) - cu_seqlens[sequence.long()]


def prepare_token_indices(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """[T, 2]: sequence and place."""
    return torch.stack([prepare_sequence_ids(cu_seqlens, cu_seqlens_cpu), prepare_position_ids(cu_seqlens, cu_seqlens_cpu)], 1)


def _chunks(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    return (cu_seqlens.diff() + (chunk_size - 1)).div(chunk_size, rounding_mode="floor")


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """[N + 1]: each sequence's first chunk."""
    return F.pad(_chunks(cu_seqlens, chunk_size), (1, 0)).cumsum(-1)


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """[NC, 2]: sequence, and chunk within it, of every chunk."""
    host = None if cu_seqlens_cpu is None else prepare_chunk_offsets(cu_seqlens_cpu, chunk_size)
    return prepare_token_indices(prepare_chunk_offsets(cu_seqlens, chunk_size), host).to(cu_seqlens.dtype)


def get_max_num_splits(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> int:
    """Chunks of the longest sequence."""
    return int(_chunks(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu, chunk_size).max())


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """(indices [n] of the tokens that count in the flattened batch, offsets [B + 1] int32, the longest row)."""
    lens = prepare_lens_from_mask(attention_mask)
    return attention_mask.flatten().nonzero().flatten(), prepare_cu_seqlens_from_lens(lens), int(lens.max())


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """x [M, ...] -> [n, ...]."""
    return x.index_select(0, indices)


def index_put_first_axis(x: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """x [n, ...] -> [first_axis_dim, ...], zero elsewhere."""
    return x.new_zeros(first_axis_dim, *x.shape[1:]).index_copy(0, indices, x)


def pad_input(hidden_states: Tensor, indices: Tensor, batch_size: int, seq_len: int) -> Tensor:
    """[n, ...] -> [batch_size, seq_len, ...], zero where nothing counts."""
    return index_put_first_axis(hidden_states, indices, batch_size * seq_len).unflatten(0, (batch_size, seq_len))


def unpad_input(
    q: Tensor | tuple[Tensor, ...], states: tuple[Tensor, ...], attention_mask: Tensor, q_len: int, keepdim: bool = False
) -> tuple[Tensor | tuple[Tensor, ...], tuple[Tensor, ...], Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
    """Take the tokens that count: q [B, q_len, ...], states [B, S, ...], mask [B, S]; q_len is S, or 1.

    Returns (q, states, indices of q, offsets of both, longest of both). Raises ValueError for another q_len.
    """
    indices, cu, longest = get_unpad_data(attention_mask)
    B, S = states[0].shape[:2]
    queries = (q,) if isinstance(q, Tensor) else q
    taken = tuple(index_first_axis(s.flatten(0, 1), indices) for s in states)
    if q_len == S:
        of_q = (indices, cu, longest)
        queries = tuple(index_first_axis(t.flatten(0, 1), indices) for t in queries)
    elif q_len == 1:
        each = torch.arange(B + 1, dtype=torch.int32, device=queries[0].device)
        of_q = (each[:-1], each, 1)
        queries = tuple(t.squeeze(1) for t in queries)
    else:
        raise ValueError(f"unpad_input: q_len must be {S}, as long as the states, or 1, got {q_len}")
    if keepdim:
        queries, taken = tuple(t.unsqueeze(0) for t in queries), tuple(t.unsqueeze(0) for t in taken)
    return (queries[0] if isinstance(q, Tensor) else queries), taken, of_q[0], (of_q[1], cu), (of_q[2], longest)
