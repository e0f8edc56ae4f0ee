"""A pass of the engine by operators that PyTorch differentiates, as often as one likes: the pipeline of chunk.py with nothing in place.

It is there for derivatives of gradients (derivative.py), and takes the time and room that PyTorch's own gradients take.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..spec import Gate, Rule, Streams
from .decay import Cumulated
from .problem import Problem, given

CHUNK = {Gate.KEY: 16, Gate.VALUE: 16}  # tokens; gates of channels have [C, C, D] decays, and so shorter ones
LONG = 64


def forward(p: Problem, x: Streams, S0: Tensor | None) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and the last state [N, HV, K, V]."""
    if S0 is None:
        S0 = x.q.new_zeros(p.N, p.HV, p.K, p.V)
    S0 = S0.to(p.compute)
    if p.cu_seqlens is None:
        o, ST = _dense(p, x, S0)
        return o.to(p.dtype), ST
    ends = (p.cu_seqlens if p.cu_seqlens_cpu is None else p.cu_seqlens_cpu).tolist()
    made = [
        _dense(p, Streams._make(t if t is None or t.ndim < 3 else t[:, a:b] for t in x), S0[n : n + 1])
        for n, (a, b) in enumerate(zip(ends, ends[1:]))
    ]
    if not made:
        return x.v.new_zeros(1, 0, p.HV, p.V), S0
    return torch.cat([o for o, _ in made], 1).to(p.dtype), torch.cat([S for _, S in made])


def _dense(p: Problem, x: Streams, S: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence a sample."""
    T, n = x.q.shape[1], p.HV // p.H
    C = CHUNK.get(p.gate, LONG)
    if not T:
        return x.v.to(p.compute), S

    def cut(t: Tensor | None) -> Tensor:
        """[B, T, H or HV, D] -> [chunks, B, HV, C, D]; tokens that fill the last chunk are zeros, which neither forget nor write."""
        t = given(t).to(p.compute)
        t = t if t.shape[2] == p.HV else t.repeat_interleave(n, 2)
        return F.pad(t, (0, 0, 0, 0, 0, -T % C)).unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4)

    delta, bonus = p.rule is Rule.DELTA, x.u is not None
    q, k, v = cut(x.q) * p.scale, cut(x.k), cut(x.v)
    key, value = _decays(p, x, cut)
    r = base = w = None
    Mrw = Mqw = Mqk = None
    if delta:
        e = k if not p.erase else cut(x.a if p.before else x.e)
        beta = torch.ones_like(k[..., :1]) if x.beta is None else cut(x.beta[..., None])
        r, w, base = -beta * e, k, beta * v
    else:
        Mqk = key.scores(q, k, 1 if bonus else 0, bonus)
        if x.u is not None:
            Mqk = Mqk + torch.diag_embed((q * x.u.to(p.compute)[:, None] * k).sum(-1))
        if p.rule is Rule.DPLR:
            r, w = cut(x.a), cut(x.b)
            base = key.scores(r, k, 1, True) @ v
    if r is not None and w is not None:
        Mrw, Mqw = key.scores(r, w, 1, p.before), key.scores(q, w, 0, False)
        r, w = r * key.starts(p.before), w * key.ends
    start, k_end, o = q * key.starts(bonus), k * key.ends, []
    v_end = v * value.ends
    inside = None if Mqk is None else value.mixed(Mqk, v)
    for i in range(len(q)):
        out = start[i] @ S * value.starts(False)[i]
        out = out if inside is None else out + inside[i]
        left = S * key.total[i].mT * value.total[i]
        if not delta:
            left = left + k_end[i].mT @ v_end[i]
        if Mrw is not None and Mqw is not None:
            L = torch.eye(C, dtype=p.compute, device=S.device) - Mrw[i]
            X = torch.linalg.solve_triangular(L, given(base)[i] + given(r)[i] @ S, upper=False, unitriangular=True)
            out, left = out + Mqw[i] @ X, left + given(w)[i].mT @ X
        o.append(out)
        S = left
    return torch.stack(o).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :T].contiguous(), S


class _Decay:
    """Of one side of the state inside chunks, from log decays g [chunks, B, HV, C, D or 1]; no exponent is above zero."""

    def __init__(self, g: Tensor):
        self.upto, self.before = Cumulated.of(g, -2)
        last = self.upto[..., -1:, :]
        self.ends, self.total = (last - self.upto).exp(), last.exp()  # from a token to its chunk's end; over the whole chunk

    def starts(self, before: bool) -> Tensor:
        """From the chunk's start to a token; before: until it forgets itself."""
        return (self.before if before else self.upto).exp()

    def _pairs(self, drop: int, before: bool) -> Tensor:
        """[..., C, C, D or 1]: from a writer to a reader `drop` tokens later at least, else 0."""
        E = (self.before if before else self.upto)[..., :, None, :] - self.upto[..., None, :, :]
        C = E.shape[-2]
        never = torch.ones(C, C, dtype=torch.bool, device=E.device).triu(1 - drop)
        return E.masked_fill(never[..., None], -torch.inf).exp()

    def scores(self, x: Tensor, y: Tensor, drop: int, before: bool) -> Tensor:
        """Readers x by writers y, [..., C, C]."""
        E = self._pairs(drop, before)
        return x @ y.mT * E[..., 0] if E.shape[-1] == 1 else torch.einsum("...ik,...jk,...ijk->...ij", x, y, E)

    def mixed(self, M: Tensor, v: Tensor) -> Tensor:
        """What scores M make of v."""
        E = self._pairs(0, False)
        return M * E[..., 0] @ v if E.shape[-1] == 1 else torch.einsum("...ij,...jv,...ijv->...iv", M, v, E)


def _decays(p: Problem, x: Streams, cut: Callable[[Tensor], Tensor]) -> tuple[_Decay, _Decay]:
    """On the key side of the state, on its value side."""
    none = torch.zeros_like(cut(x.v[..., :1]))
    if x.g is None or p.gate is Gate.NONE:
        return _Decay(none), _Decay(none)
    g = x.g.expand(*x.q.shape[:2], p.HV) if p.gate is Gate.HEAD else x.g
    own = _Decay(cut(g if g.ndim == 4 else g[..., None]))
    return (_Decay(none), own) if p.gate is Gate.VALUE else (own, _Decay(none))
