"""The gated feed-forward layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..engine.derivative import gradients
from .activation import activation
from .boundary import check_tensors, define, differentiable, uses_kernels
from .joint import together
from .linear import Linear
from .norm import GATES

HALF = 256  # channels that a side is a multiple of, for a kernel to find it beside the other


def intermediate_size(hidden_size: int, hidden_ratio: float = 4.0) -> int:
    """Two thirds of ratio * hidden, so that three matrices cost what two did, rounded up to a multiple of 256."""
    return 256 * -(-int(hidden_size * hidden_ratio * 2 / 3) // 256)


def _forward(a: Tensor, b: Tensor, act: str) -> Tensor:
    from .launch.glu import forward

    return forward(a, b, act)


def _backward(a: Tensor, b: Tensor, dy: Tensor, act: str) -> tuple[Tensor, Tensor]:
    from .launch.glu import backward

    return backward(a, b, dy, act)


_glu_op = define("glu(Tensor a, Tensor b, str activation) -> Tensor", _forward, lambda a, *_: a.new_empty(a.shape))
_glu_backward_op = define(
    "glu_backward(Tensor a, Tensor b, Tensor dy, str activation) -> (Tensor da, Tensor db)",
    _backward,
    lambda a, *_: (a.new_empty(a.shape), a.new_empty(a.shape)),
)


def _forward_halves(ab: Tensor, act: str) -> Tensor:
    from .launch.glu import forward_halves

    return forward_halves(ab, act)


def _backward_halves(ab: Tensor, dy: Tensor, act: str) -> Tensor:
    from .launch.glu import backward_halves

    return backward_halves(ab, dy, act)


_halves_op = define(
    "glu_halves(Tensor ab, str activation) -> Tensor", _forward_halves, lambda ab, _: ab.new_empty((*ab.shape[:-1], ab.shape[-1] // 2))
)
_halves_backward_op = define(
    "glu_halves_backward(Tensor ab, Tensor dy, str activation) -> Tensor", _backward_halves, lambda ab, *_: ab.new_empty(ab.shape)
)


class _Halves(torch.autograd.Function):
    """`_Glu` of one tensor that holds a and b side by side, and so do their gradients."""

    @staticmethod
    def forward(ab: Tensor, act: str) -> Tensor:
        return _halves_op(ab, act)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ab, ctx.act = inputs
        ctx.save_for_backward(ab)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        act, function = ctx.act, activation(ctx.act)
        find = lambda x, dy, _: (_halves_backward_op(*x, *dy, act),)
        plain = lambda ab: (function(ab.chunk(2, -1)[0]) * ab.chunk(2, -1)[1],)
        return *gradients(find, plain, (True,), ctx.saved_tensors, grads), None


_halves_function = differentiable(_Halves)


class _Glu(torch.autograd.Function):
    """The kernels as one differentiable function; it keeps a and b alone."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, act: str) -> Tensor:
        return _glu_op(a, b, act)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.act = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        act, function = ctx.act, activation(ctx.act)
        find = lambda x, dy, _: _glu_backward_op(*x, *dy, act)
        return *gradients(find, lambda a, b: (function(a) * b,), ctx.needs_input_grad[:2], ctx.saved_tensors, grads), None


_glu_function = differentiable(_Glu)


def glu(a: Tensor, b: Tensor, act: str | None = "silu") -> Tensor:
    """act(a) * b, element by element, in a's dtype; on a GPU in one pass over memory where act is silu or sigmoid.

    Raises:
        ValueError: shapes or dtypes that differ, an unknown activation; TypeError: no floating tensors.
    """
    function = activation(act)
    check_tensors("glu", None, ("b",), a=a, b=b)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"glu: b must be like a, {list(a.shape)} {a.dtype}, got {list(b.shape)} {b.dtype}")
    if act in GATES and uses_kernels(a):
        return _glu_function(a, b, GATES[act])
    return function(a) * b


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b. Shazeer. GLU Variants Improve Transformer. 2020."""
    return glu(a, b, "silu")


def glu_halves(ab: Tensor, act: str | None = "silu") -> Tensor:
    """`glu` of one tensor [..., 2 D] that holds a and b side by side; its gradient is one tensor too.

    Raises:
        ValueError: no channels or an odd number of them, an unknown activation; TypeError: no floating tensor.
    """
    check_tensors("glu_halves", ab=ab)
    if ab.ndim < 1 or ab.shape[-1] % 2:
        raise ValueError(f"glu_halves: ab must hold a and b side by side, got {list(ab.shape)}")
    if act in GATES and uses_kernels(ab) and ab.shape[-1] % (2 * HALF) == 0:
        return _halves_function(ab, GATES[act])
    a, b = ab.chunk(2, -1)
    return glu(a, b, act)


class GatedMLP(nn.Module):
    """y = down(act(gate(x)) * up(x)); SwiGLU with the default activation. x, y: [..., D].

    Shazeer. GLU Variants Improve Transformer. 2020.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str = "silu", *, device=None, dtype=None):
        super().__init__()
        factory = {"bias": False, "device": device, "dtype": dtype}
        activation(hidden_act)
        self.act = hidden_act
        self.gate_proj = Linear(hidden_size, intermediate_size, **factory)
        self.up_proj = Linear(hidden_size, intermediate_size, **factory)
        self.down_proj = Linear(intermediate_size, hidden_size, **factory)

    def forward(self, x: Tensor) -> Tensor:
        made = together(x, self.gate_proj, self.up_proj, merge=2)
        return self.down_proj(glu_halves(made[0], self.act) if len(made) == 1 else glu(made[0], made[1], self.act))
