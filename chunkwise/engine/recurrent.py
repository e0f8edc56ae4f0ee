"""The recurrence token by token: decoding, and short inputs. Its gradient is the chunk form's: the same function, recomputed."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..spec import Gate, Rule, Streams
from .layout import layout
from .problem import Problem


def forward(p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o [B, T, HV, V], the last state [N, HV, K, V] if `final`, and nothing to save.

    A token reads the state once, for o and for X together, and writes it once: o = q D S + (q.k) v + (q.w) X by what it is about to write.
    """
    p = dataclasses.replace(p, C=1)
    to, dtype, n = layout(p, x.q.device), p.compute, p.HV // p.H
    k, v, q = to.split(x.k, dtype), to.split(x.v, dtype), to.split(x.q, dtype).mul_(p.scale)  # [T, H, n, 1, D]
    key = value = None  # decays of the state's key side [T, H, n, 1, K or 1], and of its value side [T, H, n, 1, V]
    if x.g is not None and p.gate is not Gate.NONE:
        g = to.split(x.g.expand(p.B, p.T, p.HV) if p.gate is Gate.HEAD else x.g, dtype).exp_()
        key, value = (None, g) if p.gate is Gate.VALUE else (g if p.gate is Gate.KEY else g[..., None], None)
    forgets = (lambda r: r) if key is None else (lambda r: r * key)
    readers = [q if p.bonus else forgets(q)]
    writers, beta = [k], None
    if p.rule is Rule.DELTA:
        erase = x.a if p.before else x.e
        e = k if erase is None else to.split(erase, dtype)
        beta = None if x.beta is None else to.split(x.beta, dtype)[..., None]
        readers.append(e if p.before else forgets(e))
    elif x.a is not None and x.b is not None:
        readers.append(to.split(x.a, dtype))
        writers.append(to.split(x.b, dtype))
    own = [(q * w).sum(-1, keepdim=True) for w in writers]  # what q reads of its own token's writes
    if x.u is not None:
        own[0] = (q * x.u.to(dtype).view(p.H, n, 1, p.K) * k).sum(-1, keepdim=True)
    heads = (to.slots, p.H, n, 1, p.K)
    R = torch.cat([r.expand(heads) for r in readers], -2)  # [T, H, n, readers, K]
    W = torch.cat([w.expand(heads) for w in writers], -2).mT  # [T, H, n, K, writers]
    decay = None if key is None else key.mT  # against [K, V]
    S = q.new_zeros(p.N, p.H, n, p.K, p.V) if S0 is None else to.sort(S0.to(dtype).reshape(p.N, p.H, n, p.K, p.V)).clone()
    o = torch.empty_like(v)
    for now, m in to.steps:
        s, write = S[:m], v[now]
        read = R[now] @ s
        out = read[..., :1, :]
        if value is not None and not p.bonus:
            out = out * value[now]
        if p.rule is Rule.DELTA:
            write = v[now] - read[..., 1:, :] if p.before or value is None else v[now] - read[..., 1:, :] * value[now]
            write = write if beta is None else beta[now] * write
        torch.addcmul(out, own[0][now], write, out=o[now])
        if len(writers) > 1:
            o[now] += own[1][now] * read[..., 1:, :]
            write = torch.cat((write, read[..., 1:, :]), -2)
        if decay is not None:
            s *= decay[now]
        if value is not None:
            s *= value[now]
        flat = s.flatten(0, 2)
        flat.baddbmm_(W[now].flatten(0, 2), write.flatten(0, 2))
    return to.join(o, p.dtype), to.unsort(S).view(p.N, p.HV, p.K, p.V) if final else None, None
