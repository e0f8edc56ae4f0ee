"""Several maps of one input as one: on a GPU, where each would read the input anew and the gradients of the input would be summed.

A module takes part if it is its parameters and nothing else: adapters, quantisation, sharding and hooks see the module called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .boundary import uses_kernels
from .conv import SILU, ShortConvolution, by_kernel, causal_conv1d, convolution
from .linear import Linear

MANY = 512  # tokens: for fewer, putting the weights side by side costs more than it spares


def hooked(module: nn.Module) -> bool:
    """Whether the module, or every module, has hooks."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    every = nn.modules.module
    shared = (every._global_forward_hooks, every._global_forward_pre_hooks, every._global_backward_hooks, every._global_backward_pre_hooks)
    return any(own) or any(shared)


def plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether the module is its parameters and nothing else, so that another may compute what calling it would."""
    own = all(type(p) is nn.Parameter for p in module._parameters.values() if p is not None)
    return type(module) in kinds and own and not hooked(module) and "forward" not in vars(module)


def together(x: Tensor, *maps: nn.Module, merge: int = 1) -> list[Tensor]:
    """[m(x) for m in maps]: plain linear maps by one product where that pays, the others one by one. merge: where that product makes the
    first so many, they come as one tensor, side by side."""
    if not uses_kernels(x) or x.shape[:-1].numel() < MANY:
        return [m(x) for m in maps]
    joined = [linear(m) for m in maps]
    weights: list[Any] = [m.weight for m, j in zip(maps, joined) if j]
    if len(weights) < 2:
        return [m(x) for m in maps]
    widths = [w.shape[0] for w in weights]
    if merge > 1 and all(joined[:merge]):
        widths[:merge], maps, joined = [sum(widths[:merge])], (maps[0], *maps[merge:]), joined[merge - 1 :]
    if spare := -sum(widths) % 8:  # rows of 16 bytes are what matrix products want
        weights, widths = [*weights, weights[0].new_zeros(spare, x.shape[-1])], [*widths, spare]
    made = iter(nn.functional.linear(x, torch.cat(weights)).split(widths, -1))
    return [next(made) if j else m(x) for m, j in zip(maps, joined)]


def linear(module: nn.Module) -> bool:
    """Whether the module is x W' and nothing else."""
    return plain(module, Linear, nn.Linear) and module.bias is None


def convolve(
    convs: Sequence[ShortConvolution], x: Tensor, state: Tensor | None, keep: bool, cu_seqlens: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """What each of those that are `alike` makes of its channels, side by side in x [B, T, D], by one convolution; and the state they
    leave, if that is to be kept. The gradients of what they made are read where they lie."""
    weight, sizes, act = torch.cat([c.weight for c in convs]).squeeze(1), tuple(c.hidden_size for c in convs), convs[0].activation
    biases: list[Tensor] = [c.bias for c in convs if c.bias is not None]
    bias = torch.cat(biases) if biases else None
    if by_kernel(x, weight) and (act is None or act in SILU):
        made = convolution(x, weight, bias, None, state, cu_seqlens, None, act is not None, keep, sizes)
        return made[:-1], made[-1] if keep else None
    y, last = causal_conv1d(x, weight, bias, state, keep, act, cu_seqlens)
    return y.split(sizes, -1), last


def alike(convs: Sequence[ShortConvolution]) -> bool:
    """Whether convolutions are one of all their channels: plain modules of one width, one activation, all with a bias or all without."""
    kinds = {(c.kernel_size, c.activation, c.bias is None) for c in convs}
    return len(kinds) == 1 and all(plain(c, ShortConvolution) for c in convs)
