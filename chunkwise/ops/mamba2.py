"""Mamba-2's state space duality: a scalar-gated linear attention in the letters of state space models.

    S_t = exp(dt_t A) S_{t-1} + B_t (dt_t x_t)'
    y_t = S_t' C_t + D x_t

Dao, Gu. Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality. ICML 2024.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ..draw import rate, time_step
from ..recurrence import read, write
from ..spec import Arg, Gate, Op, Output, PlainOptions, Raw, Rule, Streams


def step(
    S: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = (1 + dt.exp()).log()
    S = (dt * A).exp()[..., None, None] * S + dt[..., None, None] * write(B, x)
    y = read(C, S)
    return S, y if D is None else y + D[:, None] * x


def lower(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None, dt_softplus: bool) -> Streams:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    dt = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
    dt = F.softplus(dt) if dt_softplus else dt
    return Streams(C, B, (dt[..., None] * x).to(x.dtype), g=dt * A.to(dtype))


def passes(scan: Any, S0: Tensor | None, *, D: Tensor | None, **inputs: Any) -> Output:
    y, S = scan(lower(**inputs, D=D), S0)
    if D is not None:
        y = (y + D.to(torch.promote_types(y.dtype, torch.float32))[:, None] * inputs["x"]).to(y.dtype)
    return y, S


def raw(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None, dt_softplus: bool
) -> tuple[Streams, Raw]:
    return Streams(C, B, x, g=dt), Raw(rate=A, dt_bias=dt_bias, softplus=dt_softplus, skip=D)


MAMBA2 = Op(
    name="mamba2", gate=Gate.SCALAR, rule=Rule.ADD, paper="https://arxiv.org/abs/2405.21060",
    args=dict(
        x=Arg("B T HV V"), dt=Arg("B T HV", time_step, free_dtype=True), A=Arg("HV", rate, free_dtype=True), B=Arg("B T H K"),
        C=Arg("B T H K"), D=Arg("HV", optional=True, free_dtype=True), dt_bias=Arg("HV", time_step, optional=True, free_dtype=True),
    ),
    step=step, lower=lower, passes=passes, raw=raw, parallel=True, settings=dict(dt_softplus=False), scale=1.0, query="C",
    options=PlainOptions,
)  # fmt: skip


def mamba2(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, dt_bias: Tensor | None = None,
    dt_softplus: bool = False, **options: Unpack[PlainOptions],
) -> Output:  # fmt: skip
    """State space dual form of Mamba-2.

    x: [B, T, HV, V]; B, C: [B, T, H, K] of one dtype, HV a multiple of H (Mamba's groups); dt: [B, T, HV], step sizes, positive; A: [HV],
    negative; D: [HV], skip connection, or None; dt_bias: [HV], added to dt, or None; all four of any floating dtype; dt_softplus: dt is
    softplus(dt + dt_bias). Options: `chunkwise.spec.PlainOptions`; scale defaults to 1.
    Returns y: [B, T, HV, V] in x's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None. Mamba's own
    states are V before K: state_v_first=True.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return MAMBA2(dict(x=x, dt=dt, A=A, B=B, C=C, D=D, dt_bias=dt_bias), dt_softplus=dt_softplus, **options)


chunk_mamba2, fused_chunk_mamba2, fused_recurrent_mamba2, parallel_mamba2 = MAMBA2.publish(mamba2)
