"""The ways in which members are called, and how much at a time, as far as they decide what is built."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from .cut import LONG


class Way(NamedTuple):
    """How a member is called, as far as it decides what is built."""

    grad: bool
    initial: bool  # from a given state
    final: bool  # with the last state
    tokens: int = 0  # so many; 0: as the load says
    pool: bool = False  # the states are in a pool: chunkwise.decode
    drafts: bool = False  # of which some may be rejected: after each other, and as a tree
    form: str = "auto"  # of members that have it
    raw: bool = False  # streams as layers' projections make them


WAYS = {
    "training": Way(True, False, False),
    "training with states": Way(True, True, True),
    "prefill": Way(False, False, True),
    "continuation": Way(False, True, True),
    "raw prefill": Way(False, False, True, raw=True),
    "raw continuation": Way(False, True, True, raw=True),
    "one token": Way(False, True, True, 1),
    "first token": Way(False, False, True, 1),
    "decoding": Way(False, True, True, 1, pool=True),
    "parallel training": Way(True, False, False, form="parallel"),
    "parallel training with states": Way(True, True, True, form="parallel"),
    "drafting": Way(False, True, True, 2, pool=True, drafts=True),
}
# (tokens of a row, value heads, sequences): blocks are narrowed by the heads of all sequences, up to 256; long ones are cut by their tokens
# and heads. The narrowest band of heads, 67 to 98 of 128 channels, ends at one and a half times what it begins with.
HEADS = tuple(sorted(n << i for n in (1, 3) for i in range(9) if n << i <= 256))
LOADS = tuple(x for x in product((LONG // 4, LONG // 2, LONG, 2 * LONG), HEADS, HEADS) if x[1] * x[2] <= HEADS[-1])
