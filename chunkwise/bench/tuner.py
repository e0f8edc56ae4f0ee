"""Measure which config of each kernel is the fastest on this card, among those that give the bits of the rule's.

A case is proved against float64 with the rules' configs; a candidate's outputs and gradients must then be equal to theirs, bit by bit, so
that a measured config can make nothing but time different. Candidates are built, and compared, in processes of their own: one that takes
the device's context with it is out. What is left is timed in turn with the rule's, in graphs of the whole call, two at a time. The search
goes on beside what was faster, one step at a time; what it ends at is timed once more, longer, and compared with states and a ragged end.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..engine.config import Config
from ..engine.crew import Crew
from ..engine.measured import Found, Key, key
from ..engine.problem import Problem, given
from ..engine.tune import RULES, padded
from .case import SIZES, Case, Inputs, draw
from .clock import Side, Time, race
from .measure import PASSES, free, ours
from .peer import Work
from .proof import detached, prove

GAIN = 0.99  # a candidate is taken where it needs at most this share of the rule's time, and four of five of its times are below
STEPS = 3  # from the rule's config, at most
LONGER = 3  # so many rounds more has the last race, of what was found beside the rule's
CONTEXT = 1 << 30  # bytes of the device that a process takes before it asks for any
NARROW = 64  # values: blocks are not made narrower than this, for what ptxas 12.8 does to narrow operands (docs/facts/kernels.md)


class Use(NamedTuple):
    """A kernel as a call launches it."""

    kernel: str
    key: Key
    ruled: Config  # what its rule says, whatever was measured
    V: int


class Best(NamedTuple):
    """The fastest config of a kernel, or the rule's own; ms of the whole call with either, and how many others gave the same bits."""

    use: Use
    config: Config
    ms: float
    ruled_ms: float
    tried: int
    case: str


def candidates(use: Use, c: Config) -> list[Config]:
    """What lies beside a config: one thing changed, or a block and its warps. The columns of a block of keys stay: sums go over them."""
    made = [replace(c, num_warps=w) for w in (c.num_warps // 2, 2 * c.num_warps) if 1 <= w <= 8]
    made += [replace(c, num_stages=s) for s in (c.num_stages - 1, c.num_stages + 1) if 1 <= s <= 4]
    for BV, w in ((c.BV // 2, c.num_warps // 2), (2 * c.BV, 2 * c.num_warps)):
        if min(16, c.BV) <= BV <= padded(use.V) and not BV < NARROW <= c.BV and BV:
            made += [replace(c, BV=BV, num_warps=n) for n in (c.num_warps, w) if 1 <= n <= 8]
    made += [replace(c, tma=not c.tma), replace(c, registers=168 if c.registers is None else None)]
    return [x for x in dict.fromkeys(made) if x not in (c, use.ruled)]


@contextmanager
def using(configs: Mapping[str, Config]) -> Iterator[None]:
    """Kernels run with these configs inside, others with their rules', whatever was measured."""
    before = dict(RULES)
    RULES.update({name: choice.rule for name, choice in before.items() if hasattr(choice, "rule")})
    RULES.update({name: lambda p, c=c: c for name, c in configs.items()})  # type: ignore[misc]
    try:
        yield
    finally:
        RULES.update(before)


def uses(call: Callable[[], Any], say: Callable[[str], None] = lambda line: None) -> list[Use]:
    """The kernels of a call, those first that it asks for first; not those that it asks for in several ways, which `say` is told."""
    seen: dict[str, set[Use]] = {}

    def spy(name: str, rule: Callable[[Problem], Config]) -> Callable[[Problem], Config]:
        def asked(p: Problem) -> Config:
            config = rule(p)
            seen.setdefault(name, set()).add(Use(name, key(name, p), config, p.V))
            return config

        return asked

    with using({}):
        RULES.update({name: spy(name, rule) for name, rule in RULES.items()})
        call()
    for name, found in seen.items():
        if len(found) > 1:
            say(f"{name}: the call runs it in {len(found)} ways: not tuned")
    return [next(iter(found)) for found in seen.values() if len(found) == 1]


def with_states(c: Case, x: Inputs) -> Work:
    """The calls of a case from a state and with the last one, gradients of both among the results."""
    op = c.member
    S0 = op.draw_state(c.sizes, c.N or c.B, dtype=torch.float32, device=x.do.device)
    leaves = {n: t.detach().requires_grad_() for n, t in x.x.items()} | {"S0": S0.requires_grad_()}

    def forward() -> dict[str, torch.Tensor]:
        o, S = op({n: leaves[n] for n in x.x}, form=c.form, initial_state=leaves["S0"], output_final_state=True, cu_seqlens=x.cu)
        return {"o": o, "S": given(S)}

    def step() -> dict[str, torch.Tensor]:
        made = forward()
        d = torch.autograd.grad(list(made.values()), list(leaves.values()), [x.do, made["S"].detach()], allow_unused=True)
        return {**made, **{f"d{n}": g for n, g in zip(leaves, d) if g is not None}}

    return Work(torch.no_grad()(forward), step)


@lru_cache(1)
def _rule(c: Case, backward: bool, states: bool, device: str) -> tuple[Callable[[], Any], dict[str, torch.Tensor]]:
    """The call, and what the rules' configs make of it."""
    work = (with_states if states else ours)(c, draw(c, torch.device(device)))
    call = work.step if backward and work.step is not None else work.forward
    with using({}):
        return call, detached(call())


def compare(c: Case, backward: bool, states: bool, kernel: str, config: Config, device: str) -> str:
    """In a worker: "" if the candidate gives the rule's bits, else what it does instead."""
    call, want = _rule(c, backward, states, device)
    same = True
    try:
        with using({kernel: config}):
            for _ in range(2):
                made = detached(call())
                same = same and all(torch.equal(made[n], t) for n, t in want.items())
                del made
    except Exception as error:  # it cannot be built, or does not fit
        try:
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
        except Exception:  # what comes after it here would fail too
            os._exit(1)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return "" if same else "other bits"


def workers(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


def room(call: Callable[[], Any], device: torch.device, jobs: int) -> int:
    """So many workers, of `jobs`, that their memory fits the device beside what is timed here: each has what the call needs, and what it
    is compared with."""
    if device.type != "cuda":
        return jobs
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    need = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    left = torch.cuda.mem_get_info(device)[0] - 4 * need
    return max(1, min(jobs, left // (2 * need + CONTEXT)))


def tune(
    c: Case,
    device: torch.device,
    *,
    backward: bool = True,
    jobs: int = 4,
    rounds: int | None = None,
    kernels: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Best]:
    """The fastest configs of a case's kernels, each kept while the next are tried; `kernels`: those alone; rounds: of a race, None: what
    fits into a tenth of a second; jobs: processes that build and compare, fewer where their memory would not fit.

    Raises ValueError where the call is wrong with the rules' configs, or runs no kernels.
    """
    free(device)
    x = draw(c, device)
    work = ours(c, x)
    calls = {p: call for p, call in (("forward", work.forward), ("forward+backward", work.step)) if call and (backward or not PASSES[p])}
    proof = prove(c, x, backward and work.step is not None)
    held: dict[str, Config] = {}
    made: list[Best] = []
    done: set[str] = set()
    with using({}):
        most = room(list(calls.values())[-1], device, jobs)
    with Crew(workers, most) as crew:
        for name, call in calls.items():
            with using({}):
                _, why = (proof if PASSES[name] else proof.outputs()).judge(detached(call()))
            if why:
                raise ValueError(f"tune: {c.op} is wrong before anything is tuned: {why}")
            found = [u for u in uses(call, say) if u.kernel not in done and (kernels is None or u.kernel in kernels)]
            done |= {u.kernel for u in found}
            case = f"{c.op} {','.join(str(c.sizes[n]) for n in SIZES)}{f',{c.N}' if c.N else ''} {c.dtype} {name}"
            search = Search(c, device, crew, PASSES[name], call, held, rounds, say)
            for u, config, tried in search(found):
                if not search.moves[u]:
                    say(f"{u.kernel}: makes no difference to the call, with {tried} others: nothing is kept")
                    continue
                try:
                    with_it, ruled = search.confirm(u, config)
                except (Uncaptured, torch.OutOfMemoryError) as error:
                    say(f"{u.kernel}: {error}: nothing is kept")
                    continue
                if config != u.ruled:
                    why = "" if with_it.p50 <= GAIN * ruled.p50 and with_it.p80 < ruled.p20 else "too little"
                    if why := why or search.elsewhere(u, config):
                        say(f"{u.kernel} {text(config)}: {1e3 * with_it.p50:.4f} ms, {1e3 * ruled.p50:.4f} by the rule: not kept, {why}")
                        config, with_it = u.ruled, ruled
                held[u.kernel] = config
                made.append(Best(u, config, 1e3 * with_it.p50, 1e3 * ruled.p50, tried, case))
    if not done:
        raise ValueError(f"tune: {c.op} runs no kernels on {device}")
    return made


class Uncaptured(RuntimeError):
    """A call that is no graph would be timed with whatever configs hold later."""


class Search:
    """Of one pass of a case."""

    def __init__(
        self, c: Case, device: torch.device, crew: Crew, backward: bool, call: Callable[[], Any], held: Mapping[str, Config],
        rounds: int | None, say: Callable[[str], None],
    ):  # fmt: skip
        self.c, self.device, self.crew, self.backward, self.call = c, device, crew, backward, call
        self.held, self.rounds, self.say = held, rounds, say
        self.moves: dict[Use, bool] = {}  # whether the call's time depends on the kernel's config at all

    def __call__(self, found: Sequence[Use]) -> Iterator[tuple[Use, Config, int]]:
        """Every kernel's fastest config so far, and how many others gave the same bits. All kernels take a step together, so that
        what builds always has work."""
        best = {u: u.ruled for u in found}
        self.moves = dict.fromkeys(found, False)
        seen: dict[Use, set[Config]] = {u: {u.ruled} for u in found}
        right = dict.fromkeys(found, 0)
        moved = set(found)
        for _ in range(STEPS):
            items = [(u, config) for u in found if u in moved for config in candidates(u, best[u]) if config not in seen[u]]
            moved = set()
            asked = [(self.c, self.backward, False, u.kernel, config, str(self.device)) for u, config in items]
            good: dict[Use, list[Config]] = {u: [] for u in found}
            for (u, config), why in zip(items, self.crew.each(compare, asked)):
                seen[u].add(config)
                if why == "":
                    good[u].append(config)
                else:
                    self.say(f"{u.kernel} {text(config)}: {'took the device with it' if why is None else why}")
            for u, those in good.items():
                right[u] += len(those)
                fastest = self.fastest(u, best[u], those)
                if fastest != best[u]:
                    best[u] = fastest
                    moved.add(u)
            if not moved:
                break
        for u in found:
            yield u, best[u], right[u]

    def fastest(self, u: Use, best: Config, good: Sequence[Config]) -> Config:
        """Each in turn with the best, two at a time: graphs of more may not fit."""
        share = {config: self.share(u, config, best) for config in good}
        for config, x in sorted(share.items(), key=lambda one: one[1])[:2]:
            self.say(f"{u.kernel} {text(config)}: {x:.3f} of {text(best)}")
        self.moves[u] |= any(not GAIN <= x <= 2 - GAIN for x in share.values() if x < float("inf"))
        least = min(share, key=share.__getitem__, default=best)
        return least if share.get(least, 1.0) <= GAIN else best

    def share(self, u: Use, config: Config, best: Config) -> float:
        try:
            times = self.race(u, (config, best), self.rounds)
        except (Uncaptured, torch.OutOfMemoryError) as error:
            self.say(f"{u.kernel} {text(config)}: cannot be timed: {' '.join(str(error).split())[:120]}")
            return float("inf")
        return times[config].work.p50 / times[best].work.p50

    def elsewhere(self, u: Use, config: Config) -> str:
        """"" if it gives the rule's bits with states and part of a chunk at the end too, whose kernels are others; else what it does."""
        if self.c.decode:
            return ""
        short = replace(self.c, T=self.c.T - 3)
        (why,) = self.crew.each(compare, [(short, self.backward, True, u.kernel, config, str(self.device))])
        return "it takes the device with it" if why is None else f"with states {why}" if why else ""

    def confirm(self, u: Use, config: Config) -> tuple[Any, Any]:
        """What was found and the rule's, once more and longer."""
        times = self.race(u, (config, u.ruled), None if self.rounds is None else LONGER * self.rounds, LONGER)
        return times[config].work, times[u.ruled].work

    def race(self, u: Use, configs: Sequence[Config], rounds: int | None, longer: int = 1) -> dict[Config, Time]:
        sides = {}
        for config in dict.fromkeys(configs):
            with using({**self.held, u.kernel: config}):
                side = Side(self.call, self.device)
                side.prepare(side.warm(3))  # a graph keeps what it was captured with
            if side.cuda and side.graph is None:
                raise Uncaptured(side.why)
            sides[text(config)] = side
        times = race(sides, rounds, 0.1 * longer, ready=True)
        return {config: times[text(config)] for config in configs}


def text(c: Config) -> str:
    more = [n for n, on in (("no tma", not c.tma), (f"registers {c.registers}", c.registers is not None)) if on]
    return ", ".join([f"BK {c.BK} BV {c.BV} warps {c.num_warps} stages {c.num_stages}", *more])


def kept(best: Sequence[Best], when: str, triton: str) -> dict[tuple[Key, Config], Found]:
    """As engine/measured.py keeps them."""
    return {
        (b.use.key, b.use.ruled): Found(b.config, b.case, round(b.ms, 4), round(b.ruled_ms, 4), b.tried, when, triton) for b in best
    }  # fmt: skip
