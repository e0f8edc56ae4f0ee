"""How long a call takes: sides in turn, medians of many; and how much memory it needs beyond its inputs and outputs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST, MOST = 5, 100  # rounds
STABLE = 0.9  # a warm-up is over when a call takes at least this share of the one before
CACHE = 1 << 28  # bytes written between two timed replays, so that no side finds its inputs in the cache


class Samples(NamedTuple):
    """Seconds: 20th, 50th and 80th percentile."""

    p20: float
    p50: float
    p80: float


def percentiles(seconds: Sequence[float]) -> Samples:
    s = sorted(seconds)
    return Samples(*(s[round(p * (len(s) - 1))] for p in (0.2, 0.5, 0.8)))


class Side:
    """One contender: `call` runs once; `wait` waits until its result is there."""

    def __init__(
        self, call: Callable[[], Any], device: torch.device, wait: Callable[[Any], None] | None = None, capturable: bool = True,
        restore: Callable[[], None] | None = None,
    ):  # fmt: skip
        self.call, self.device, self.restore = call, device, restore or (lambda: None)
        self.cuda = device.type == "cuda"
        self.wait = wait or (lambda made: torch.cuda.synchronize(device) if self.cuda else None)
        self.capturable = capturable and self.cuda
        self.method, self.why = ("queued", "") if self.cuda else ("wall", "")
        self.graph: Any = None
        self.kept: Any = None  # what a replay writes
        self.batch = 1

    def warm(self, most: int = 12) -> float:
        """Call until the time settles (compilers and autotuners have ended); seconds of the last call."""
        before = float("inf")
        for i in range(most):
            seconds = self.wall()
            if i >= 2 and seconds >= STABLE * before:
                break
            before = seconds
        return seconds

    def wall(self) -> float:
        """One call, from nothing running to its result being there."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        self.wait(self.call())
        return time.perf_counter() - start

    def host(self) -> float:
        """Until the call returns, whatever still runs."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        made = self.call()
        seconds = time.perf_counter() - start
        self.wait(made)
        return seconds

    def prepare(self, seconds: float) -> None:
        """Capture the call as a CUDA graph if it can be; else its kernels' times will be added up, or, where a profiler sees none, so many
        queued calls timed that launches hide behind work."""
        if self.capturable:  # on a GPU alone
            try:
                self._capture()
                self.method = "graph"
                return
            except Exception as error:
                self.graph = self.kept = None
                # PyTorch's generator still waits for the capture's end; another takes its place
                torch.cuda.default_generators[self.device.index or 0].graphsafe_set_state(torch.Generator(self.device))
                self.why = f"not captured: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]
            if self.profiled():
                self.method = "kernels"
                return
        if self.cuda:
            self.batch = max(1, min(50, int(0.02 / max(seconds, 1e-6))))

    def _capture(self) -> None:  # on a GPU alone
        stream, here = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.call()
        here.wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = self.call()
        self.graph, self.kept = graph, kept

    def replayed(self) -> Any:  # on a GPU alone
        """What a replay writes, into memory that held NaN before."""
        with torch.no_grad():  # gradients may lie where an input did
            for t in tensors(self.kept):
                t.fill_(float("nan"))
        self.restore()
        self.graph.replay()
        torch.cuda.synchronize(self.device)
        return self.kept

    def profiled(self) -> float:  # on a GPU alone
        """Seconds of all that one call has the device do, without what lies between."""
        torch.cuda.synchronize(self.device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            self.wait(self.call())
            torch.cuda.synchronize(self.device)
        results = seen.profiler.kineto_results if seen.profiler is not None else None
        events = [] if results is None else results.events()
        return sum(e.duration_ns() for e in events if e.device_type() == torch.autograd.DeviceType.CUDA) / 1e9

    def sample(self, flush: Tensor | None) -> float:
        """Seconds of one call's device work (CPU: of the call)."""
        if self.graph is not None:  # on a GPU alone
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if flush is not None:
                flush.zero_()
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        if self.method == "kernels":  # on a GPU alone
            if flush is not None:
                flush.zero_()
            return self.profiled()
        if self.batch == 1:
            return self.wall()
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(self.batch):
            made = self.call()
        self.wait(made)
        return (time.perf_counter() - begin) / self.batch


def tensors(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor):
        return [made]
    if isinstance(made, Mapping):
        made = made.values()
    return [t for x in made for t in tensors(x)] if isinstance(made, (tuple, list, type({}.values()))) else []


class Time(NamedTuple):
    work: Samples  # the device's work: graph replays, or queued calls; CPU: the call
    eager: Samples  # the call, launches and all
    host: Samples  # until the call returns


def race(sides: Mapping[str, Side], rounds: int | None, budget: float, *, ready: bool = False) -> dict[str, Time]:
    """Time all sides in turn, one sample of each a round. rounds: None takes as many as fit into `budget` seconds, 5 to 100; ready: they
    are prepared, and their device's work alone is timed."""
    device = next(iter(sides.values())).device
    cuda = device.type == "cuda"
    flush = torch.empty(CACHE, dtype=torch.int8, device=device) if cuda else None
    once = 0.0
    for side in sides.values():
        seconds = side.sample(flush) if ready else side.warm()
        if not ready:
            side.prepare(seconds)
        once += seconds * (side.batch + 2 * cuda)
    count = rounds or max(LEAST, min(MOST, int(budget / max(once, 1e-6))))
    work: dict[str, list[float]] = {n: [] for n in sides}
    eager: dict[str, list[float]] = {n: [] for n in sides}
    host: dict[str, list[float]] = {n: [] for n in sides}
    for _ in range(count):
        for n, side in sides.items():
            work[n].append(side.sample(flush))
            if cuda and not ready:
                eager[n].append(side.wall())
                host[n].append(side.host())
    return {n: Time(percentiles(work[n]), percentiles(eager[n] or work[n]), percentiles(host[n] or work[n])) for n in sides}


def peak(side: Side) -> int | None:
    """Bytes allocated at the highest point of a call beyond what was there before it; None where the side's allocator is not PyTorch's."""
    if side.cuda:
        if not side.capturable:
            return None
        torch.cuda.synchronize(side.device)
        before = torch.cuda.memory_allocated(side.device)
        torch.cuda.reset_peak_memory_stats(side.device)
        side.wait(side.call())
        return torch.cuda.max_memory_allocated(side.device) - before
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler prints to stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        made = side.call()  # held until the profile ends
    results = seen.profiler.kineto_results if seen.profiler is not None else None
    events = [] if results is None else [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    del made
    now = high = 0
    for _, size in sorted(events, key=lambda e: e[0]):
        now += size
        high = max(high, now)
    return high
