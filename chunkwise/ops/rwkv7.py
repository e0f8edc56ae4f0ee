"""RWKV-7 (Goose): a generalised delta rule; what is removed, and along which direction, is the token's own choice.

    S_t = diag(exp w_t) S_{t-1} + b_t (S_{t-1}' a_t)' + k_t v_t'
    o_t = scale * S_t' r_t                                          (scale 1)

In the paper's letters a = -kappa, the removal key, and b = kappa * eta, how much of it is removed.
Peng et al. RWKV-7 "Goose" with Expressive Dynamic State Evolution. COLM 2025.
|a| <= 1 and b = -a * eta with eta in [0, 1] keep the state bounded; otherwise it may grow without limit.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..draw import log_decay, unit, write_strength
from ..recurrence import read, write
from ..spec import Arg, Gate, InverseOptions, Op, Output, Rule, Streams


def step(S: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    S = w.exp()[..., None] * S + write(b, read(a, S)) + write(k, v)
    return S, read(r, S)


RWKV7 = Op(
    name="rwkv7", gate=Gate.KEY, rule=Rule.DPLR, paper="https://arxiv.org/abs/2503.14456",
    args=dict(
        r=Arg("B T H K"), w=Arg("B T HV K", log_decay, free_dtype=True), k=Arg("B T H K"), v=Arg("B T HV V"), a=Arg("B T H K", unit),
        b=Arg("B T H K", write_strength),
    ),
    step=step, lower=lambda r, w, k, v, a, b: Streams(r, k, v, g=w, a=a, b=b), query="r", scale=1.0, options=InverseOptions,
    couple=lambda x: {**x, "b": -x["a"] * x["b"]},
)  # fmt: skip


def rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **options: Unpack[InverseOptions]) -> Output:
    """Generalised delta rule with a gate per key channel.

    r (the query), k, a, b: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H; w: [B, T, HV, K], natural log of the forget
    factor, at most 0, of any floating dtype. Options: `chunkwise.spec.InverseOptions`; scale defaults to 1, as in the paper.
    Returns o: [B, T, HV, V] in r's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return RWKV7(dict(r=r, w=w, k=k, v=v, a=a, b=b), **options)


chunk_rwkv7, fused_chunk_rwkv7, fused_recurrent_rwkv7 = RWKV7.publish(rwkv7)
