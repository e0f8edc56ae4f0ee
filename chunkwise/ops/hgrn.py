"""HGRN: the hierarchically gated recurrence; its memory is one number per channel, so it is a scan and not a member of the pipeline.

    h_t = exp(g_t) h_{t-1} + x_t

Qin, Yang, Zhong. Hierarchically Gated Recurrent Neural Network for Sequence Modeling. NeurIPS 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.dispatch import check_offsets
from ..engine.elementwise import scan
from ..spec import Output


def hgrn(
    x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Output:  # fmt: skip
    """The elementwise gated scan. Differentiable in x, g and the initial state.

    x: [B, T, D]; g: [B, T, D], natural log of the forget factor, at most 0, of any floating dtype; initial_state: [N, D] of any floating
    dtype; cu_seqlens: [N + 1] int32 or int64, offsets of sequences packed into one row (B = 1), cu_seqlens_cpu the same on the CPU.
    Returns h: [B, T, D] in x's dtype, and the final state [N, D] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    for name, t in (("x", x), ("g", g)):
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise TypeError(f"hgrn: {name} must be a floating tensor [B, T, D], got {getattr(t, 'dtype', type(t).__name__)}")
        if t.ndim != 3 or t.shape != x.shape:
            raise ValueError(f"hgrn: {name} must be [B, T, D]{'' if name == 'x' else f' = {list(x.shape)}'}, got {list(t.shape)}")
        if t.device != x.device:
            raise ValueError(f"hgrn: {name} is on {t.device}, x is on {x.device}")
    B, T, D = x.shape
    if cu_seqlens is not None:
        check_offsets("hgrn", cu_seqlens, cu_seqlens_cpu, B, T, x.device)
    elif cu_seqlens_cpu is not None:
        raise ValueError("hgrn: cu_seqlens_cpu needs cu_seqlens")
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        if not isinstance(initial_state, Tensor) or not initial_state.is_floating_point():
            given = getattr(initial_state, "dtype", type(initial_state).__name__)
            raise TypeError(f"hgrn: initial_state must be a floating tensor, got {given}")
        if tuple(initial_state.shape) != (N, D):
            raise ValueError(f"hgrn: initial_state must be [N, D] = [{N}, {D}], got {list(initial_state.shape)}")
    with torch.autocast(x.device.type, enabled=False):
        h, hT = scan(x, g, initial_state, cu_seqlens)
    return h, hT if output_final_state else None


hgrn.__chunkwise_op__ = None  # type: ignore[attr-defined]  # public, but no member: there is no pipeline to choose a form of
