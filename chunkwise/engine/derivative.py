"""Derivatives of gradients. Backward passes run on kernels and in place, so a graph of what they do would not hold their derivative.

So each is one node of such a graph, and the derivative of that node is PyTorch's own: of a form of the forward pass that is made of nothing
but operators that have one. What is found first has the bits it always has; the other form runs only where somebody goes through it, or
asks for many gradients at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.compiler import is_compiling

Tensors = Sequence[Any]  # of tensors, and None where there is none
Find = Callable[[Tensors, Tensors, Tensors], Tensors]
Plain = Callable[..., Tensors]


class Way(NamedTuple):
    """How gradients come from inputs, from those of the results, and from what is beside the inputs."""

    find: Find
    plain: Plain | str
    wanted: tuple[bool, ...]
    results: int

    def parts(self, tensors: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        n = len(self.wanted)
        return tensors[:n], tensors[n : n + self.results], tensors[n + self.results :]

    def found(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """Those wanted. Many at once cannot be written into room for one."""
        if isinstance(self.plain, str) or not any(t is not None and is_batchedtensor(t) for t in tensors):
            return tuple(d for d, w in zip(self.find(*self.parts(tensors)), self.wanted) if w)
        pull, free = self.slopes(tensors)
        return pull(*free)

    def slopes(self, tensors: Tensors) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
        """The same by PyTorch, as a function of the inputs whose gradients are wanted and of the results' gradients; and those now."""
        plain = self.plain
        if isinstance(plain, str):
            raise NotImplementedError(plain)
        x, dy, beside = self.parts(tensors)
        to = [i for i, d in enumerate(dy) if d is not None]
        n = sum(self.wanted)

        def values(*some: Tensor) -> tuple[Tensor, ...]:
            given = iter(some)
            out = plain(*(next(given) if w else t for t, w in zip(x, self.wanted)), *beside)
            return tuple(out[i] for i in to)

        def slopes(*free: Tensor) -> tuple[Tensor, ...]:
            return torch.func.vjp(values, *free[:n])[1](free[n:])

        return slopes, [*(t for t, w in zip(x, self.wanted) if w), *(dy[i] for i in to)]


class Gradient(torch.autograd.Function):
    """The gradients found, as a function of all they are found from."""

    generate_vmap_rule = True  # by vmap of what follows

    @staticmethod
    def forward(way: Way, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(d.view_as(d) if any(d is t for t in tensors) else d for d in way.found(tensors))  # never what was given itself

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.way, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        way, tensors = ctx.way, ctx.saved_tensors
        slopes, free = way.slopes(tensors)
        d = iter(torch.func.vjp(slopes, *free)[1](grads))
        at = [*way.wanted, *(t is not None for t in tensors[len(way.wanted) :][: way.results])]
        return None, *(next(d) if w else None for w in at), *[None] * (len(tensors) - len(at))


def gradients(find: Find, plain: Plain | str, wanted: Sequence[bool], x: Tensors, dy: Tensors, beside: Tensors = ()) -> Tensors:
    """For a backward pass: find(x, dy, beside), gradients of the inputs x, None where they are not `wanted`; differentiable themselves.

    plain: what the results, of whose gradients dy are (None: they have none), are of x and what is beside it, by operators that PyTorch
    differentiates; or what a NotImplementedError says to who asks for a derivative of the gradients.
    """
    if is_compiling() or not torch.is_grad_enabled() and not [d for d in dy if many(d)]:  # compiled graphs refuse by themselves
        return [d if w else None for d, w in zip(find(x, dy, beside), wanted)]
    wanted = tuple([w and t is not None for w, t in zip(wanted, x)])
    way, tensors = Way(find, plain, wanted, len(dy)), (*x, *dy, *beside)
    found = iter(singly((lambda t: Gradient.apply(way, *t)) if torch.is_grad_enabled() else way.found, tensors))
    return [next(found) if w else None for w in wanted]


def many(t: Tensor | None) -> bool:
    """Whether these are many gradients at once, of autograd.grad's is_grads_batched or a transform's."""
    return t is not None and (is_batchedtensor(t) or is_legacy_batchedtensor(t))


def _few(t: Tensor | None) -> bool:
    """Whether only few operators take them: those of is_grads_batched."""
    return t is not None and is_legacy_batchedtensor(t)


def _level(t: Tensor) -> int:
    """The level that makes many of it, of which the thread of a GPU's backward passes is not told. At another it is expanded as asked."""
    for level in range(64, 0, -1):  # the innermost first
        if len(torch._remove_batch_dim(t, level, 0, 0)):
            return level
    raise RuntimeError("chunkwise engine: autograd.grad asks for no gradient at all at once: its batch is empty")


def singly(found: Callable[[Tensors], tuple[Tensor, ...]], tensors: Tensors) -> tuple[Tensor, ...]:
    """found(tensors); of the many of is_grads_batched once for each: a node of a graph made of all of them would be lost with the batch."""
    if not any(map(_few, tensors)):
        return found(tensors)
    level = max(map(_level, filter(_few, tensors)))
    taken = [torch._remove_batch_dim(t, level, 0, 0) if _few(t) else None for t in tensors]
    n = max(len(t) for t in taken if t is not None)
    made = [singly(found, [t if every is None else every[i] for t, every in zip(tensors, taken)]) for i in range(n)]
    return tuple(torch._add_batch_dim(torch.stack(d), 0, level) for d in zip(*made))
