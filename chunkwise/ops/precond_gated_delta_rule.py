"""The preconditioned gated delta rule: a token is written along its key rescaled by how much that channel has seen already.

    A_t = exp(g^A_t) A_{t-1} + beta^A_t k_t^2,   kt_t = k_t * x^(-softsign(log(A_t + eps) - c))          (per channel)
    S' = exp(g_t) S_{t-1};   S_t = S' + beta_t kt_t (v_t - S'' k_t)'      (S'' the transpose of S')
    o_t = scale * S_t' q_t

A is an elementwise scan before the pass and is kept as one more column of the state.
Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences. 2026.
Keys of length at most 1 and beta in [0, 1 / x] keep the state bounded; otherwise it may grow without limit.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ..draw import log_decay, unit, write_strength
from ..recurrence import read, write
from ..spec import Arg, Gate, GateOptions, Op, Output, Raw, Rule, Streams

CENTRE = -0.2  # c where log_atk_scale is None


def centre(*shape: int, **kw: Any) -> Tensor:
    """Random centres c."""
    return CENTRE + 0.1 * torch.randn(*shape, **kw)


def step(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g_atk: Tensor, g: Tensor, beta_atk: Tensor, beta: Tensor, log_atk_scale: Tensor | None,
    x: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    S, A = S[..., :-1], S[..., -1]
    A = g_atk.exp()[..., None] * A + beta_atk[..., None] * k * k
    r = (A + eps).log() - (CENTRE if log_atk_scale is None else log_atk_scale[:, None])
    written = k * x ** (-r / (1 + r.abs()))
    S = g.exp().reshape(*g.shape, *[1] * (S.ndim - g.ndim)) * S
    S = S + write(written, beta[..., None] * (v - read(k, S)))
    return torch.cat((S, A[..., None]), -1), read(q, S)


def passes(
    scan: Any, S0: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g_atk: Tensor, g: Tensor, beta_atk: Tensor, beta: Tensor,
    log_atk_scale: Tensor | None, x: float, eps: float,
) -> Output:  # fmt: skip
    n = v.shape[2] // k.shape[2]
    q, k, g_atk, beta_atk = (t if n == 1 else t.repeat_interleave(n, 2) for t in (q, k, g_atk, beta_atk))
    c = CENTRE if log_atk_scale is None else log_atk_scale.repeat_interleave(n)[:, None]
    dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
    seen = beta_atk.to(dtype)[..., None] * k.to(dtype).square()
    A, AT = scan.elementwise(seen, g_atk[..., None].expand_as(seen), None if S0 is None else S0[..., -1])
    rescaled = torch.exp(-F.softsign((A + eps).log() - c) * A.new_full((), x).log())
    o, S = scan(Streams(q, (k * rescaled).to(k.dtype), v, g=g, beta=beta, e=k), None if S0 is None else S0[..., :-1])
    return o, None if S is None else torch.cat((S, AT[..., None]), -1)


def raw(x: float, eps: float, log_atk_scale: Tensor | None, g_atk: Tensor, beta_atk: Tensor, **t: Tensor) -> tuple[Streams, Raw]:
    return Streams(**t), Raw(memory="seen", g_seen=g_atk, beta_seen=beta_atk, centre=log_atk_scale, middle=CENTRE, most=x, eps=eps)


def preconditioned(name: str, gate: Gate) -> Op:
    """The rule with a gate per head, or per key channel."""
    g = "B T HV" if gate is Gate.SCALAR else "B T HV K"
    return Op(
        name=name, gate=gate, rule=Rule.DELTA, options=GateOptions, paper="https://arxiv.org/abs/2604.21100",
        args=dict(
            q=Arg("B T H K"), k=Arg("B T H K", unit), v=Arg("B T HV V"), g_atk=Arg("B T H", log_decay, free_dtype=True),
            g=Arg(g, log_decay, free_dtype=True), beta_atk=Arg("B T H", write_strength, free_dtype=True),
            beta=Arg("B T HV", write_strength, free_dtype=True), log_atk_scale=Arg("H", centre, optional=True, free_dtype=True),
        ),
        step=step, lower=None, passes=passes, raw=raw, settings=dict(x=1.5, eps=1e-6), state="N HV K V+1", valid=Tensor.abs,
        fault=lambda x, eps: f"x must be above 0, got {x}" if not x > 0 else "" if eps >= 0 else f"eps must be at least 0, got {eps}",
    )  # fmt: skip


PRECOND_GATED_DELTA_RULE = preconditioned("precond_gated_delta_rule", Gate.SCALAR)


def precond_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g_atk: Tensor, g: Tensor, beta_atk: Tensor, beta: Tensor, log_atk_scale: Tensor | None = None,
    x: float = 1.5, eps: float = 1e-6, **options: Unpack[GateOptions],
) -> Output:  # fmt: skip
    """Gated delta rule with preconditioned write keys and one gate per token and head.

    q, k: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H; g_atk, beta_atk: [B, T, H], log decay (at most 0) and strength
    of A; g, beta: [B, T, HV], of the state; log_atk_scale: [H], the centre c (None: -0.2); all of any floating dtype; x: the largest
    rescaling, at least 1; eps: added to A. Options: `chunkwise.spec.GateOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V + 1] in float32 (float64 for float64 inputs), its last column A,
    or None. Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    inputs = dict(q=q, k=k, v=v, g_atk=g_atk, g=g, beta_atk=beta_atk, beta=beta, log_atk_scale=log_atk_scale)
    return PRECOND_GATED_DELTA_RULE(inputs, x=x, eps=eps, **options)


(
    chunk_precond_gated_delta_rule, fused_chunk_precond_gated_delta_rule, fused_recurrent_precond_gated_delta_rule,
) = PRECOND_GATED_DELTA_RULE.publish(precond_gated_delta_rule)  # fmt: skip
