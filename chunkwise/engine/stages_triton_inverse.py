"""The first stage where a rule corrects: T of every chunk, and what scans ask of each token. Streams may be raw (raw.prepares)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.inverse import inverse_kernel
from ..kernels.ready import length_kernel
from ..kernels.token import KINDS, token_kernel
from ..spec import Gate, Rule, Streams
from .launch import launch
from .problem import Problem
from .stages_triton import Index, alike, can_describe, chunks, dense, described, rows, solves, switches
from .tune import Config, config, padded


def token_room(p: Problem, at: Index, device: torch.device) -> Tensor | None:
    """Memory for what the kernel that makes T leaves of each token to scans forwards, fp32, see kernels/token.py: [slots, HV, kinds, C].

    None where scans read gates and strengths themselves: of float32, whose sums have two parts; where no inverse is made; of erase keys,
    which were not measured.
    """
    if p.rule is not Rule.DELTA or p.gate not in (Gate.NONE, Gate.SCALAR, Gate.KEY) or p.dtype == torch.float32 or p.erase or p.before:
        return None
    kinds = (KINDS.value if p.gate is Gate.SCALAR else 1) + p.raw.norm
    return torch.empty(at.slots, p.HV, kinds, p.C, dtype=torch.float32, device=device)


def tokens(p: Problem, x: Streams, at: Index) -> Tensor | None:
    """The same for the scans of the backward pass, where no inverse is made; None where they gain nothing by it, of up to 128 keys (GDN,
    H200, S2: 0.80 ms reversed either way), and where it was not measured: gates per key, more than 256 keys."""
    made = token_room(p, at, x.v.device) if 128 < p.K <= 256 and p.gate is not Gate.KEY else None
    if made is not None:
        g, beta = dense(x.g, x.v), dense(x.beta, x.v)
        launch(
            token_kernel, at.slots * p.HV, g, beta, chunks(at, x.v), made, p.T, p.HV,
            C=p.C, GATE=p.gate.value, USE_BETA=x.beta is not None, PACKED=p.cu_seqlens is not None, config=config("token", p),
        )  # fmt: skip
    return made


def inverse(p: Problem, x: Streams, at: Index, into: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
    """Stage `inverse` (delta; no gate per key): T of every chunk, [B, T, HV, C]: row t holds the columns of t's chunk.

    into: where it goes; tokens: where what the scans ask of each token goes.
    """
    c = config("inverse", p)
    (k, e), sk = alike(x.k, x.k if x.e is None else x.e)
    T = torch.empty(p.B, p.T, p.HV, p.C, dtype=p.dtype, device=k.device) if into is None else into
    own, numbers, on = ready(p, k)
    others = dense(x.g, k), dense(x.beta, k), *own, lengths(p, x.q) if p.raw.norm else k, chunks(at, k)
    tma, made = c.tma and can_describe(p, (k, sk), (e, sk)), T
    if tma:
        e, k = (described(t, sk, p.C, c.BK) for t in (e, k))
        made = described(T, p.HV * p.C, p.C, p.C)
    launch(
        inverse_kernel, at.slots * p.HV, e, k, *others, made, T if tokens is None else tokens, sk, p.T, p.HV, *numbers,
        BK=c.BK, GROUP=p.HV // p.H, USE_BETA=x.beta is not None, ERASE=x.e is not None, TOKENS=tokens is not None, BEFORE=p.before,
        TMA=tma, IPT=solves(p), **on, **switches(p), config=c,
    )  # fmt: skip
    return T


def ready(p: Problem, unused: Tensor) -> tuple[tuple[Tensor, ...], tuple[float, float], dict[str, object]]:
    """What kernels that prepare raw streams are told: tensors, numbers, switches (kernels/ready.py)."""
    raw = p.raw
    on = dict(NORM=raw.norm, RAW=raw.activation, BIAS=raw.dt_bias is not None, SIGMOID=raw.sigmoid)
    return (dense(raw.A_log, unused), dense(raw.dt_bias, unused)), (raw.lower_bound or 0.0, raw.strength), on


def lengths(p: Problem, q: Tensor) -> Tensor:
    """1 / |q|, fp32 [B, T, H]."""
    q, sq = rows(q)
    made, c = torch.empty(p.B, p.T, p.H, dtype=torch.float32, device=q.device), Config(padded(p.K), 0, 4, 1)
    many = max(1, 4096 // c.BK)
    launch(length_kernel, -(-made.numel() // many), q, made, sq, made.numel(), p.H, K=p.K, BK=c.BK, ROWS=many, config=c)
    return made
