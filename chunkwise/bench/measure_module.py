"""A module of chunkwise.nn, all sides: proved against float64, then timed in turn. A side that is wrong has no speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from .autotuner import share
from .clock import Side, peak, race
from .count import ceiling
from .measure import BUDGET, OURS, free, reason, timed
from .module import Function, Module
from .proof import GRADIENT, OUTPUT, allowed
from .record import release, surroundings
from .turn import turn

Results = dict[str, Tensor]


class Work:
    """A function's two calls on inputs of its own, which it may write into: gradients over what they are of, states."""

    def __init__(self, m: Module, function: Function, upstream: Sequence[Tensor]):
        self.function, self.first = function, (*m.leaves.values(), *upstream)
        self.upstream = [u.clone() for u in upstream]
        self.leaves = {n: t.detach().clone().requires_grad_(m.both is not None) for n, t in m.leaves.items()}
        self.state, self.before = m.state, None if m.state is None else m.state.clone()

    def restore(self) -> None:
        with torch.no_grad():
            for t, first in zip((*self.leaves.values(), *self.upstream), self.first):
                t.copy_(first)
            if self.state is not None and self.before is not None:
                self.state.copy_(self.before)

    def forward(self) -> Results:
        with torch.no_grad():
            return named(self.function(**self.leaves))

    def step(self) -> Results:
        with torch.enable_grad():
            made = named(self.function(**self.leaves))
            outputs = list(made.values())
            # Some are views of leaves, which change under them before a replay: detached, for autograd refuses to look at them then.
            d = torch.autograd.grad(outputs, list(self.leaves.values()), [u.to(o.dtype) for u, o in zip(self.upstream, outputs)])
        return {**{n: t.detach() for n, t in made.items()}, **{f"d{n}": g.detach() for n, g in zip(self.leaves, d)}}


def named(made: Any) -> Results:
    """A function's outputs by name."""
    made = made if isinstance(made, (tuple, list)) else (made,)
    return {f"o{i}" if i else "o": t for i, t in enumerate(made)}


class ModuleBench:
    """A module on a device, against others."""

    def __init__(
        self, m: Module, device: torch.device, others: Sequence[str], *, passes: Sequence[str], rounds: int | None = None,
        lock: Path | None = None, say: Callable[[str], None] = lambda line: None,
    ):  # fmt: skip
        self.m, self.device, self.rounds, self.lock, self.say = m, device, rounds, lock, say
        self.others = [n for n in others if n in m.others]
        self.passes = {n: n == "forward+backward" for n in passes if m.both is not None or n == "forward"}
        self.absent: dict[str, str] = {}

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for every side and pass. Warming up may go on beside other processes, proving and timing not."""
        m = self.m
        with torch.no_grad():
            made = named(m.plain(**m.leaves)).values()
        upstream = [torch.randn_like(t) if t.ndim else torch.ones_like(t) for t in made]
        del made
        if self.lock is not None and self.device.type == "cuda":
            share(self.lock)
        with turn(self.lock, alone=False):
            works = self._works(upstream)
        with turn(self.lock, alone=True):
            both = any(self.passes.values())
            truth, honest = (self._solved(dtype, upstream, both) for dtype in (torch.float64, None))
            for name, backward in self.passes.items():
                yield from self._pass(name, backward, works, truth, honest)

    def _works(self, upstream: Sequence[Tensor]) -> dict[str, Work]:
        works = {OURS: Work(self.m, self.m.ours, upstream)}
        for who in (OURS, *self.others):
            try:
                work = works.get(who) or Work(self.m, self.m.others[who](), upstream)
                for backward in self.passes.values():
                    try:
                        Side(work.step if backward else work.forward, self.device).wall()
                    finally:
                        work.restore()
                works[who] = work
                self.say(f"{who}: warm")
            except Exception as error:
                if who == OURS:
                    raise
                self.absent[who] = reason(error)
                self.say(f"{who}: absent: {self.absent[who]}")
            free(self.device)
        return works

    def _solved(self, dtype: torch.dtype | None, upstream: Sequence[Tensor], backward: bool) -> Results:
        """The module written plainly, in float64 or in its inputs' dtype."""
        work = Work(self.m, self.m.plain, [u if dtype is None else u.to(dtype) for u in upstream])
        work.leaves = {n: t.detach().to(dtype or t.dtype).requires_grad_(backward) for n, t in work.leaves.items()}
        return work.step() if backward else work.forward()

    def _pass(self, name: str, backward: bool, works: Mapping[str, Work], truth: Results, honest: Results) -> list[dict[str, Any]]:
        need = self.m.both if backward and self.m.both is not None else self.m.forward
        rows: dict[str, dict[str, Any]] = {}
        sides: dict[str, Side] = {}
        wanted = {n: t for n, t in truth.items() if backward or n.startswith("o")}
        for who, work in works.items():
            rows[who] = self._row(who, name)
            side = Side(work.step if backward else work.forward, self.device, restore=work.restore)
            try:
                side.restore()
                if self._right(who, rows[who], side.call(), wanted, honest):
                    rows[who]["peak_extra_bytes"] = peak(side)
                    sides[who] = side
            except Exception as error:
                rows[who] |= {"wrong": True, "why": reason(error)}
            free(self.device)
        times = race(sides, self.rounds, BUDGET[self.device.type]) if sides else {}
        for who, side in sides.items():
            if side.graph is not None and not self._right(who, rows[who], side.replayed(), wanted, honest):
                rows[who]["why"] = f"replayed: {rows[who]['why']}"
                continue
            rows[who] |= timed(side, times[who], need, ceiling(self.device, next(iter(self.m.leaves.values())).dtype))
        for side in sides.values():
            side.graph = side.kept = None
        free(self.device)
        return list(rows.values())

    def _right(self, who: str, row: dict[str, Any], made: Results, truth: Results, honest: Results) -> bool:
        errors, wrong = {}, []
        eps = torch.finfo(next(iter(self.m.leaves.values())).dtype).eps
        for n, t in truth.items():
            factor = GRADIENT if n.startswith("d") or who != OURS else OUTPUT
            bad, fair = ((x.double() - t).norm().item() / t.norm().item() for x in (made[n], honest[n]))
            most = allowed(fair, factor, eps)
            errors[n] = {"error": bad, "allowed": most}
            if not bad <= most:
                wrong.append(f"{n} is off by {bad:.1e}; {most:.1e} is allowed")
        row |= {"errors": errors, "wrong": bool(wrong), "why": "; ".join(wrong)}
        return not wrong

    def _row(self, who: str, name: str) -> dict[str, Any]:
        package = who.split(",")[0].replace("torch.compile", "torch")
        version = __version__ if who == OURS else release(package)
        about = {"case": self.m.record, "pass": name, "who": who, "version": version, "ran": [], "absent": dict(self.absent)}
        return {**surroundings(self.device), **about}
