"""The functions of the package causal_conv1d: depthwise causal convolutions on [B, D, T]."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.activation import activation as activation_named
from ..nn.conv import causal_conv1d
from ..nn.norm import wide


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
    if x.ndim != 3:
        raise ValueError(f"causal_conv1d_fn: x must be [B, D, T], got {list(x.shape)}")
    if seq_idx is not None and seq_idx.shape != (x.shape[0], x.shape[2]):
        raise ValueError(f"causal_conv1d_fn: seq_idx must be [B, T] = {[x.shape[0], x.shape[2]]}, got {list(seq_idx.shape)}")
    rows = x.transpose(1, 2)
    if seq_idx is not None and cu_seq_lens_q is None:
        if initial_states is not None or return_final_states:
            raise ValueError("causal_conv1d_fn: seq_idx separates documents inside a row: no initial_states, no return_final_states")
        return _documents(rows, weight, bias, seq_idx, activation).transpose(1, 2)
    y, state = causal_conv1d(rows, weight, bias, initial_states, return_final_states, activation, cu_seq_lens_q)
    if state is None:
        return y.transpose(1, 2)
    if final_states_out is not None:
        state = final_states_out.copy_(state)
    return y.transpose(1, 2), state


def _documents(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor, activation: str | None) -> Tensor:
    """x [B, T, D]; a tap counts where it meets the token's own document. Shapes do not depend on the documents: nothing is synchronised."""
    T, W = x.shape[1], weight.shape[1]
    z, taps = wide(x), wide(weight).t()
    y = z.new_zeros(z.shape)
    for back in range(min(W - 1, T - 1), -1, -1):
        past = z[:, : T - back] * taps[W - 1 - back].to(z.dtype)
        same = (seq_idx[:, back:] == seq_idx[:, : T - back])[..., None]
        y = y + torch.nn.functional.pad(torch.where(same, past, 0), (0, 0, back, 0))
    y = y if bias is None else y + bias.to(y.dtype)
    return activation_named(activation)(y).to(x.dtype)


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

    conv_state_indices: [B], the rows of conv_state that these are. Raises ValueError naming the argument that does not fit.
    """
    if cache_seqlens is not None:
        raise ValueError("causal_conv1d_update: cache_seqlens: conv_state must hold the last inputs in order, not as a ring")
    if x.ndim not in (2, 3):
        raise ValueError(f"causal_conv1d_update: x must be [B, D] or [B, D, T], got {list(x.shape)}")
    L, W = conv_state.shape[-1], weight.shape[1]
    if L < W - 1:
        raise ValueError(f"causal_conv1d_update: conv_state must be [B, D, L] with L >= W - 1 = {W - 1}, got {list(conv_state.shape)}")
    new = x[..., None] if x.ndim == 2 else x
    state = conv_state if conv_state_indices is None else conv_state.index_select(0, conv_state_indices)
    rows = torch.cat([state.to(x.dtype), new], -1)  # [B, D, L + T]
    y, _ = causal_conv1d(new.transpose(1, 2), weight, bias, rows[:, :, L - (W - 1) : L], activation=activation)
    moved = rows[:, :, rows.shape[-1] - L :].to(conv_state.dtype)
    conv_state.copy_(moved) if conv_state_indices is None else conv_state.index_copy_(0, conv_state_indices.long(), moved)
    y = y.transpose(1, 2)
    return y[..., 0] if x.ndim == 2 else y
