"""Attention with bounded-memory control: every token is spread over M slots by a softmax over all tokens so far.

    z_t = log sum_{i <= t} exp s_i,   g_t = z_{t-1} - z_t,   w_t = exp(s_t - z_t)
    Hk_t = Hk_{t-1} diag(exp g_t) + k_t w_t',   Hv_t = diag(exp g_t) Hv_{t-1} + w_t v_t'
    o_t = Hv_t' softmax(scale * Hk_t' q_t)

Gated slot attention (`chunkwise.gsa`) whose gates and strengths are a softmax's. The state is [M, K + V + 1]: every slot's key, value and
z; z = -inf is a slot nothing was written to, as all are where initial_state is None.
Peng, Kasai, Pappas, Yogatama, Wu, Kong, Schwartz, Smith. ABC: Attention with Bounded-memory Control. ACL 2022.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from ..engine import elementwise
from ..recurrence import read, write
from ..spec import Arg, Gate, Op, Output, PlainOptions, Rule
from . import gsa


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    K = k.shape[-1]
    Hk, Hv, z = S[..., :K].mT, S[..., K:-1], S[..., -1]
    total = torch.logaddexp(z, s)
    keep, add = (z - total).exp(), (s - total).exp()
    Hk = Hk * keep[..., None, :] + write(k, add)
    Hv = keep[..., None] * Hv + write(add, v)
    return torch.cat((Hk.mT, Hv, total[..., None]), -1), read(read(q, Hk).softmax(-1), Hv)


def passes(scan: Any, S0: Tensor | None, q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Output:
    """exp(z) is kept as W exp(M), M the largest logit so far: W is an elementwise scan of numbers in (0, 1] and never out of range."""
    dtype = torch.float64 if s.dtype == torch.float64 else torch.float32
    logits, T, tiny = s.to(dtype).contiguous(), s.shape[1], torch.finfo(dtype).tiny
    z0 = None if S0 is None else S0[..., -1].to(dtype)
    M = elementwise.running_max(logits, scan.spread(z0, T), scan.starts(T))
    add = (logits - M).exp()
    if z0 is None:
        M0, W0 = M.new_full((), -torch.inf), M.new_zeros(())
        W, _ = scan.elementwise(add, scan.shift(M, M0) - M, None)
    else:
        M0 = z0.detach()
        start = (z0 - M0.clamp(min=torch.finfo(dtype).min)).exp()  # 1, or 0 where nothing was written
        W, _ = scan.elementwise(add, scan.shift(M, scan.spread(M0, T)) - M, start)
        M0, W0 = scan.spread(M0, T), scan.spread(start, T)
    kept = scan.shift(W, W0) * (scan.shift(M, M0) - M).exp()
    g = -torch.log1p(add / kept.clamp(min=tiny))
    o, S = gsa.passes(scan, None if S0 is None else S0[..., :-1], q, k, v, (add / W).to(s.dtype), g)
    if S is None:
        return o, None
    z = scan.last(M + W.log(), torch.full(S.shape[:3], -torch.inf, dtype=dtype, device=S.device) if z0 is None else z0)
    return o, torch.cat((S, z[..., None]), -1)


def no_state(zeros: Tensor) -> Tensor:
    return torch.cat((zeros[..., :-1], torch.full_like(zeros[..., -1:], -torch.inf)), -1)


ABC = Op(
    name="abc", gate=Gate.KEY, rule=Rule.ADD, paper="https://arxiv.org/abs/2110.02488",
    args=dict(q=Arg("B T H K"), k=Arg("B T H K"), v=Arg("B T HV V"), s=Arg("B T HV M")),
    step=step, lower=None, passes=passes, raw=gsa.raw, parallel=True, state="N HV M K+V+1", empty=no_state, options=PlainOptions,
)  # fmt: skip


def abc(q: Tensor, k: Tensor, v: Tensor, s: Tensor, **options: Unpack[PlainOptions]) -> Output:
    """Attention with bounded-memory control.

    q, k: [B, T, H, K]; v: [B, T, HV, V]; s: [B, T, HV, M], logits of the slots, of one dtype, HV a multiple of H.
    Options: `chunkwise.spec.PlainOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, M, K + V + 1] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument whose shape, dtype or device does not fit.
    """
    return ABC(dict(q=q, k=k, v=v, s=s), **options)


chunk_abc, fused_chunk_abc, fused_recurrent_abc, parallel_abc = ABC.publish(abc)
