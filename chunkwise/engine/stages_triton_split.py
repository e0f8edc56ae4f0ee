"""Stage `carry`: from what the pieces of a sequence make of any state to the state each of them meets. See kernels/split.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.split import carry_kernel
from ..spec import Rule
from .cut import Cut
from .launch import launch
from .problem import Problem
from .tune import config


class Carried(NamedTuple):
    """What a scan leaves of the pieces of at most so many sequences, in its order, fp32 but for the maps."""

    states: Tensor  # [most, pieces - 1, HV, V, K]: the state after each piece but the last (carry has been there), transposed
    maps: Tensor | None  # not added: A' of the pieces between first and last, in the order of the tokens, as kernels/split.py has them
    kept: Tensor | None  # added: [most, pieces - 2, HV, K], what those leave of a first state


def carried_entries(cut: Cut, rule: Rule, most: int, HV: int, K: int, V: int) -> tuple[int, int]:
    """Numbers of the states and of the maps."""
    n = cut.pieces
    return (most * HV * K * V * (n - 1), 0 if rule is Rule.ADD else most * HV * K * K * (n - 2)) if n > 1 else (0, 0)


def carried_room(
    p: Problem, cut: Cut, most: int, device: torch.device, room: Tensor | None = None, maps: Tensor | None = None
) -> Carried:
    """Memory for what a scan leaves; room: where the states and the maps go, flat; maps: those that are there already."""
    inner = cut.pieces - 2
    states, many = carried_entries(cut, p.rule, most, p.HV, p.K, p.V)
    if room is None:
        room = torch.empty(states + (many if maps is None else 0), dtype=torch.float32, device=device)
    kept = torch.empty(most, inner, p.HV, p.K, dtype=torch.float32, device=device) if p.rule is Rule.ADD else None
    if maps is None and kept is None:
        maps = room[states:]  # of 16 bits: in halves, as the products of `carry` want them
        maps = maps.view(torch.float32 if p.dtype == torch.float32 else torch.bfloat16)
    return Carried(room[:states].view(most, cut.pieces - 1, p.HV, p.V, p.K), maps, kept)


def carry(p: Problem, cut: Cut, found: Carried, cuts: Tensor | None, precision: str, *, reverse: bool) -> None:
    """Make what a scan has found of the pieces the states that they leave, in place. cuts: of packed sequences, of `Index`."""
    c, unused = config("carry", p), found.states
    launch(
        carry_kernel, found.states.shape[0] * p.HV * -(-p.V // c.BV),
        found.states, *(unused if t is None else t for t in (found.maps, found.kept, cuts)), p.HV, cut.pieces,
        K=p.K, V=p.V, BK=c.BK, BV=c.BV, MAPS=found.maps is not None, REVERSE=reverse, PACKED=cuts is not None,
        IP=precision, config=c,
    )  # fmt: skip
