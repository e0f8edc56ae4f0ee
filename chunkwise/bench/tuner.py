"""Measure which config of each kernel is the fastest on this card, among those that give the bits of the rule's.

A case is proved against float64 with the rules' configs; a candidate's outputs and gradients must then be equal to theirs, bit by bit, so
that a measured config can make nothing but time different. Candidates are built, and compared, in processes of their own: one that takes
the device's context with it is out. What is left is timed in turn with the rule, in graphs of the whole call.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..engine.config import Config
from ..engine.crew import Crew
from ..engine.measured import Key, key
from ..engine.problem import Problem
from ..engine.tune import RULES, padded
from .case import Case, draw
from .clock import Side, race
from .measure import ours
from .proof import detached, prove

GAIN = 0.98  # a candidate is taken where it needs at most this share of the rule's time
NARROW = 64  # values: blocks are not made narrower than this, for what ptxas 12.8 does to narrow operands (docs/facts/kernels.md)
PASSES = {"forward": False, "forward+backward": True}


class Use(NamedTuple):
    """A kernel as a call launches it."""

    kernel: str
    key: Key
    config: Config
    V: int


class Winner(NamedTuple):
    """A config that beat the rule's; ms of the whole call with either."""

    use: Use
    config: Config
    ms: float
    before: float


def candidates(use: Use) -> list[Config]:
    """One thing changed at a time, warps and stages together. The columns of a block of keys stay: sums go over them."""
    c = use.config
    warps = [w for w in (c.num_warps // 2, c.num_warps, 2 * c.num_warps) if 1 <= w <= 8]
    made = [replace(c, num_warps=w, num_stages=s) for w in warps for s in (1, 2, 3, 4)]
    for BV in (c.BV // 2, 2 * c.BV):
        if min(16, c.BV) <= BV <= padded(use.V) and not BV < NARROW <= c.BV and BV:
            made += [replace(c, BV=BV, num_warps=w) for w in warps]
    made += [replace(c, tma=not c.tma)]
    if c.registers is not None:
        made += [replace(c, registers=None)]
    return [x for x in dict.fromkeys(made) if x != c]


@contextmanager
def using(configs: Mapping[str, Config]) -> Iterator[None]:
    """Kernels run with these configs inside, whatever rules and measurements say."""
    before = {name: RULES[name] for name in configs}
    RULES.update({name: lambda p, c=c: c for name, c in configs.items()})  # type: ignore[misc]
    try:
        yield
    finally:
        RULES.update(before)


def uses(call: Callable[[], Any]) -> list[Use]:
    """The kernels of a call, those first that it asks for first; not those that it asks for with more than one config."""
    seen: dict[str, set[Use]] = {}

    def spy(name: str, rule: Callable[[Problem], Config]) -> Callable[[Problem], Config]:
        def asked(p: Problem) -> Config:
            config = rule(p)
            seen.setdefault(name, set()).add(Use(name, key(name, p), config, p.V))
            return config

        return asked

    before = dict(RULES)
    RULES.update({name: spy(name, rule) for name, rule in before.items()})
    try:
        call()
    finally:
        RULES.update(before)
    return [next(iter(found)) for found in seen.values() if len(found) == 1]


@lru_cache(1)
def _rule(c: Case, backward: bool, device: str) -> tuple[Callable[[], Any], dict[str, torch.Tensor]]:
    """The call, and what the rules' configs make of it."""
    work = ours(c, draw(c, torch.device(device)))
    call = work.step if backward and work.step is not None else work.forward
    return call, detached(call())


def compare(c: Case, backward: bool, kernel: str, config: Config, device: str) -> str:
    """In a worker: "" if the candidate gives the rule's bits, else what it does instead."""
    call, want = _rule(c, backward, device)
    try:
        with using({kernel: config}):
            got = detached(call())
            again = detached(call())
    except Exception as error:  # it cannot be built, or does not fit
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    same = all(torch.equal(got[n], t) and torch.equal(again[n], t) for n, t in want.items())
    return "" if same else "other bits"


def workers(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


def tune(
    c: Case,
    device: torch.device,
    *,
    backward: bool = True,
    jobs: int = 4,
    rounds: int | None = None,
    kernels: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Winner]:
    """The configs that beat the rules' in a case, kernel by kernel, each kept while the next are tried; `kernels`: those alone.

    Raises ValueError where the call is wrong with the rules' configs, or runs no kernels.
    """
    x = draw(c, device)
    work = ours(c, x)
    calls = {p: call for p, call in (("forward", work.forward), ("forward+backward", work.step)) if call and (backward or not PASSES[p])}
    proof = prove(c, x, backward and work.step is not None)
    held: dict[str, Config] = {}
    won: list[Winner] = []
    done: set[str] = set()
    for name, call in calls.items():
        _, why = (proof if PASSES[name] else proof.outputs()).judge(detached(call()))
        if why:
            raise ValueError(f"tune: {c.op} is wrong before anything is tuned: {why}")
        found = [u for u in uses(call) if u.kernel not in done and (kernels is None or u.kernel in kernels)]
        done |= {u.kernel for u in found}
        items = [(c, PASSES[name], u.kernel, config, str(device)) for u in found for config in candidates(u)]
        good: dict[str, list[Config]] = {}
        crew = Crew(workers, jobs)
        with crew.pool:
            for item, why in zip(items, crew.each(compare, items)):
                if why == "":
                    good.setdefault(item[2], []).append(item[3])
                else:
                    say(f"{item[2]} {text(item[3])}: {'took the device with it' if why is None else why}")
        for u in found:
            best = _fastest(call, u, good.get(u.kernel, []), held, device, rounds, say)
            if best is not None:
                won.append(best)
                held[u.kernel] = best.config
    if not done:
        raise ValueError(f"tune: {c.op} runs no kernels on {device}")
    return won


def _fastest(
    call: Callable[[], Any], u: Use, good: Sequence[Config], held: Mapping[str, Config], device: torch.device, rounds: int | None,
    say: Callable[[str], None],
) -> Winner | None:  # fmt: skip
    """The best of the candidates, if it beats the rule's config; all in turn, beside what is held of other kernels."""
    if not good:
        return None
    sides = {}
    for config in (u.config, *good):
        with using({**held, u.kernel: config}):
            side = Side(call, device)
            side.prepare(side.warm(3))  # a graph keeps what it was captured with
        if side.graph is not None or device.type != "cuda":
            sides[config] = side
    times = race({text(config): side for config, side in sides.items()}, rounds, 0.5, ready=True)
    ms = {config: 1e3 * times[text(config)].work.p50 for config in sides}
    for config in sorted(ms, key=ms.__getitem__)[:3]:
        say(f"{u.kernel} {text(config)}: {ms[config]:.4f} ms{' (rule)' if config == u.config else ''}")
    best = min(ms, key=ms.__getitem__)
    if best == u.config or u.config not in ms or ms[best] > GAIN * ms[u.config]:
        return None
    return Winner(u, best, ms[best], ms[u.config])


def text(c: Config) -> str:
    more = [n for n, on in (("no tma", not c.tma), (f"registers {c.registers}", c.registers is not None)) if on]
    return ", ".join([f"BK {c.BK} BV {c.BV} warps {c.num_warps} stages {c.num_stages}", *more])


def kept(winners: Sequence[Winner]) -> dict[Key, Config]:
    """As engine/measured.py keeps them."""
    return {w.use.key: w.config for w in winners}
