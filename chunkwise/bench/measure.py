"""One case, all sides: drawn, proved, then timed in turn. A side that is wrong has no speed."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import __version__
from ..engine.decode import decode
from . import peer as library
from .autotuner import share
from .case import POOLS, Case, Inputs, draw
from .clock import Samples, Side, Time, peak, race
from .count import Ceiling, Count, ceiling, count, floor
from .peer import Work
from .proof import Proof, detached, part, prove
from .record import surroundings
from .turn import turn

OURS = "chunkwise"
BUDGET = {"cuda": 1.0, "cpu": 20.0}  # seconds of timing a case and pass
KEPT = 1 / 16  # of a device's memory: what proofs that wait for their turn may take of it in one process
TORCH = ("chunk", "mixed", "recurrent")  # the engine's plans that run PyTorch's own operators; all others run kernels of ours
PASSES = {"forward": False, "forward+backward": True}


class TookTooLong(RuntimeError):
    """A first call outlasted what it was given."""

    SAYS = "its first call took more than"


@contextmanager
def limit(seconds: float | None) -> Iterator[None]:
    """Raise TookTooLong inside after so many seconds (in a process's main thread, between Python instructions)."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise TookTooLong(f"{TookTooLong.SAYS} {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ours(c: Case, x: Inputs) -> Work:
    if c.pool and x.S0 is not None:
        return step(c, x, x.S0)
    return library.torch_work(
        lambda t: c.member(t, form=c.form, initial_state=x.S0, output_final_state=x.S0 is not None, cu_seqlens=x.cu, **x.options), x
    )


def step(c: Case, x: Inputs, S0: Tensor) -> Work:
    """A step in a pool, every sequence's state in a slot of its own, in no order."""
    v_first = POOLS[c.pool][1]
    index = torch.randperm(c.B, generator=torch.Generator().manual_seed(0)).to(S0.device, torch.int32)
    slots = torch.empty_like(S0.mT.contiguous() if v_first else S0)

    def restore() -> None:
        slots[index.long()] = S0.mT if v_first else S0

    def forward() -> dict[str, Tensor]:
        return {"o": decode(c.member, x.x, slots, index, state_v_first=v_first, **x.options), "S": slots}

    def read(made: dict[str, Tensor]) -> dict[str, Tensor]:
        S = made["S"][index.long()]
        return {**made, "S": S.mT if v_first else S}

    return Work(forward, None, read, restore=restore)


class Watch(TorchDispatchMode):
    """Sees which plans the engine runs inside: the arguments of its one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "chunkwise::decode":
            self.seen = [{"backend": "kernels", "plan": "decode", "chunk": 0}]
        if func.name() in ("chunkwise::forward", "chunkwise::raw"):
            given = {"plan": "raw", **dict(zip((a.name for a in func._schema.arguments), args)), **(kwargs or {})}
            one = {"backend": "torch" if given["plan"] in TORCH else "kernels", "plan": given["plan"], "chunk": given["chunk"]}
            self.seen += [one] if one not in self.seen else []
        return func(*args, **(kwargs or {}))


def watched(call: Callable[[], Any]) -> tuple[Any, list[dict[str, Any]]]:
    """A call's result, and what the engine ran: {"backend": torch or kernels, "plan", "chunk": tokens} for every kind of pass."""
    with Watch() as watch:
        made = call()
    return made, watch.seen


def select(wanted: Sequence[str]) -> list[str]:
    """Peers by name: "all", "none", or names. Raises ValueError for one there is no file for."""
    known = library.peers()
    if list(wanted) == ["none"]:
        return []
    if list(wanted) == ["all"]:
        return list(known)
    for name in wanted:
        if name not in known:
            raise ValueError(f"bench: no peer {name!r}; there are {', '.join(known)}, none and all")
    return list(dict.fromkeys(wanted))


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def frozen() -> Iterator[None]:
    """What lives now is not looked through by the collector inside: of all that libraries keep, that took half of a row's time, at every
    `free` and capture. Afterwards all is looked through, also what was frozen before: it is for whoever owns the process."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if not isinstance(error, TookTooLong) else str(error)


def _milliseconds(s: Samples) -> dict[str, float]:
    return {n: round(1e3 * t, 6) for n, t in s._asdict().items()}


def timed(side: Side, t: Time, need: Count, most: Ceiling) -> dict[str, Any]:
    """What a row says about time."""
    least, seconds = floor(need, most), t.work.p50
    return {
        "method": side.method, "note": side.why,
        "ms": _milliseconds(t.work), "eager_ms": _milliseconds(t.eager), "host_ms": _milliseconds(t.host),
        "tb_s": need.bytes / seconds / 1e12, "tflop_s": need.flop / seconds / 1e12,
        "floor_ms": 1e3 * least, "to_floor": seconds / least,
        "ceiling": {"tb_s": most.bytes / 1e12, "tflop_s": most.flop / 1e12},
    }  # fmt: skip


class Bench:
    """A case on a device, against peers."""

    def __init__(
        self, c: Case, device: torch.device, peers: Sequence[str], *, passes: Sequence[str], rounds: int | None = None,
        lock: Path | None = None, warm_seconds: float | None = None, shortlist: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ):  # fmt: skip
        self.c, self.device, self.peers, self.rounds = c, device, peers, rounds
        self.passes = [p for p in passes if not (PASSES[p] and c.decode)]
        self.lock, self.warm_seconds, self.shortlist, self.say = lock, warm_seconds, shortlist, say
        self.absent: dict[str, str] = {}
        self.proof: Proof | None = None

    def warm(self) -> None:
        """First calls of all sides: compilers and autotuners; and the truth, which takes seconds of a long sequence. May go on beside other
        processes that warm up, inside their turn."""
        if self.lock is not None and self.device.type == "cuda":
            share(self.lock, self.shortlist)
        x = draw(self.c, self.device)
        self._works(x)
        if self.device.type == "cuda" and torch.cuda.memory_allocated(self.device) < KEPT * torch.cuda.mem_get_info(self.device)[1]:
            try:
                self.proof = self._proved(x)
            except torch.OutOfMemoryError:
                self.say("not enough memory for its proof beside others: it is made in its turn")
        free(self.device)

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for every side and pass, as they are done: timed alone."""
        with turn(self.lock, alone=True):
            free(self.device)
            x = draw(self.c, self.device)
            works = self._works(x)
            free(self.device)
            proof, self.proof = self.proof or self._proved(x), None
            for p in self.passes:
                yield from self._pass(p, x, works, proof if PASSES[p] else proof.outputs())

    def _proved(self, x: Inputs) -> Proof:
        return prove(self.c, x, any(PASSES[p] for p in self.passes))

    def _works(self, x: Inputs) -> dict[str, Work]:
        works = {OURS: ours(self.c, x)}
        if self.device.type == "cuda":
            self._first(OURS, works[OURS])
        for name in self.peers:
            module = library.peers()[name]
            why = self.absent.get(name) or library.lacking(module, self.c)
            if not why:
                try:
                    made = library.work(module, self.c, x)
                    if self.device.type == "cuda":
                        self._first(name, made)
                    works[name] = made
                except Exception as error:
                    why = reason(error)
            if why and name not in self.absent:
                self.absent[name] = why
                self.say(f"{name}: absent: {why}")
            free(self.device)
        return works

    def _first(self, name: str, w: Work) -> None:
        """First calls: compilers and autotuners."""
        with limit(self.warm_seconds), torch.autograd.set_multithreading_enabled(False):  # an alarm reaches the main thread alone
            for p in self.passes:
                call = w.step if PASSES[p] else w.forward
                if call is not None:
                    Side(call, self.device, w.wait, w.capturable).wall()
        self.say(f"{name}: warm")

    def _pass(self, name: str, x: Inputs, works: Mapping[str, Work], proof: Proof) -> list[dict[str, Any]]:
        c, device, backward = self.c, self.device, PASSES[name]
        need, most = count(c, x, backward), ceiling(device, c.torch_dtype)
        rows = {who: self._row(who, name) for who in works}
        sides: dict[str, Side] = {}
        proofs = {who: self._proof(who, proof, x, backward) for who in works}
        for who, w in works.items():
            call = w.step if backward else w.forward
            if call is None:
                continue
            try:
                side = Side(call, device, w.wait, w.capturable, w.restore)
                side.restore()
                made, rows[who]["ran"] = watched(side.call) if who == OURS else (side.call(), [])
                right = self._right(who, rows[who], proofs[who], w.read(made))
                del made
                if right:
                    rows[who]["peak_extra_bytes"] = peak(side)
                    sides[who] = side
            except Exception as error:
                rows[who] |= {"wrong": True, "why": reason(error)}
        free(device)
        times = race(sides, self.rounds, BUDGET[device.type]) if sides else {}
        for who, side in sides.items():
            if side.graph is not None:  # what is timed must be right too
                again = self._right(who, rows[who], proofs[who], works[who].read(side.replayed()))
                if not again:
                    rows[who]["why"] = f"replayed: {rows[who]['why']}"
                    continue
            self._time(rows[who], side, times[who], need, most)
        for side in sides.values():
            side.graph = side.kept = None
        free(device)
        return list(rows.values())

    def _proof(self, who: str, proof: Proof, x: Inputs, backward: bool) -> Proof:
        """The member's own, or that of a peer that computes another function."""
        own = getattr(library.peers().get(who), "truth", None)
        if own is None:
            return proof
        at = part(self.c)
        heads = type(at)(at.rows[-1:], at.heads[-1:], at.values[-(self.c.HV // self.c.H) :])
        return Proof(self.c, heads, *(own(self.c, x, backward, d, heads) for d in (torch.float64, self.c.torch_dtype)))

    def _right(self, who: str, row: dict[str, Any], proof: Proof, made: Mapping[str, Any]) -> bool:
        missing = [n for n in proof.truth if n not in made]
        errors, why = proof.judge(detached(made), other=who != OURS)
        why = "; ".join(x for x in (f"no {', '.join(missing)}" if missing else "", why) if x)
        row |= {"errors": errors, "wrong": bool(why), "why": why}
        return not why

    def _row(self, who: str, name: str) -> dict[str, Any]:
        version = __version__ if who == OURS else library.version(who)
        where = surroundings(self.device)
        return {**where, "case": self.c.record, "pass": name, "who": who, "version": version, "ran": [], "absent": dict(self.absent)}

    def _time(self, row: dict[str, Any], side: Side, t: Time, need: Count, most: Ceiling) -> None:
        row |= timed(side, t, need, most)
        if getattr(library.peers().get(row["who"]), "truth", None) is not None:
            for n in ("tb_s", "tflop_s", "floor_ms", "to_floor"):
                del row[n]  # counted for the member, not for another function
