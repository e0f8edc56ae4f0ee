"""The delta rule: a token replaces what the state holds for its key.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}' k_t)'
    o_t = scale * S_t' q_t

Yang, Wang, Zhang, Shen, Kim. Parallelizing Linear Transformers with the Delta Rule over Sequence Length. NeurIPS 2024.
Keys of length at most 1 and beta in [0, 1] (or [0, 2]) keep the state bounded; with longer keys it may grow without limit.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..draw import unit, write_strength
from ..recurrence import read, write
from ..spec import Arg, DeltaOptions, Gate, Op, Output, Rule, Streams


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    error = v - read(k, S)
    S = S + write(k, error if beta is None else beta[..., None] * error)
    return S, read(q, S)


DELTA_RULE = Op(
    name="delta_rule", gate=Gate.NONE, rule=Rule.DELTA, paper="https://arxiv.org/abs/2406.06484",
    args=dict(
        q=Arg("B T H K"), k=Arg("B T H K", unit), v=Arg("B T HV V"), beta=Arg("B T HV", write_strength, optional=True, free_dtype=True)
    ),
    step=step, options=DeltaOptions, lower=lambda q, k, v, beta: Streams(q, k, v, beta=beta), parallel=True,
)  # fmt: skip


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, **options: Unpack[DeltaOptions]) -> Output:
    """Linear attention with the delta rule.

    q, k: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H; beta: [B, T, HV], write strength, of any floating dtype
    (None: 1). Options: `chunkwise.spec.DeltaOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return DELTA_RULE(dict(q=q, k=k, v=v, beta=beta), **options)


chunk_delta_rule, fused_chunk_delta_rule, fused_recurrent_delta_rule, parallel_delta_rule = DELTA_RULE.publish(delta_rule)
