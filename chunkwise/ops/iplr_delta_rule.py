"""The delta rule with an identity-plus-low-rank transition: nothing is forgotten but what one key reads is moved to another.

    S_t = S_{t-1} + b_t (S_{t-1}' a_t)' + k_t v_t'
    o_t = scale * S_t' q_t

The ungated form of `chunkwise.dplr_delta_rule`; with a = -beta k, b = k and v in beta v's place it is the delta rule
(Yang, Wang, Zhang, Shen, Kim. Parallelizing Linear Transformers with the Delta Rule over Sequence Length. NeurIPS 2024).
The state stays bounded where I + b a' has no singular value above 1; otherwise it may grow without limit.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..draw import unit, write_strength
from ..recurrence import read, write
from ..spec import Arg, Gate, InverseOptions, Op, Output, Rule, Streams


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    S = S + write(b, read(a, S)) + write(k, v)
    return S, read(q, S)


IPLR_DELTA_RULE = Op(
    name="iplr_delta_rule", gate=Gate.NONE, rule=Rule.DPLR, paper="https://arxiv.org/abs/2406.06484",
    args=dict(q=Arg("B T H K"), k=Arg("B T H K", unit), v=Arg("B T HV V"), a=Arg("B T HV K", unit), b=Arg("B T HV K", write_strength)),
    step=step, lower=lambda q, k, v, a, b: Streams(q, k, v, a=a, b=b), options=InverseOptions, parallel=True,
    couple=lambda x: {**x, "b": -x["a"] * x["b"]},
)  # fmt: skip


def iplr_delta_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **options: Unpack[InverseOptions]) -> Output:
    """Delta rule with an identity-plus-low-rank transition.

    q, k: [B, T, H, K]; v: [B, T, HV, V]; a, b: [B, T, HV, K] of one dtype, HV a multiple of H. Options: `chunkwise.spec.InverseOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return IPLR_DELTA_RULE(dict(q=q, k=k, v=v, a=a, b=b), **options)


(
    chunk_iplr_delta_rule,
    fused_chunk_iplr_delta_rule,
    fused_recurrent_iplr_delta_rule,
    parallel_iplr_delta_rule,
) = IPLR_DELTA_RULE.publish(iplr_delta_rule)  # fmt: skip
