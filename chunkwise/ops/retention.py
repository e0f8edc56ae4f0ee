"""Retention: every head forgets at a rate of its own, fixed by its number.

    S_t = gamma_h S_{t-1} + k_t v_t',   gamma_h = 1 - 2^(-5-h)
    o_t = scale * S_t' q_t

Sun, Dong, Huang, Ma, Xia, Xue, Wang, Wei. Retentive Network: A Successor to Transformer for Large Language Models. 2023.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from ..engine.constant import constant
from ..recurrence import read, write
from ..spec import Arg, Gate, Op, Options, Output, Raw, Rule, Streams


@constant
def log_gamma(H: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Natural logarithm of every head's forget factor: [H]."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(H, dtype=torch.float64, device=device))).to(dtype)


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    gamma = 1 - 2.0 ** (-5 - torch.arange(S.shape[1], dtype=S.dtype, device=S.device))
    S = gamma[:, None, None] * S + write(k, v)
    return S, read(q, S)


def lower(q: Tensor, k: Tensor, v: Tensor) -> Streams:
    return Streams(q, k, v, g=log_gamma(v.shape[2], torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device))


def raw(q: Tensor, k: Tensor, v: Tensor) -> tuple[Streams, Raw]:
    return lower(q, k, v), Raw()


RETENTION = Op(
    name="retention", gate=Gate.HEAD, rule=Rule.ADD, paper="https://arxiv.org/abs/2307.08621",
    args=dict(q=Arg("B T H K"), k=Arg("B T H K"), v=Arg("B T HV V")),
    step=step, lower=lower, raw=raw, parallel=True,
)  # fmt: skip


def retention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]) -> Output:
    """Retention; rotary embedding of q and k is the caller's.

    q, k: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H. Options: `chunkwise.spec.Options`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return RETENTION(dict(q=q, k=k, v=v), **options)


chunk_retention, fused_chunk_retention, fused_recurrent_retention, parallel_retention = RETENTION.publish(retention)
