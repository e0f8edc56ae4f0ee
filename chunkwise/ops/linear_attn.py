"""Linear attention: the state adds up and never forgets.

    S_t = S_{t-1} + k_t v_t'
    o_t = scale * S_t' q_t

Katharopoulos, Vyas, Pappas, Fleuret. Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention. ICML 2020.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..recurrence import read, write
from ..spec import Arg, Gate, Op, Options, Output, Rule, Streams


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    S = S + write(k, v)
    return S, read(q, S)


LINEAR_ATTN = Op(
    name="linear_attn", gate=Gate.NONE, rule=Rule.ADD, paper="https://arxiv.org/abs/2006.16236",
    args=dict(q=Arg("B T H K"), k=Arg("B T H K"), v=Arg("B T HV V")),
    step=step, lower=Streams, parallel=True,
)  # fmt: skip


def linear_attn(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]) -> Output:
    """Linear attention without a normaliser; feature maps are the caller's.

    q, k: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H. Options: `chunkwise.spec.Options`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return LINEAR_ATTN(dict(q=q, k=k, v=v), **options)


chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn, parallel_linear_attn = LINEAR_ATTN.publish(linear_attn)
