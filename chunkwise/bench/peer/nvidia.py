"""NVIDIA's KDA kernels in cudnn-frontend, package nvidia-cudnn-frontend. Rows are packed: [tokens, heads, channels]."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from ...spec import Gate, Rule
from ..case import Case, Inputs
from . import installed, one_cell

PACKAGE = "nvidia-cudnn-frontend"


def available() -> str:
    why = installed(PACKAGE, "cudnn")
    return why or ("" if torch.cuda.is_available() else "nvidia needs a GPU")


def supports(c: Case) -> str:
    return one_cell(c, Gate.KEY, Rule.DELTA, "gates per key with the delta rule")


@cache
def _offsets(B: int, T: int, device: torch.device) -> Tensor:
    """Equal sequences: [B + 1], int32."""
    return torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=device)


def call(c: Case, x: Inputs, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    from cudnn.linear_attention import kimi_delta_attention

    cu = _offsets(c.B, c.T, x.do.device) if x.cu is None else x.cu
    o, _ = kimi_delta_attention(*(tensors[n].flatten(0, 1) for n in ("q", "k", "v", "g", "beta")), cu)
    return o.unflatten(0, (c.B, c.T)), None
