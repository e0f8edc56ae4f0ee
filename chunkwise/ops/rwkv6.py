"""RWKV-6 (Finch): the receptance reads before the token is written, and meets the token itself through a bonus.

    o_t = scale * (S_{t-1} + diag(u) k_t v_t')' r_t
    S_t = diag(exp w_t) S_{t-1} + k_t v_t'

Peng et al. Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence. COLM 2024.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..draw import log_decay
from ..recurrence import read, write
from ..spec import Arg, Gate, Op, Output, PlainOptions, Rule, Streams


def step(S: Tensor, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    pair = write(k, v)
    o = read(r, S + u[..., None] * pair)
    return w.exp()[..., None] * S + pair, o


RWKV6 = Op(
    name="rwkv6", gate=Gate.KEY, rule=Rule.ADD, paper="https://arxiv.org/abs/2404.05892",
    args=dict(
        r=Arg("B T H K"), k=Arg("B T H K"), v=Arg("B T HV V"), w=Arg("B T HV K", log_decay, free_dtype=True), u=Arg("HV K", free_dtype=True)
    ),
    step=step, lower=lambda r, k, v, w, u: Streams(r, k, v, g=w, u=u), parallel=True, query="r", options=PlainOptions,
)  # fmt: skip


def rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, **options: Unpack[PlainOptions]) -> Output:
    """Gated linear attention that reads before it writes.

    r (the query), k: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H; w: [B, T, HV, K], natural log of the forget factor,
    at most 0; u: [HV, K], bonus of the token's own pair; both of any floating dtype. Options: `chunkwise.spec.PlainOptions`.
    Returns o: [B, T, HV, V] in r's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return RWKV6(dict(r=r, k=k, v=v, w=w, u=u), **options)


chunk_rwkv6, fused_chunk_rwkv6, fused_recurrent_rwkv6, parallel_rwkv6 = RWKV6.publish(rwkv6)
