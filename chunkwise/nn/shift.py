"""Token shift: the token before, as RWKV's layers mix it in."""

from __future__ import annotations

import torch
from torch import Tensor

from .boundary import check_tensors
from .packing import check_offsets, sequence_index


def token_shift(
    x: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """y_t = x_{t-1} within each sequence.

    Args:
        x: [B, T, D]; with `cu_seqlens` one packed row, B = 1.
        initial_state: [N, D, 1], the token before the first; None is zeros.
        output_final_state: return the last token of each sequence (that of `initial_state` where a sequence is empty).
        cu_seqlens: [N + 1] offsets of packed sequences; empty ones are legal.

    Returns:
        y [B, T, D]; the state [N, D, 1], memory of its own, or None. Differentiable in x and initial_state.

    Raises:
        ValueError, TypeError: shapes, dtypes or offsets that do not fit, naming the argument.
    """
    check_tensors("token_shift", {"cu_seqlens": cu_seqlens}, x=x, initial_state=initial_state)
    if x.ndim != 3:
        raise ValueError(f"token_shift: x must be [B, T, D], got {list(x.shape)}")
    B, T, D = x.shape
    if cu_seqlens is not None:
        check_offsets(cu_seqlens, B, T)
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is None:
        past = x.new_zeros(N, D)
    elif initial_state.shape != (N, D, 1):
        raise ValueError(f"token_shift: initial_state must be [N, D, 1] = [{N}, {D}, 1], got {list(initial_state.shape)}")
    else:
        past = initial_state.squeeze(2).to(x.dtype)
    if cu_seqlens is None:
        rows = torch.cat([past.unsqueeze(1), x], 1)  # [B, 1 + T, D]
        return rows[:, :T], rows[:, T:].transpose(1, 2).clone(memory_format=torch.contiguous_format) if output_final_state else None
    cu = cu_seqlens.to(torch.int64)
    sequence = sequence_index(cu, T)
    first = (torch.arange(T, device=x.device) == cu[sequence])[:, None]  # [T, 1]
    y = torch.where(first, past[sequence], x[0].roll(1, 0)).unsqueeze(0)
    if not output_final_state:
        return y, None
    rows = torch.cat([past, x[0]])  # [N + T, D]
    last = torch.where(cu.diff() > 0, cu[1:] - 1 + N, torch.arange(N, device=x.device))
    return y, rows.index_select(0, last).unsqueeze(2)
