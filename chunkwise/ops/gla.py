"""Gated linear attention: every key channel forgets at its own, data-dependent rate.

    S_t = diag(exp g_t) S_{t-1} + k_t v_t'
    o_t = scale * S_t' q_t

Yang, Wang, Shen, Panda, Kim. Gated Linear Attention Transformers with Hardware-Efficient Training. ICML 2024.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..draw import log_decay
from ..recurrence import read, write
from ..spec import Arg, Gate, Op, Options, Output, Rule, Streams


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    S = g.exp()[..., None] * S + write(k, v)
    return S, read(q, S)


GLA = Op(
    name="gla", gate=Gate.KEY, rule=Rule.ADD, paper="https://arxiv.org/abs/2312.06635",
    args=dict(q=Arg("B T H K"), k=Arg("B T H K"), v=Arg("B T HV V"), g=Arg("B T HV K", log_decay, free_dtype=True)),
    step=step, lower=Streams, parallel=True,
)  # fmt: skip


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Unpack[Options]) -> Output:
    """Gated linear attention with one gate per token, head and key channel.

    q, k: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H; g: [B, T, HV, K], natural log of the forget factor, at most 0,
    of any floating dtype. Options: `chunkwise.spec.Options`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return GLA(dict(q=q, k=k, v=v, g=g), **options)


chunk_gla, fused_chunk_gla, fused_recurrent_gla, parallel_gla = GLA.publish(gla)
