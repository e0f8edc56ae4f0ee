"""Short depthwise causal convolution: dense, packed, with the last W - 1 inputs of each sequence as its state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.derivative import Tensors, gradients
from ..engine.pool import check_apart
from .activation import activation as activation_named
from .boundary import check_tensors, define, differentiable, present, uses_kernels
from .norm import wide
from .packing import check_offsets, first_rows, sequence_index
from .tap import taps_of

SILU = ("silu", "swish")  # the activation that kernels apply themselves
WIDEST = 8  # columns of a weight that a kernel holds in registers


def _forward(*args: Any) -> tuple[list[Tensor], Tensor | None]:
    from .launch.conv import forward

    return forward(*args)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    from .launch.conv import backward

    return backward(*args)


def _fake_forward(x: Tensor, weight: Tensor, _bias: Any, _residual: Any, _state: Any, offsets: Tensor | None, *switches: Any) -> Any:
    (*_, final, sizes), N = switches, x.shape[0] if offsets is None else offsets.shape[0] - 1
    return [x.new_empty(*x.shape[:2], n) for n in sizes], x.new_empty((N, x.shape[2], weight.shape[1] - 1) if final else (0,))


def _fake_backward(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    some = (present(None if t is None else t.new_empty(t.shape), x) for t in (bias, state))
    return (x.new_empty(x.shape), weight.new_empty(weight.shape), *some)


def _update(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor | None, activation: str) -> Tensor:
    W, S = weight.shape[1], state.shape[2]
    if uses_kernels(x) and activation in (*SILU, "identity") and 2 <= W <= WIDEST:
        from .launch.conv import update

        return update(x, state, weight, bias, index, activation in SILU)
    T = x.shape[1]
    past = state if index is None else state[index.clamp(min=0).to(torch.int64)]  # [B, D, S]
    line = torch.cat([past.to(x.dtype), x.transpose(1, 2)], 2)  # [B, D, S + T]
    rows, w = wide(line), wide(weight).to(wide(x).dtype)
    y = rows[..., S - W + 1 : S - W + 1 + T] * w[:, :1]
    for j in range(1, W):
        y = torch.addcmul(y, rows[..., S - W + 1 + j : S - W + 1 + j + T], w[:, j : j + 1])
    y = y if bias is None else y + bias.to(y.dtype)[:, None]
    y = activation_named(activation)(y).to(x.dtype).transpose(1, 2).contiguous()
    if index is None:
        state.copy_(line[..., T:])
        return y
    kept = index >= 0
    state[index[kept].to(torch.int64)] = line[kept, :, T:].to(state.dtype)
    return y.masked_fill_(~kept[:, None, None], 0)


_conv_op = define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? state, Tensor? offsets, Tensor? first, bool silu, "
    "bool final, int[] sizes) -> (Tensor[] y, Tensor last)",
    _forward,
    _fake_forward,
)
_conv_backward_op = define(
    "causal_conv1d_backward(Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor? offsets, Tensor? first, Tensor[] dy, "
    "Tensor? dlast, bool silu) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dstate)",
    _backward,
    _fake_backward,
)
_update_op = define(
    "causal_conv1d_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, Tensor? index, str activation) -> Tensor",
    _update,
    lambda x, *_: x.new_empty(x.shape),
)


class _Conv(torch.autograd.Function):
    """The kernels as one differentiable function of x, weight, bias, residual and state: y in parts of these sizes, and the last."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        made, last = _conv_op(*args)
        return *made, last

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, residual, state, offsets, first, ctx.silu, ctx.final, _ = inputs
        ctx.save_for_backward(x, weight, bias, state, offsets, first)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *tensors, offsets, first = ctx.saved_tensors
        silu, final, sizes, need = ctx.silu, ctx.final, [dy.shape[-1] for dy in grads[:-1]], ctx.needs_input_grad

        def find(x: Tensors, dy: Tensors, beside: Tensors) -> Tensors:
            return _conv_backward_op(*x, *beside, [*dy[:-1]], dy[-1], silu)

        def plain(x: Tensor, weight: Tensor, bias: Any, state: Any, offsets: Any, first: Any) -> Tensors:
            y, last = _plain(x, weight, bias, None, state, offsets, first, "silu" if silu else None, final)
            return *y.split(sizes, -1), last

        wanted = (*need[:3], need[4])
        dx, dw, db, ds = gradients(find, plain, wanted, tensors, (*grads[:-1], grads[-1] if final else None), (offsets, first))
        return dx, dw, db, grads[0] if need[3] else None, ds, None, None, None, None, None


convolution = differentiable(_Conv)


def _plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None,
    first: Tensor | None, activation: str | None, final: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """By PyTorch's operators."""
    B, T, D = x.shape
    W, N = weight.shape[1], B if cu_seqlens is None else cu_seqlens.numel() - 1
    past = x.new_zeros(N, W - 1, D) if state is None else state.transpose(1, 2).to(x.dtype)
    taps = wide(weight).t().contiguous().to(wide(x).dtype)  # [W, D]
    last, inside = None, False
    if first is not None:
        seen = torch.arange(B * T, device=x.device) - first  # [R]: rows of its own sequence before each
        rows = nn.functional.pad(wide(x).reshape(B * T, D), (0, 0, W - 1, 0))
        y = rows[W - 1 :] * taps[W - 1]
        for j in range(1, W):
            y = y + torch.where((seen >= j)[:, None], rows[W - 1 - j : W - 1 - j + B * T], 0) * taps[W - 1 - j]
        y = y.view(x.shape)
    elif cu_seqlens is None:
        inside = activation in SILU or activation is None
        z = wide(x)
        y = taps_of(z, past.to(z.dtype), taps, bias.to(z.dtype) if inside and bias is not None else None, activation in SILU)
        if final:
            last = x[:, T - (W - 1) :] if T >= W - 1 else torch.cat([past, x], 1)[:, T:]  # [B, W - 1, D]
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
        z = wide(rows).unsqueeze(0)
        y = wide(x) if T == 0 else taps_of(z[:, W - 1 :], z[:, : W - 1], taps, None, False).index_select(1, row)
        last = rows.index_select(0, (begin[1:, None] - (W - 1) + column).flatten()).view(N, W - 1, D)
    if bias is not None and not inside:
        y = y + bias.to(y.dtype)
    y = y if inside else activation_named(activation)(y)
    if residual is not None:
        y = y + residual.to(y.dtype)
    return y.to(x.dtype), last.transpose(1, 2).clone(memory_format=torch.contiguous_format) if final and last is not None else None


def by_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether the convolution of x [B, T, D] by weight [D, W] is a kernel's."""
    return uses_kernels(x) and 2 <= weight.shape[1] <= WIDEST and x.shape[:2].numel() < 2**31


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    activation: str | None = None, cu_seqlens: Tensor | None = None, *, residual: Tensor | None = None, seq_idx: Tensor | None = None,
    channels_first: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y_t = act(bias + sum_j weight[:, j] x_{t - (W - 1) + j}) + residual_t, each channel alone, nothing read from another sequence.

    Args:
        x: [B, T, D]; with `cu_seqlens` one packed row, B = 1.
        weight: [D, W], W >= 1; the last column meets the current token.
        bias: [D] or None.
        initial_state: [N, D, W - 1], the inputs that came before, oldest first; None is zeros. N = B when dense.
        output_final_state: return the last W - 1 inputs of each sequence (with those of `initial_state` where a sequence is shorter).
        activation: None, "silu", ...
        cu_seqlens: [N + 1] int32 or int64 offsets of packed sequences; empty ones are legal.
        residual: like x, or None.
        seq_idx: [B, T] integers, causal_conv1d's way to pack: a run of equal numbers is a sequence, negative ones are padding (output 0).
            It excludes cu_seqlens and states.
        channels_first: x, residual and y are [B, D, T], causal_conv1d's layout; where its last axis is dense, x is copied once.

    Returns:
        y like x, in x's dtype, computed in float32 for half types; the state [N, D, W - 1] in x's dtype, memory of its own, or None.
        Differentiable in x, weight, bias, initial_state and residual. Dense, packed and step by step add the same products in one order.

    Raises:
        ValueError, TypeError: shapes, offsets or dtypes that do not fit, naming the argument.
    """
    name, axes = "causal_conv1d", "[B, D, T]" if channels_first else "[B, T, D]"
    integers = {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
    check_tensors(name, integers, ("weight",), x=x, weight=weight, bias=bias, initial_state=initial_state, residual=residual)
    if x.ndim != 3:
        raise ValueError(f"{name}: x must be {axes}, got {list(x.shape)}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"{name}: residual must be like x, {list(x.shape)} {x.dtype}, got {list(residual.shape)} {residual.dtype}")
    if channels_first:
        x, residual = x.transpose(1, 2), None if residual is None else residual.transpose(1, 2)
    B, T, D = x.shape
    if weight.ndim != 2 or weight.shape[0] != D or weight.shape[1] < 1:
        raise ValueError(f"{name}: weight must be [D, W] with D = {D} and W >= 1, got {list(weight.shape)}")
    if bias is not None and bias.shape != (D,):
        raise ValueError(f"{name}: bias must be [D] = [{D}], got {list(bias.shape)}")
    if cu_seqlens is not None:
        check_offsets(cu_seqlens, B, T)
    W, N = weight.shape[1], B if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is not None and initial_state.shape != (N, D, W - 1):
        raise ValueError(f"{name}: initial_state must be [N, D, W - 1] = [{N}, {D}, {W - 1}], got {list(initial_state.shape)}")
    activation_named(activation)
    first = None
    if seq_idx is not None:
        if seq_idx.shape != (B, T):
            raise ValueError(f"{name}: seq_idx must be [B, T] = [{B}, {T}], got {list(seq_idx.shape)}")
        if cu_seqlens is not None or initial_state is not None or output_final_state:
            raise ValueError(f"{name}: seq_idx says where sequences begin without numbering them: no cu_seqlens and no states beside it")
        first = first_rows(seq_idx)
    if by_kernel(x, weight):
        silu = activation in SILU
        whole = silu or activation is None  # another activation comes after the kernel, and so does what is added
        given = x, weight, bias, residual if whole else None, initial_state, cu_seqlens, first, silu, output_final_state
        y, last = convolution(*given, (D,))
        y = y if whole else activation_named(activation)(y)
        y = y if whole or residual is None else y + residual
        final = last if output_final_state else None
    else:
        y, final = _plain(x, weight, bias, residual, initial_state, cu_seqlens, first, activation, output_final_state)
    if seq_idx is not None:
        y = y.masked_fill((seq_idx < 0).unsqueeze(-1), 0)
    return y.transpose(1, 2) if channels_first else y, final


def causal_conv1d_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, state_indices: Tensor | None = None
) -> Tensor:
    """New tokens on states that move on in place; for decoding, without gradients.

    Args:
        x: [B, D], or several tokens [B, T, D].
        state: [B, D, S], or a pool [slots, D, S] with `state_indices`; S >= W - 1, the last inputs of each sequence, oldest first. Any
            strides and float dtype. Only its last W - 1 columns are read; S = W is causal_conv1d's and fla's layout.
        weight: [D, W]; bias: [D] or None; activation: None, "silu", ...
        state_indices: [B] integers: the slot of each sequence. A negative one leaves the pool alone and gives output zero.

    Returns:
        y like x.

    Raises:
        ValueError: shapes that do not fit, a slot that is not there or is named twice (on a GPU nothing is read), inputs that require
            gradients; TypeError: dtypes. Both name the argument.
    """
    name = "causal_conv1d_update"
    check_tensors(name, {"state_indices": state_indices}, ("state", "weight"), x=x, state=state, weight=weight, bias=bias)
    if x.ndim not in (2, 3):
        raise ValueError(f"{name}: x must be [B, D] or [B, T, D], got {list(x.shape)}")
    B, D = x.shape[0], x.shape[-1]
    if weight.ndim != 2 or weight.shape[0] != D or weight.shape[1] < 1:
        raise ValueError(f"{name}: weight must be [D, W] with D = {D} and W >= 1, got {list(weight.shape)}")
    if bias is not None and bias.shape != (D,):
        raise ValueError(f"{name}: bias must be [D] = [{D}], got {list(bias.shape)}")
    W = weight.shape[1]
    if state.ndim != 3 or state.shape[1] != D or state.shape[2] < W - 1:
        raise ValueError(f"{name}: state must be [slots, D, S] with D = {D} and S >= W - 1 = {W - 1}, got {list(state.shape)}")
    if state_indices is None and state.shape[0] != B:
        raise ValueError(f"{name}: state must hold B = {B} sequences, or state_indices say which, got {state.shape[0]}")
    if state_indices is not None and state_indices.shape != (B,):
        raise ValueError(f"{name}: state_indices must be [B] = [{B}], got {list(state_indices.shape)}")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, state, weight, bias)):
        raise ValueError(f"{name}: works in place and has no gradient: call it under torch.no_grad()")
    if state_indices is not None and state_indices.is_cpu and not torch.compiler.is_compiling():
        if (most := int(state_indices.max()) if B else -1) >= len(state):
            raise ValueError(f"{name}: state_indices must name slots below {len(state)}, got {most}")
        check_apart(name, "state_indices", state_indices)
    activation_named(activation)
    y = _update_op(x if x.ndim == 3 else x.unsqueeze(1), state, weight, bias, state_indices, activation or "identity")
    return y if x.ndim == 3 else y.squeeze(1)


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
        """New tokens: x [B, D] or [B, T, D] -> y like x; `state` [B, D, W - 1] moves on in place."""
        with torch.no_grad():
            return causal_conv1d_update(x, state, self.weight.squeeze(1), self.bias, self.activation)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, kernel_size={self.kernel_size}, bias={self.bias is not None}, activation={self.activation!r}"
