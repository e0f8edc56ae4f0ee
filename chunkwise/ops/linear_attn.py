"""Linear attention: the state adds up and never forgets.

    S_t = S_{t-1} + k_t v_t'
    o_t = scale * S_t' q_t

Normalised, every output is a weighted mean of the values seen so far; z is kept as one more column of S:

    z_t = z_{t-1} + k_t
    o_t = S_t' q_t / (z_t' q_t + 1e-10)

Katharopoulos, Vyas, Pappas, Fleuret. Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention. ICML 2020.
The weights k_s' q_t must not cancel: q and k come out of a positive feature map (elu + 1, relu, exp, ...).
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ..draw import time_step
from ..recurrence import read, write
from ..spec import Arg, Gate, Op, Options, Output, Raw, Rule, Streams

EPS = 1e-10


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    S = S + write(k, v)
    return S, read(q, S)


def normalized_step(S: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    S, z = S[..., :-1] + write(k, v), S[..., -1] + k
    return torch.cat((S, z[..., None]), -1), read(q, S) / ((q * z).sum(-1, keepdim=True) + EPS)


def passes(scan: Any, S0: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Output:
    """One pass in which v has a further column of ones: what it sums to is the normaliser. Half types leave their range there: float32."""
    dtype, half = q.dtype, q.dtype in (torch.bfloat16, torch.float16)
    q, k, v = (t.float() if half else t for t in (q, k, v))
    o, S = scan(Streams(q, k, F.pad(v, (0, 1), value=1.0)), S0, precision="tf32" if half else None)  # tf32 has all bits of both
    return (o[..., :-1] / (o[..., -1:] + EPS)).to(dtype), S


def raw(q: Tensor, k: Tensor, v: Tensor) -> tuple[Streams, Raw]:
    return Streams(q, k, v), Raw(memory="sum", eps=EPS)


LINEAR_ATTN = Op(
    name="linear_attn", gate=Gate.NONE, rule=Rule.ADD, paper="https://arxiv.org/abs/2006.16236",
    args=dict(q=Arg("B T H K"), k=Arg("B T H K"), v=Arg("B T HV V")),
    step=step, lower=Streams, parallel=True,
)  # fmt: skip

NORMALIZED_LINEAR_ATTN = Op(
    name="normalized_linear_attn", gate=Gate.NONE, rule=Rule.ADD, paper="https://arxiv.org/abs/2006.16236",
    args=dict(q=Arg("B T H K", time_step), k=Arg("B T H K", time_step), v=Arg("B T HV V")),
    step=normalized_step, lower=None, passes=passes, raw=raw, parallel=True, state="N HV K V+1", valid=Tensor.abs,
)  # fmt: skip


def linear_attn(q: Tensor, k: Tensor, v: Tensor, normalize: bool = False, **options: Unpack[Options]) -> Output:
    """Linear attention; feature maps are the caller's.

    q, k: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H; normalize: as `normalized_linear_attn`.
    Options: `chunkwise.spec.Options`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return (NORMALIZED_LINEAR_ATTN if normalize else LINEAR_ATTN)(dict(q=q, k=k, v=v), **options)


def normalized_linear_attn(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]) -> Output:
    """Linear attention whose outputs are weighted means of the values; feature maps are the caller's.

    q, k: [B, T, H, K], positive; v: [B, T, HV, V] of one dtype, HV a multiple of H. Options: `chunkwise.spec.Options`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V + 1] in float32 (float64 for float64 inputs), its last column
    the sum of the keys, or None. Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return NORMALIZED_LINEAR_ATTN(dict(q=q, k=k, v=v), **options)


chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn, parallel_linear_attn = LINEAR_ATTN.publish(linear_attn)
(
    chunk_normalized_linear_attn,
    fused_chunk_normalized_linear_attn,
    fused_recurrent_normalized_linear_attn,
    parallel_normalized_linear_attn,
) = NORMALIZED_LINEAR_ATTN.publish(normalized_linear_attn)
