"""Stage `carry`: from what the pieces of a sequence make of any state to the state each of them meets. See kernels/split.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.split import carry_kernel
from ..spec import Rule
from .launch import launch
from .problem import Problem
from .tune import Cut, config


class Ends(NamedTuple):
    """What a scan without output found of `held` pieces of each sequence: the first ones, in reverse the last."""

    ends: Tensor  # [N * held, HV, rows, K] fp32: last states from empty first ones, transposed; delta, forwards: the maps' rows behind
    kept: Tensor | None  # [N * held, HV, K] fp32, added: what is left of a first state
    held: int
    map: int  # first row of the maps


def can_carry(p: Problem) -> bool:
    """Whether a map [K, K] in fp32 fits the kernel's shared memory."""
    return p.rule is Rule.ADD or p.K <= 128


def empty_ends(p: Problem, held: int, map: int, maps: int, device: torch.device) -> Ends:
    """Memory for what a scan finds: `maps` rows of maps behind the states' `map` rows."""
    ends = torch.empty(p.N * held, p.HV, map + maps, p.K, dtype=torch.float32, device=device)
    kept = torch.empty(p.N * held, p.HV, p.K, dtype=torch.float32, device=device) if p.rule is Rule.ADD else None
    return Ends(ends, kept, held, map)


def carry(p: Problem, cut: Cut, found: Ends | None, maps: Ends | None, S0: Tensor | None, precision: str, *, reverse: bool) -> Tensor:
    """The first state of every piece of the scan proper, [N * pieces, HV, K, V] fp32; in reverse the gradient of its last one.

    S0 [N, HV, K, V]: the sequence's first state, in reverse its last one's gradient. maps: the scan that found the maps (delta).
    """
    if found is None or maps is None:
        raise ValueError("chunkwise engine: a stage was asked to carry states over pieces that no scan has seen")
    c = config("carry", p)
    delta = p.rule is not Rule.ADD
    firsts = torch.empty(p.N * cut.pieces, p.HV, p.K, p.V, dtype=torch.float32, device=found.ends.device)
    launch(
        carry_kernel, p.N * p.HV * -(-p.V // c.BV), found.ends, maps.ends, found.ends if found.kept is None else found.kept,
        found.ends if S0 is None else S0.contiguous(), firsts,
        p.HV, (cut.pieces - 1) * cut.finer, found.held, maps.held, cut.finer,
        K=p.K, V=p.V, BK=c.BK, BV=c.BV, ROWS=found.ends.shape[2], MAP=maps.map, MAP_ROWS=maps.ends.shape[2],
        DELTA=delta, INITIAL=S0 is not None, REVERSE=reverse, IP=precision, config=c,
    )  # fmt: skip
    return firsts
