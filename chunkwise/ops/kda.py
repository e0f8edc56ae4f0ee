"""Kimi delta attention: the gated delta rule with a gate per key channel.

    S' = diag(exp g_t) S_{t-1}
    S_t = S' + beta_t k_t (v_t - S'' k_t)'      (S'' the transpose of S')
    o_t = scale * S_t' q_t

Kimi Team. Kimi Linear: An Expressive, Efficient Attention Architecture. 2025.
Keys of length at most 1 and beta in [0, 1] (or [0, 2]) keep the state bounded; with longer keys it may grow without limit.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..draw import log_decay, unit, write_strength
from ..recurrence import read, write
from ..spec import Arg, Gate, GateOptions, Op, Output, Rule, Streams


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    S = g.exp()[..., None] * S
    error = v - read(k, S)
    S = S + write(k, error if beta is None else beta[..., None] * error)
    return S, read(q, S)


KDA = Op(
    name="kda", gate=Gate.KEY, rule=Rule.DELTA, paper="https://arxiv.org/abs/2510.26692",
    args=dict(
        q=Arg("B T H K"), k=Arg("B T H K", unit), v=Arg("B T HV V"), g=Arg("B T HV K", log_decay, free_dtype=True),
        beta=Arg("B T HV", write_strength, optional=True, free_dtype=True),
    ),
    step=step, lower=Streams, options=GateOptions,
)  # fmt: skip


def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, **options: Unpack[GateOptions]) -> Output:
    """Gated delta rule with one gate per token, head and key channel.

    q, k: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H; g: [B, T, HV, K], natural log of the forget factor, at most 0;
    beta: [B, T, HV], write strength (None: 1); both of any floating dtype. Options: `chunkwise.spec.GateOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return KDA(dict(q=q, k=k, v=v, g=g, beta=beta), **options)


chunk_kda, fused_chunk_kda, fused_recurrent_kda = KDA.publish(kda)
