"""Where the modules meet PyTorch: operators that tracing sees as one node, and the one decision between PyTorch and kernels of ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from ..engine.library import apart, direct, tangents

TRITON = importlib.util.find_spec("triton") is not None
_LIBRARY = torch.library.Library("chunkwise", "FRAGMENT")


def uses_kernels(x: Tensor) -> bool:
    """Whether x is computed on by Triton kernels: on a GPU, in a dtype of at most 32 bits. Everything else runs PyTorch's own operators."""
    return TRITON and x.is_cuda and x.dtype in (torch.float32, torch.float16, torch.bfloat16)


WHOLE = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def check_tensors(
    name: str, whole: dict[str, Tensor | None] | None = None, needed: tuple[str, ...] = (), **tensors: Tensor | None
) -> None:
    """Of a function's arguments, of which all but the first tensor and those that are `needed` may be None: those of `tensors` must be
    floating, those that are `whole` integers, and all on the device of the first.

    Raises TypeError or ValueError naming one that is not."""
    first, x = next(iter(tensors.items()))
    at = x.device if isinstance(x, Tensor) else None
    for label, t in tensors.items():
        fits = isinstance(t, Tensor) and t.is_floating_point() and t.device == at
        if not fits and (t is not None or label == first or label in needed):
            _refuse(name, label, t, "a floating tensor", isinstance(t, Tensor) and t.is_floating_point(), first, at)
    for label, t in () if whole is None else whole.items():
        fits = isinstance(t, Tensor) and t.dtype in WHOLE
        if not (fits and t.device == at) and (t is not None or label in needed):  # type: ignore[union-attr]
            _refuse(name, label, t, "a tensor of integers", fits, first, at)


def _refuse(name: str, label: str, t: Tensor | None, wanted: str, fits: bool, first: str, at: torch.device | None) -> NoReturn:
    if fits:
        raise ValueError(f"{name}: {label} is on {t.device}, {first} on {at}")  # type: ignore[union-attr]
    raise TypeError(f"{name}: {label} must be {wanted}, got {t.dtype if isinstance(t, Tensor) else type(t).__name__}")


def define(schema: str, impl: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The operator chunkwise::<schema>, whose shapes tracing learns from `fake`. It runs on its first argument's device, current or not.
    What is absent among its results is None for who calls, an empty tensor for the dispatcher.

    Where nobody traces, the function itself is called: the way through the dispatcher and back takes longer than a token's convolution.
    """

    def run(*args: Any) -> Any:
        at = args[0].device
        if at.type != "cuda" or at.index == torch.cuda.current_device():
            return impl(*args)
        with torch.cuda.device(at):
            return impl(*args)

    def dispatched(*args: Any) -> Any:
        out = run(*args)
        return tuple(present(t, args[0]) for t in out) if isinstance(out, tuple) else out

    name = _LIBRARY.define(schema)
    _LIBRARY.impl(name, dispatched, "CompositeExplicitAutograd")
    torch.library.register_fake(f"chunkwise::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.chunkwise, name).default

    def call(*args: Any) -> Any:
        """Where nobody looks, past the dispatcher, whose crossing costs more than the rest of a call's Python."""
        return run(*args) if direct(tuple(t for t in args if isinstance(t, Tensor))) else op(*args)

    return call


def differentiable(function: type[Function]) -> Callable[..., Any]:
    """A class of forward and setup_context becomes its `apply`. Where nobody looks it is that of a twin whose forward sets the context
    itself: of one that has it apart PyTorch works out the defaults of its arguments at every call, longer than a kernel's launch takes.
    Compiled, where no gradient is wanted, it is `forward` alone: torch 2.13 would hand one of any number of arguments a context there;
    not in forward mode, which no kernel has and a `forward` alone would take for derivatives of zero."""
    function.generate_vmap_rule = True  # by vmap of its parts: PyTorch calls the operators again and again

    def forward(ctx: Any, *args: Any) -> Any:
        out = function.forward(*args)
        function.setup_context(ctx, args, out)
        return out

    twin: Any = type(function.__name__, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(function.backward)})

    def apply(*args: Any) -> Any:
        tensors = tuple(t for t in args if isinstance(t, Tensor))
        if torch.compiler.is_compiling():
            if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors) or tangents()):
                return function.forward(*args)
            args = apart(*args)
        return (twin if direct(tensors) else function).apply(*args)

    return apply


def present(t: Tensor | None, like: Tensor) -> Tensor:
    """Operators return no None: an empty tensor stands for it."""
    return like.new_empty(0) if t is None else t
