"""The delta rule with a diagonal-plus-low-rank transition: forget by channel, and move what one key reads to another.

    S_t = diag(exp g_t) S_{t-1} + b_t (S_{t-1}' a_t)' + k_t v_t'
    o_t = scale * S_t' q_t

The general form of RWKV-7 (`chunkwise.rwkv7`) and of the delta rules: a = -beta k', b = k'.
Peng et al. RWKV-7 "Goose" with Expressive Dynamic State Evolution. COLM 2025.
The state stays bounded where diag(exp g) + b a' has no singular value above 1; otherwise it may grow without limit.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..draw import log_decay, unit, write_strength
from ..recurrence import read, write
from ..spec import Arg, Gate, InverseOptions, Op, Output, Rule, Streams


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    moved = write(b, read(a, S))
    S = g.exp()[..., None] * S + moved + write(k, v)
    return S, read(q, S)


DPLR_DELTA_RULE = Op(
    name="dplr_delta_rule", gate=Gate.KEY, rule=Rule.DPLR, paper="https://arxiv.org/abs/2503.14456",
    args=dict(
        q=Arg("B T H K"), k=Arg("B T H K", unit), v=Arg("B T HV V"), a=Arg("B T HV K", unit), b=Arg("B T HV K", write_strength),
        g=Arg("B T HV K", log_decay, free_dtype=True),
    ),
    step=step, lower=lambda q, k, v, a, b, g: Streams(q, k, v, g=g, a=a, b=b), options=InverseOptions,
    couple=lambda x: {**x, "b": -x["a"] * x["b"]},
)  # fmt: skip


def dplr_delta_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, **options: Unpack[InverseOptions]) -> Output:
    """Delta rule with a diagonal-plus-low-rank transition.

    q, k: [B, T, H, K]; v: [B, T, HV, V]; a, b: [B, T, HV, K] of one dtype, HV a multiple of H; g: [B, T, HV, K], natural log of the forget
    factor, at most 0, of any floating dtype. Options: `chunkwise.spec.InverseOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return DPLR_DELTA_RULE(dict(q=q, k=k, v=v, a=a, b=b, g=g), **options)


chunk_dplr_delta_rule, fused_chunk_dplr_delta_rule, fused_recurrent_dplr_delta_rule = DPLR_DELTA_RULE.publish(dplr_delta_rule)
