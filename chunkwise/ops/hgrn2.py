"""HGRN2: a gated recurrence whose input gate is what its forget gate leaves over, widened to a matrix.

    S_t = diag(exp g_t) S_{t-1} + (1 - exp g_t) v_t'
    o_t = scale * S_t' q_t

Qin, Yang, Sun, Shen, Li, Sun, Zhong. HGRN2: Gated Linear RNNs with State Expansion. COLM 2024.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from ..draw import log_decay
from ..recurrence import read, write
from ..spec import Arg, Gate, Op, Output, PlainOptions, Raw, Rule, Streams


def step(S: Tensor, q: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    forget = g.exp()
    S = forget[..., None] * S + write(1 - forget, v)
    return S, read(q, S)


def lower(q: Tensor, v: Tensor, g: Tensor) -> Streams:
    n, g = v.shape[2] // q.shape[2], g.to(torch.promote_types(q.dtype, g.dtype))  # the input gate has q's digits, whatever g's are
    forget = g.exp()
    k = forget.detach() - forget - g.expm1().detach()  # expm1's value; its own gradient, its value plus one, cannot be as small as exp's
    return Streams(q, k.to(q.dtype), v, g=g if n == 1 else g.repeat_interleave(n, 2))


def raw(q: Tensor, v: Tensor, g: Tensor) -> tuple[Streams, Raw]:
    return Streams(q, q, v, g=g), Raw(keys=True)


HGRN2 = Op(
    name="hgrn2", gate=Gate.KEY, rule=Rule.ADD, paper="https://arxiv.org/abs/2404.07904",
    args=dict(q=Arg("B T H K"), v=Arg("B T HV V"), g=Arg("B T H K", log_decay, free_dtype=True)),
    step=step, lower=lower, raw=raw, parallel=True, options=PlainOptions,
)  # fmt: skip


def hgrn2(q: Tensor, v: Tensor, g: Tensor, **options: Unpack[PlainOptions]) -> Output:
    """Gated linear attention whose keys are 1 - exp(g).

    q: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H; g: [B, T, H, K], natural log of the forget factor, at most 0, of any
    floating dtype. Options: `chunkwise.spec.PlainOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return HGRN2(dict(q=q, v=v, g=g), **options)


chunk_hgrn2, fused_chunk_hgrn2, fused_recurrent_hgrn2, parallel_hgrn2 = HGRN2.publish(hgrn2)
