"""Gated DeltaProduct: several delta-rule steps a token, so that its transition is a product of Householder factors.

    S <- exp(g_t) S_{t-1};   for j = 1 .. R:  S <- S + beta_tj k_tj (v_tj - S' k_tj)'
    o_t = scale * S_t' q_t

Siems, Carstensen, Zela, Hutter, Pontil, Grazzi. DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products.
NeurIPS 2025.
Keys of length at most 1 and beta in [0, 1] (or [0, 2]) keep the state bounded; with longer keys it may grow without limit.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch.nn.functional as F
from torch import Tensor

from ..draw import log_decay, unit, write_strength
from ..recurrence import read, write
from ..spec import Arg, DeltaOptions, Gate, Op, Output, Raw, Rule, Streams


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if g is not None:
        S = g.exp()[..., None, None] * S
    for j in range(k.shape[1]):
        error = v[:, j] - read(k[:, j], S)
        S = S + write(k[:, j], error if beta is None else beta[:, j, :, None] * error)
    return S, read(q, S)


def lower(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None) -> Streams:
    """R rows a token: it forgets at the first and is read at the last."""
    R = k.shape[2]
    q = F.pad(q[:, :, None], (0, 0, 0, 0, R - 1, 0)).flatten(1, 2)
    g = None if g is None else F.pad(g[:, :, None], (0, 0, 0, R - 1)).flatten(1, 2)
    return Streams(q, k.flatten(1, 2), v.flatten(1, 2), g=g, beta=None if beta is None else beta.flatten(1, 2))


def passes(scan: Any, S0: Tensor | None, **inputs: Tensor) -> Output:
    B, T, R = inputs["k"].shape[:3]
    o, S = scan(lower(**inputs), S0, tokens=R)
    return o.view(B, T, R, *o.shape[2:])[:, :, -1], S


def raw(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None) -> tuple[Streams, Raw]:
    return Streams(q, k.flatten(1, 2), v.flatten(1, 2), g=g, beta=None if beta is None else beta.flatten(1, 2)), Raw()


GATED_DELTA_PRODUCT = Op(
    name="gated_delta_product", gate=Gate.SCALAR, rule=Rule.DELTA, paper="https://arxiv.org/abs/2502.10297",
    args=dict(
        q=Arg("B T H K"), k=Arg("B T R H K", unit), v=Arg("B T R HV V"), g=Arg("B T HV", log_decay, optional=True, free_dtype=True),
        beta=Arg("B T R HV", write_strength, optional=True, free_dtype=True),
    ),
    step=step, options=DeltaOptions, lower=lower, passes=passes, raw=raw,
)  # fmt: skip


def gated_delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, num_householder: int, **options: Unpack[DeltaOptions]
) -> Output:
    """Gated delta rule with R = num_householder steps a token.

    q: [B, T, H, K]; k: [B, T * R, H, K]; v: [B, T * R, HV, V] of one dtype, HV a multiple of H, a token's steps one after another;
    g: [B, T, HV], natural log of the forget factor, at most 0 (None: nothing is forgotten); beta: [B, T * R, HV], write strength (None: 1);
    both of any floating dtype. cu_seqlens counts tokens, not steps. Options: `chunkwise.spec.DeltaOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    if num_householder < 1:
        raise ValueError(f"gated_delta_product: num_householder must be at least 1, got {num_householder}")
    x = dict(q=q, k=k, v=v, g=g, beta=beta)
    for n in ("k", "v", "beta"):
        t = x[n]
        if isinstance(t, Tensor) and isinstance(q, Tensor) and q.ndim > 1:
            T = q.shape[1]
            if t.ndim < 2 or t.shape[1] != T * num_householder:
                rows = f"T * num_householder = {T} * {num_householder} rows on axis 1"
                raise ValueError(f"gated_delta_product: {n} must have {rows}, got {list(t.shape)}")
            x[n] = t.unflatten(1, (T, num_householder))
    return GATED_DELTA_PRODUCT(x, **options)


chunk_gated_delta_product, fused_chunk_gated_delta_product, fused_recurrent_gated_delta_product = GATED_DELTA_PRODUCT.publish(
    gated_delta_product
)
