"""The floor: the fewest bytes that must move and the matrix work that must be done, over what the device can do."""

from __future__ import annotations

import time
from functools import cache
from typing import NamedTuple

import torch

from ..spec import Rule
from .case import Case, Inputs

CHUNK = 64  # tokens: the matrix work of the chunk form is counted at this length


class Count(NamedTuple):
    bytes: int  # every input read once, every output written once
    flop: int  # of matrix products


class Ceiling(NamedTuple):
    """What the device did when asked to copy, and to multiply matrices, just before."""

    bytes: float  # a second, read plus written
    flop: float  # a second


def count(c: Case, x: Inputs, backward: bool) -> Count:
    """Bytes and FLOP of a forward, or of a forward and its backward (inputs and do read again, gradients written).

    A token-head needs at chunks of C: add 2C(K+V) + 4KV forward and 5C(K+V) + 10KV backward; delta 4C(K+V) + 6KV + C^2 and
    10C(K+V) + 18KV + 4C^2; dplr 10CK + 8CV + 8KV + C^2 and 2.5 times that.
    """
    own = sum(t.numel() * t.element_size() for t in x.x.values())
    o = x.do.numel() * x.do.element_size()
    state = 0 if x.S0 is None else 2 * x.S0.numel() * x.S0.element_size()
    C, K, V = min(CHUNK, c.T), c.K, c.V
    forward, back = {
        Rule.ADD: (2 * C * (K + V) + 4 * K * V, 5 * C * (K + V) + 10 * K * V),
        Rule.DELTA: (4 * C * (K + V) + 6 * K * V + C * C, 10 * C * (K + V) + 18 * K * V + 4 * C * C),
        Rule.DPLR: (10 * C * K + 8 * C * V + 8 * K * V + C * C, 25 * C * K + 20 * C * V + 20 * K * V + 5 * C * C // 2),
    }[c.member.rule]
    if c.decode:  # the token form: read, write and, where there is one, the second read
        forward = 4 * K * V if c.member.rule is Rule.ADD else 6 * K * V
    tokens = c.B * c.T * c.HV
    return Count(own + o + state + backward * (2 * own + o), tokens * (forward + backward * back))


@cache
def ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """Measured on this device: a large copy and a large square product of random matrices, the best of several."""
    cuda = device.type == "cuda"
    n, side, rounds = (1 << 28, 8192, 8) if cuda else (1 << 24, 1024, 4)
    if cuda and dtype not in (torch.bfloat16, torch.float16):
        side = 4096
    source = torch.randn(n, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def best(work) -> float:
        seconds = []
        for _ in range(rounds):
            if cuda:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])

    return Ceiling(8 * n / best(lambda: target.copy_(source)), 2 * side**3 / best(lambda: a @ b))


def floor(need: Count, most: Ceiling) -> float:
    """Seconds below which the work cannot be done."""
    return max(need.bytes / most.bytes, need.flop / most.flop)
