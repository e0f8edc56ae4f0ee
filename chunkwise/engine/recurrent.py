"""The recurrence token by token: decoding, and short inputs. Its gradient is the chunk form's: the same function, recomputed."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..spec import Gate, Rule, Streams
from .layout import layout
from .problem import Problem


def forward(p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o [B, T, HV, V], the last state [N, HV, K, V] if `final`, and nothing to save."""
    p = dataclasses.replace(p, C=1)
    to, dtype, n = layout(p, x.q.device), p.compute, p.HV // p.H
    k, v, q = to.split(x.k, dtype), to.split(x.v, dtype), to.split(x.q, dtype).mul_(p.scale)  # [T, H, n, 1, D]
    e = k if x.e is None else to.split(x.e, dtype)
    beta = None if x.beta is None else to.split(x.beta, dtype)[..., None]
    a, b = (None if z is None else to.split(z, dtype) for z in (x.a, x.b))
    u = None if x.u is None else x.u.to(dtype).contiguous().view(p.H, n, 1, p.K)
    decay = None
    if x.g is not None and p.gate is not Gate.NONE:
        decay = to.split(x.g.expand(p.B, p.T, p.HV) if p.gate is Gate.HEAD else x.g, dtype).exp_()
        decay = decay.mT if p.gate is Gate.KEY else decay if p.gate is Gate.VALUE else decay[..., None]  # against [K, V]
    S = q.new_zeros(p.N, p.H, n, p.K, p.V) if S0 is None else to.sort(S0.to(dtype).reshape(p.N, p.H, n, p.K, p.V)).clone()
    o = torch.empty_like(v)
    for now, m in to.steps:
        s = S[:m]
        if u is not None:  # q reads before the write
            o[now] = q[now] @ s + (q[now] * u * k[now]).sum(-1, keepdim=True) * v[now]
        X = None if a is None else a[now] @ s  # reads before the token forgets
        if decay is not None:
            s *= decay[now]
        if p.rule is Rule.DELTA:
            X = v[now] - (e[now] @ s if X is None else X)
            s += k[now].mT * (X if beta is None else beta[now] * X)
        else:
            s += k[now].mT * v[now]
            if X is not None and b is not None:
                s += b[now].mT * X
        if u is None:
            o[now] = q[now] @ s
    return to.join(o, p.dtype), to.unsort(S).view(p.N, p.HV, p.K, p.V) if final else None, None
