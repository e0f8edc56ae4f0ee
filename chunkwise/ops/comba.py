"""Comba: the gated delta rule with closed-loop control; what the state holds for one key is corrected along another.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}' p_t)'
    o_t = scale * S_t' q_t

Unlike the gated delta rule it erases what the state held before it forgot.
Hu, Pan, Du, Lan, Tang, Wen, Liang, Sun. Comba: Improving Bilinear RNNs with Closed-loop Control. 2025.
|k|, |p| <= 1, p = c k with c in [0, exp(g)] and beta in [0, 1] keep the state bounded; otherwise it may grow without limit.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..draw import log_decay, unit, write_strength
from ..recurrence import read, write
from ..spec import Arg, DeltaOptions, Gate, Op, Output, Rule, Streams


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    error = v - read(p, S)
    S = g.exp()[..., None, None] * S + write(k, error if beta is None else beta[..., None] * error)
    return S, read(q, S)


COMBA = Op(
    name="comba", gate=Gate.SCALAR, rule=Rule.DELTA, paper="https://arxiv.org/abs/2506.02475",
    args=dict(
        q=Arg("B T H K"), k=Arg("B T H K", unit), v=Arg("B T HV V"), p=Arg("B T H K", unit), g=Arg("B T HV", log_decay, free_dtype=True),
        beta=Arg("B T HV", write_strength, optional=True, free_dtype=True),
    ),
    step=step, options=DeltaOptions, lower=lambda q, k, v, p, g, beta: Streams(q, k, v, g=g, beta=beta, a=p),
    couple=lambda x: {**x, "p": 0.8 * x["k"] + 0.2 * x["p"]},
)  # fmt: skip


def comba(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor | None = None, **options: Unpack[DeltaOptions]
) -> Output:  # fmt: skip
    """Gated delta rule with an erase key of its own.

    q, k, p: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H; p erases, k writes; g: [B, T, HV], natural log of the forget
    factor, at most 0; beta: [B, T, HV], write strength (None: 1); both of any floating dtype. Options: `chunkwise.spec.DeltaOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return COMBA(dict(q=q, k=k, v=v, p=p, g=g, beta=beta), **options)


chunk_comba, fused_chunk_comba, fused_recurrent_comba = COMBA.publish(comba)
