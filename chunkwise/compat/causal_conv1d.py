"""The functions of the package causal_conv1d: depthwise causal convolutions on [B, D, T]."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn import conv


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y[:, :, t] = act(bias + sum_j weight[:, j] x[:, :, t - (W - 1) + j]).

    x: [B, D, T], any strides; weight: [D, W]; bias: [D]; seq_idx: [B, T] int32, the number of the document that a token belongs to: nothing
    is read from another one; cu_seq_lens_q: [N + 1], the same as offsets (B = 1), as transformers' collator hands them over, and faster;
    initial_states: [B, D, W - 1], the inputs before; final_states_out: where the last W - 1 inputs are written.
    Returns y [B, D, T] in x's dtype, with return_final_states also the states [B, D, W - 1]. Differentiable.
    Raises ValueError naming the argument that does not fit.
    """
    if cu_seq_lens_q is not None:
        seq_idx = None
    y, state = conv.causal_conv1d(
        x, weight, bias, initial_states, return_final_states, activation, cu_seq_lens_q, seq_idx=seq_idx, channels_first=True
    )
    if state is None:
        return y
    return y, state if final_states_out is None else final_states_out.copy_(state)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """The next token, or tokens: x [B, D] or [B, D, T] -> y of the same shape; conv_state [B, D, L], L >= W - 1, moves on in place.

    conv_state_indices: [B], the rows of conv_state that these are. Without gradients. Raises ValueError naming the argument that does not
    fit.
    """
    if cache_seqlens is not None:
        raise ValueError("causal_conv1d_update: cache_seqlens: conv_state must hold the last inputs in order, not as a ring")
    tokens = x.transpose(1, 2) if x.ndim == 3 else x
    with torch.no_grad():
        y = conv.causal_conv1d_update(tokens, conv_state, weight, bias, activation, conv_state_indices)
    return y.transpose(1, 2) if x.ndim == 3 else y
