"""Several maps of one input as one: on a GPU, where each would read the input anew and the gradients of the input would be summed.

A module takes part if it is its parameters and nothing else: adapters, quantisation, sharding and hooks see the module called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .boundary import uses_kernels
from .conv import ShortConvolution
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
    weights: list[Any] = [m.weight for m in maps if linear(m)]
    if len(weights) < 2:
        return [m(x) for m in maps]
    widths = [w.shape[0] for w in weights]
    if merge > 1 and all(map(linear, maps[:merge])):
        widths[:merge], maps = [sum(widths[:merge])], (maps[0], *maps[merge:])
    widths.append(-sum(widths) % 8)  # rows of 16 bytes are what matrix products want
    made = iter(nn.functional.linear(x, torch.cat([*weights, weights[0].new_zeros(widths[-1], x.shape[-1])])).split(widths, -1))
    return [next(made) if linear(m) else m(x) for m in maps]


def linear(module: nn.Module) -> bool:
    """Whether the module is x W' and nothing else."""
    return plain(module, Linear, nn.Linear) and module.bias is None


def alike(convs: Sequence[ShortConvolution]) -> bool:
    """Whether convolutions are one of all their channels: plain modules of one width, one activation, all with a bias or all without."""
    kinds = {(c.kernel_size, c.activation, c.bias is None) for c in convs}
    return len(kinds) == 1 and all(plain(c, ShortConvolution) for c in convs)
