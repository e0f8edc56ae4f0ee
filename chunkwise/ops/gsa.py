"""Gated slot attention: a bounded memory of M slots, each with a key and a value; reading is softmax attention over the slots.

    Hk_t = Hk_{t-1} diag(exp g_t) + k_t s_t'         [K, M]
    Hv_t = diag(exp g_t) Hv_{t-1} + s_t v_t'         [M, V]
    o_t = Hv_t' softmax(scale * Hk_t' q_t)

The state is both, slot by slot: [M, K + V], a slot's key before its value.
Zhang, Yang, Zhu, Zhang, Cui, Wang, Wang, Shi, Wang, Bi, Zhou, Fu. Gated Slot Attention for Efficient Linear-Time Sequence Modeling.
NeurIPS 2024.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from ..draw import log_decay, write_strength
from ..recurrence import read, write
from ..spec import Arg, Gate, Op, Output, PlainOptions, Raw, Rule, Streams


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    K = k.shape[-1]
    Hk, Hv = S[..., :K].mT, S[..., K:]
    Hk = Hk * g.exp()[..., None, :] + write(k, s)
    Hv = g.exp()[..., None] * Hv + write(s, v)
    p = read(q, Hk).softmax(-1)
    return torch.cat((Hk.mT, Hv), -1), read(p, Hv)


def passes(scan: Any, S0: Tensor | None, q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor) -> Output:
    """First the slots' keys, gated on their value side, are read by q; then the slots' values, gated on their key side, by the weights."""
    K = k.shape[-1]
    Hk0, Hv0 = (None, None) if S0 is None else (S0[..., :K].mT, S0[..., K:])
    logits, Hk = scan(Streams(q, k, s, g=g), Hk0, gate=Gate.VALUE)
    o, Hv = scan(Streams(logits.softmax(-1), s, v, g=g), Hv0, gate=Gate.KEY, scale=1.0)
    return o, torch.cat((Hk.mT, Hv), -1) if scan.final else None


def raw(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None = None) -> tuple[Streams, Raw]:
    return Streams(q, k, v, g=g, beta=s), Raw(memory="slots")


GSA = Op(
    name="gsa", gate=Gate.KEY, rule=Rule.ADD, paper="https://arxiv.org/abs/2409.07146",
    args=dict(
        q=Arg("B T H K"), k=Arg("B T H K"), v=Arg("B T HV V"), s=Arg("B T HV M", write_strength),
        g=Arg("B T HV M", log_decay, free_dtype=True),
    ),
    step=step, lower=None, passes=passes, raw=raw, parallel=True, state="N HV M K+V", options=PlainOptions,
)  # fmt: skip


def gsa(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, **options: Unpack[PlainOptions]) -> Output:
    """Gated slot attention.

    q, k: [B, T, H, K]; v: [B, T, HV, V]; s: [B, T, HV, M], write strength of every slot, of one dtype, HV a multiple of H;
    g: [B, T, HV, M], natural log of every slot's forget factor, at most 0, of any floating dtype. Options: `chunkwise.spec.PlainOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, M, K + V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return GSA(dict(q=q, k=k, v=v, s=s, g=g), **options)


chunk_gsa, fused_chunk_gsa, fused_recurrent_gsa, parallel_gsa = GSA.publish(gsa)
