"""The gated feed-forward layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .activation import activation
from .boundary import define, uses_kernels
from .linear import Linear
from .norm import GATES


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
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return (*_glu_backward_op(*ctx.saved_tensors, *grads, ctx.act), None)


def glu(a: Tensor, b: Tensor, act: str | None = "silu") -> Tensor:
    """act(a) * b, element by element, in a's dtype; on a GPU in one pass over memory where act is silu or sigmoid.

    Raises:
        ValueError: shapes or dtypes that differ, an unknown activation.
    """
    function = activation(act)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"glu: b must be like a, {list(a.shape)} {a.dtype}, got {list(b.shape)} {b.dtype}")
    if act in GATES and uses_kernels(a):
        return _Glu.apply(a, b, GATES[act])
    return function(a) * b


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b. Shazeer. GLU Variants Improve Transformer. 2020."""
    return glu(a, b, "silu")


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
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x), self.act))
