"""Inputs of the kernels' tests."""

import torch

from chunkwise.engine.problem import Problem, problem
from chunkwise.spec import Gate, Rule, Streams


def draw(
    gate: Gate, rule: Rule, *, B=2, T=37, H=2, n=1, K=16, V=16, dtype=torch.float32, strong=1.0, beta=True, erase=False, early=False,
    bonus=False, own=False, seed=0,
) -> Streams:  # fmt: skip
    """Unit keys, gates of about -0.8 * strong, write strengths in (0, 1). early: the erase key reads first; own: a and b per value head."""
    r = torch.Generator().manual_seed(seed)
    rand = lambda *s: torch.randn(*s, generator=r)
    unit = lambda *s: torch.nn.functional.normalize(rand(*s), dim=-1)
    HV = H * n
    shape = {Gate.NONE: None, Gate.HEAD: (HV,), Gate.SCALAR: (B, T, HV), Gate.KEY: (B, T, HV, K), Gate.VALUE: (B, T, HV, V)}[gate]
    g = None if shape is None else torch.nn.functional.logsigmoid(rand(*shape)) * strong
    q, k, v = unit(B, T, H, K), unit(B, T, H, K), rand(B, T, HV, V)
    strength = torch.rand(B, T, HV, generator=r).to(dtype) if rule is Rule.DELTA and beta else None
    x = Streams(q.to(dtype), k.to(dtype), v.to(dtype), g, strength, e=unit(B, T, H, K).to(dtype) if erase else None)
    if early:
        x = x._replace(e=None, a=x.e)
    if rule is Rule.DPLR:
        a = unit(B, T, HV if own else H, K)
        x = x._replace(a=a.to(dtype), b=(-a * torch.rand(*a.shape, generator=r)).to(dtype))
    return x._replace(u=rand(HV, K)) if bonus else x


def posed(x: Streams, gate: Gate, rule: Rule, *, C=16, cu=None) -> Problem:
    return problem(x, cu, None, gate=gate, rule=rule, chunk=C, exact=True, scale=x.q.shape[-1] ** -0.5, precision="ieee")


def double(x: Streams) -> Streams:
    return Streams(*(None if t is None else t.double() for t in x))
