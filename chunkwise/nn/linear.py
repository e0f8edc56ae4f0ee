"""A linear map whose few rows on a CPU take as long as reading its weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..engine.library import direct

ROWS = 64  # up to so many; beyond, PyTorch's own choice (MKL) is as fast, and rounds less often
LEAST = 1 << 19  # numbers of a weight: reading fewer takes no longer than the call


def _few(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN takes this product: few rows by a large weight in float32 on a CPU, without gradients, nobody watching."""
    if x.device.type != "cpu" or x.dtype is not torch.float32 or weight.dtype is not torch.float32 or weight.numel() < LEAST:
        return False
    if weight.ndim != 2 or not x.ndim or bias is not None and not (
        bias.shape == weight.shape[:1] and bias.dtype is torch.float32 and bias.is_contiguous() and bias.is_cpu
    ):
        return False
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    if wanted or not 0 < x.numel() <= ROWS * weight.shape[1] or x.shape[-1] != weight.shape[1] or not direct((x, weight, bias)):
        return False
    return not torch.is_autocast_enabled("cpu") and torch._C._get_mkldnn_enabled() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + bias, as torch.nn.functional.linear. x: [..., K], weight: [N, K], bias: [N] or None.

    Few rows in float32 on a CPU, where no gradient is asked for, go through oneDNN, which reads a weight at the speed of memory and gives
    a row the same bits beside any others (MKL takes two to three times as long on an AMD EPYC: docs/facts/decode.md).
    """
    if _few(x, weight, bias):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return nn.functional.linear(x, weight, bias)


class Linear(nn.Linear):
    """torch.nn.Linear by `linear`: parameters, names and training are the same."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def adopt_linear(model: nn.Module) -> int:
    """Let every torch.nn.Linear of a model, transformers' say, be a `Linear`: parameters, their names and training stay as they are.
    Subclasses stay what they are. Returns how many there were. Raises TypeError for what is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"adopt_linear: model must be a torch.nn.Module, got {type(model).__name__}")
    found = [module for module in model.modules() if type(module) is nn.Linear]
    for module in found:
        module.__class__ = Linear
    return len(found)
