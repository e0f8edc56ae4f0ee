"""Which of many specialisations of kernels to build: enough of them that every choice, or pair of choices, is met."""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from itertools import combinations

from chunkwise.engine.precompile import Launch

Choice = tuple[str, object]


def choices(launch: Launch) -> frozenset[Choice]:
    """Of a launch: its switches and sizes, its warps and stages, and the types of its other arguments."""
    said = json.loads(launch.data)
    types = {f"type {n}": t for n, t in said["signature"].items() if t != "constexpr"}
    switches = {f"switch {place}": repr(x) for place, x in zip(said["constant_keys"], said["constant_vals"])}
    return frozenset({**switches, **types, "warps": said["options"]["num_warps"], "stages": said["options"]["num_stages"]}.items())


def sets(launch: Launch, together: int = 2) -> set[tuple[Choice, ...]]:
    """Every so many choices of a launch."""
    return set(combinations(sorted(choices(launch), key=repr), together))


def cover(launches: list[Launch], together: int = 2) -> list[Launch]:
    """For every kernel, launches that have all the choices (2 together: pairs of them) that `launches` have; those with most first."""
    kernels = defaultdict(list)
    for launch in launches:
        kernels[launch.name].append(launch)
    chosen = []
    for some in kernels.values():
        number: dict[Choice, int] = {}  # numbers are put together faster than what they stand for
        own = [sorted(number.setdefault(c, len(number)) for c in choices(launch)) for launch in some]
        left = [set(combinations(numbers, together)) for numbers in own]
        met: set[tuple[int, ...]] = set()
        heap = [(-len(new), i) for i, new in enumerate(left)]
        heapq.heapify(heap)
        while heap:
            count, i = heapq.heappop(heap)
            left[i] -= met
            if len(left[i]) < -count:  # others have met some of its own since it was counted
                heapq.heappush(heap, (-len(left[i]), i))
            elif left[i]:
                chosen.append(some[i])
                met |= left[i]
    return chosen
