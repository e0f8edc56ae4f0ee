"""Gated DeltaNet 2: erasing and writing have gates of their own, by key channel and by value channel.

    S' = diag(exp g_t) S_{t-1}
    S_t = S' + k_t (w_t * v_t - S'' (b_t * k_t))'      (S'' the transpose of S', * entry by entry)
    o_t = scale * S_t' q_t

With b = beta and w = beta in every channel it is Kimi delta attention (`chunkwise.kda`).
Hatamizadeh, Choi, Kautz. Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention. 2026.
Keys of length at most 1 and b in [0, 1] (or [0, 2]) keep the state bounded; with longer keys it may grow without limit.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..draw import log_decay, unit, write_strength
from ..recurrence import read, write
from ..spec import Arg, Gate, Op, Output, Raw, RawGateOptions, Rule, Streams


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    S = g.exp()[..., None] * S
    S = S + write(k, w * v) - write(k, read(b * k, S))
    return S, read(q, S)


def lower(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Streams:
    n = v.shape[2] // k.shape[2]
    erase = b * (k if n == 1 else k.repeat_interleave(n, 2))
    return Streams(q, k, (w * v).to(v.dtype), g=g, e=erase.to(k.dtype))


def raw(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> tuple[Streams, Raw]:
    return Streams(q, k, v, g=g, e=b), Raw(erases=True, writes=w)


GDN2 = Op(
    name="gdn2", gate=Gate.KEY, rule=Rule.DELTA, paper="https://arxiv.org/abs/2605.22791",
    args=dict(
        q=Arg("B T H K"), k=Arg("B T H K", unit), v=Arg("B T HV V"), g=Arg("B T HV K", log_decay, free_dtype=True),
        b=Arg("B T HV K", write_strength, free_dtype=True), w=Arg("B T HV V", write_strength, free_dtype=True),
    ),
    step=step, lower=lower, raw=raw, options=RawGateOptions,
)  # fmt: skip


def gdn2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, **options: Unpack[RawGateOptions]) -> Output:
    """Gated delta rule with an erase gate per key channel and a write gate per value channel.

    q, k: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H; g: [B, T, HV, K], natural log of the forget factor, at most 0;
    b: [B, T, HV, K], erase strength; w: [B, T, HV, V], write strength; all three of any floating dtype.
    Options: `chunkwise.spec.RawGateOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return GDN2(dict(q=q, k=k, v=v, g=g, b=b, w=w), **options)


chunk_gdn2, fused_chunk_gdn2, fused_recurrent_gdn2 = GDN2.publish(gdn2)
