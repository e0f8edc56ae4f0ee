"""Random inputs with the statistics that real layers produce."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def normal(*shape: int, **kw: Any) -> Tensor:
    """Standard normal entries."""
    return torch.randn(*shape, **kw)


def unit(*shape: int, **kw: Any) -> Tensor:
    """Directions: vectors of length one along the last axis (the delta rules' keys)."""
    return F.normalize(torch.randn(*shape, **kw), dim=-1)


def log_decay(*shape: int, **kw: Any) -> Tensor:
    """Natural logarithms of forget gates: logsigmoid of a standard normal, so about -0.8 on average."""
    return F.logsigmoid(torch.randn(*shape, **kw))


def write_strength(*shape: int, **kw: Any) -> Tensor:
    """Numbers in (0, 1): how much of a token is written."""
    return torch.rand(*shape, **kw)


def offsets(T: int, N: int, generator: torch.Generator | None = None) -> Tensor:
    """cu_seqlens [N+1] (int32) of N packed sequences of random, possibly zero, lengths that add up to T."""
    cuts = torch.randint(0, T + 1, (N - 1,), generator=generator).sort().values
    return torch.cat((torch.zeros(1), cuts, torch.full((1,), T))).to(torch.int32)


def time_step(*shape: int, **kw: Any) -> Tensor:
    """Positive step sizes: softplus of a standard normal."""
    return F.softplus(torch.randn(*shape, **kw))


def rate(*shape: int, **kw: Any) -> Tensor:
    """Negative rates of decay a unit of time: minus the exponential of a standard normal."""
    return -torch.randn(*shape, **kw).exp()


RANGE: Mapping[Callable[..., Tensor], tuple[str, Callable[[Tensor], Tensor]]] = {
    log_decay: ("at most 0", lambda t: t <= 0),
    unit: ("vectors of length at most 1", lambda t: t.norm(dim=-1) < 1.01),  # as half types round them
    write_strength: ("in [0, 2]", lambda t: (t >= 0) & (t <= 2)),
    time_step: ("finite and at least 0", lambda t: t.isfinite() & (t >= 0)),
    rate: ("below 0", lambda t: t < 0),
}  # what is drawn, and where members are stable: see examination.py
