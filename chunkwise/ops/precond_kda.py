"""Preconditioned Kimi delta attention: the preconditioned gated delta rule with a gate per key channel.

    A_t = exp(g^A_t) A_{t-1} + beta^A_t k_t^2,   kt_t = k_t * x^(-softsign(log(A_t + eps) - c))          (per channel)
    S' = diag(exp g_t) S_{t-1};   S_t = S' + beta_t kt_t (v_t - S'' k_t)'      (S'' the transpose of S')
    o_t = scale * S_t' q_t

Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences. 2026. https://arxiv.org/abs/2604.21100
`chunkwise.precond_gated_delta_rule` says what keeps the state bounded.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..spec import Gate, GateOptions, Output
from .precond_gated_delta_rule import preconditioned

PRECOND_KDA = preconditioned("precond_kda", Gate.KEY)


def precond_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, g_atk: Tensor, beta_atk: Tensor, beta: Tensor, log_atk_scale: Tensor | None = None,
    x: float = 1.5, eps: float = 1e-6, **options: Unpack[GateOptions],
) -> Output:  # fmt: skip
    """Gated delta rule with preconditioned write keys and one gate per token, head and key channel.

    q, k: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H; g: [B, T, HV, K], log decay of the state, at most 0; g_atk,
    beta_atk: [B, T, H], log decay and strength of A; beta: [B, T, HV]; log_atk_scale: [H], the centre c (None: -0.2); all of any floating
    dtype; x: the largest rescaling, at least 1; eps: added to A. Options: `chunkwise.spec.GateOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V + 1] in float32 (float64 for float64 inputs), its last column A,
    or None. Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    inputs = dict(q=q, k=k, v=v, g_atk=g_atk, g=g, beta_atk=beta_atk, beta=beta, log_atk_scale=log_atk_scale)
    return PRECOND_KDA(inputs, x=x, eps=eps, **options)


chunk_precond_kda, fused_chunk_precond_kda, fused_recurrent_precond_kda = PRECOND_KDA.publish(precond_kda)
