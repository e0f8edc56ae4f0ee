"""Short depthwise causal convolution: dense, packed, with the last W - 1 inputs of each sequence as its state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .activation import activation as activation_named
from .norm import wide
from .packing import check_offsets, sequence_index


class _Taps(torch.autograd.Function):
    """y[:, t] = sum_j x[:, t + j] * w[j]; x [B, T + W - 1, D], w [W, D]. Keeps x alone for the backward pass."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        T = x.shape[1] - w.shape[0] + 1
        y = x[:, :T] * w[0]
        for j in range(1, w.shape[0]):
            y = torch.addcmul(y, x[:, j : j + T], w[j])
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (dy,) = grads
        x, w = ctx.saved_tensors
        T = dy.shape[1]
        dx = torch.zeros_like(x)
        for j in range(w.shape[0]):
            dx[:, j : j + T].addcmul_(dy, w[j])
        dw = torch.stack([(dy * x[:, j : j + T]).sum((0, 1)) for j in range(w.shape[0])])
        return dx, dw


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y_t = act(bias + sum_j weight[:, j] x_{t - (W - 1) + j}), each channel on its own, nothing read from another sequence.

    Args:
        x: [B, T, D]; with `cu_seqlens` one packed row, B = 1.
        weight: [D, W], W >= 1; the last column meets the current token.
        bias: [D] or None.
        initial_state: [N, D, W - 1], the inputs that came before, oldest first; None is zeros. N = B when dense.
        output_final_state: return the last W - 1 inputs of each sequence (with those of `initial_state` where a sequence is shorter).
        activation: None, "silu", ...
        cu_seqlens: [N + 1] int32 or int64 offsets of packed sequences; empty ones are legal.

    Returns:
        y [B, T, D] in x's dtype, computed in float32 for half types; the state [N, D, W - 1] in x's dtype, memory of its own, or None.
        Differentiable in x, weight, bias and initial_state. Dense, packed and step by step add the same products in the same order.

    Raises:
        ValueError: shapes or offsets that do not fit, naming the argument.
    """
    if x.ndim != 3:
        raise ValueError(f"causal_conv1d: x must be [B, T, D], got {list(x.shape)}")
    B, T, D = x.shape
    if weight.ndim != 2 or weight.shape[0] != D or weight.shape[1] < 1:
        raise ValueError(f"causal_conv1d: weight must be [D, W] with D = {D} and W >= 1, got {list(weight.shape)}")
    if bias is not None and bias.shape != (D,):
        raise ValueError(f"causal_conv1d: bias must be [D] = [{D}], got {list(bias.shape)}")
    if cu_seqlens is not None:
        check_offsets(cu_seqlens, B, T)
    W, N = weight.shape[1], B if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is None:
        past = x.new_zeros(N, W - 1, D)
    elif initial_state.shape != (N, D, W - 1):
        raise ValueError(f"causal_conv1d: initial_state must be [N, D, W - 1] = [{N}, {D}, {W - 1}], got {list(initial_state.shape)}")
    else:
        past = initial_state.transpose(1, 2).to(x.dtype)

    taps = wide(weight).t().contiguous()  # [W, D]
    if cu_seqlens is None:
        rows = torch.cat([past, x], 1)  # [B, W - 1 + T, D]
        y = _Taps.apply(wide(rows), taps.to(wide(x).dtype))
        last = rows[:, T:]  # [B, W - 1, D]
    else:
        # Every sequence gets its own W - 1 rows of past in front, so that one convolution over all rows serves them all;
        # the outputs that straddle two sequences are dropped.
        cu = cu_seqlens.to(torch.int64)
        token = torch.arange(T, device=x.device)
        row = token + sequence_index(cu, T) * (W - 1)  # [T], the first row that token t reads
        column = torch.arange(W - 1, device=x.device)
        begin = cu + torch.arange(N + 1, device=x.device) * (W - 1)  # [N + 1], a sequence's first row
        order = torch.empty(T + N * (W - 1), dtype=torch.int64, device=x.device)
        order[(begin[:-1, None] + column).flatten()] = torch.arange(N * (W - 1), device=x.device)
        order[row + (W - 1)] = token + N * (W - 1)
        rows = torch.cat([past.reshape(N * (W - 1), D), x[0]]).index_select(0, order)  # [T + N (W - 1), D]
        if T == 0:
            y = wide(x)
        else:
            y = _Taps.apply(wide(rows).unsqueeze(0), taps.to(wide(x).dtype)).index_select(1, row)
        last = rows.index_select(0, (begin[1:, None] - (W - 1) + column).flatten()).view(N, W - 1, D)
    if bias is not None:
        y = y + bias.to(y.dtype)
    y = activation_named(activation)(y).to(x.dtype)
    return y, last.transpose(1, 2).clone(memory_format=torch.contiguous_format) if output_final_state else None


class ShortConvolution(nn.Module):
    """`causal_conv1d` with its parameters: weight [D, 1, W] (the key and shape that checkpoints use), bias [D] on request.

    Raises:
        ValueError: kernel_size < 1, or an unknown activation.
    """

    def __init__(
        self, hidden_size: int, kernel_size: int = 4, bias: bool = False, activation: str | None = "silu", *, device=None, dtype=None
    ):
        super().__init__()
        if kernel_size < 1:
            raise ValueError(f"ShortConvolution: kernel_size must be at least 1, got {kernel_size}")
        activation_named(activation)
        self.hidden_size, self.kernel_size, self.activation = hidden_size, kernel_size, activation
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @property
    def bound(self) -> float:
        """Weights and biases begin uniform in [-bound, bound], so that outputs begin with the scale of the inputs."""
        return 1 / math.sqrt(self.kernel_size)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -self.bound, self.bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -self.bound, self.bound)

    def forward(
        self, x: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, D] -> (y [B, T, D], state [N, D, W - 1] or None); see `causal_conv1d`. Keeps nothing between calls."""
        return causal_conv1d(x, self.weight.squeeze(1), self.bias, initial_state, output_final_state, self.activation, cu_seqlens)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One token: x [B, D] -> y [B, D]; `state` [B, D, W - 1] moves on by one column, in place."""
        y, moved = self.forward(x.unsqueeze(1), state, output_final_state=True)
        if moved is not None:
            state.copy_(moved)
        return y.squeeze(1)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, kernel_size={self.kernel_size}, bias={self.bias is not None}, activation={self.activation!r}"
