"""Triton's autotuner, as other libraries use it, made fit for measuring: built side by side, timed in turn, helped by what is known."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

from .turn import turn

BEST = 2  # kinds of candidates an earlier run's shortlist keeps of a kernel, for every key it was tuned for that is like the one at hand

LOST = 4  # times what the fastest takes: a candidate that one call shows to be so slow is not timed further. Such spill, and take seconds
HOST = 1.0  # milliseconds that a call may take beside the device's

HOPELESS = 2  # times what the fastest took: a kind that was so slow is not tried again. Such spill, and take a minute to build


def share(lock: Path, shortlist: Path | None = None) -> None:
    """Let Triton's autotuner build side by side, here and in the processes that share the lock file, and time alone; see below."""
    build_side_by_side(shortlist=shortlist)
    tune_in_turns(lock.with_name(lock.name + ".tune"))


def tune_in_turns(lock: Path) -> None:
    """Let Triton's autotuner build beside other processes, but time its candidates alone, so that none is judged on a busy device."""
    import triton
    from triton.runtime.autotuner import Autotuner

    def bench(self: Autotuner):
        def timed(call, quantiles):
            call()  # builds it
            if getattr(self, "offered", 0) == 1:
                return [0.0 for _ in quantiles]  # nothing to choose from
            with turn(lock, alone=True):
                ms = once(call)
                if ms > HOST + LOST * getattr(self, "fastest", float("inf")):
                    return [ms for _ in quantiles]
                times = triton.testing.do_bench(call, warmup=2, rep=5, quantiles=quantiles)  # milliseconds
                self.fastest = min(times[0], getattr(self, "fastest", times[0]))
                return times

        return timed

    Autotuner.do_bench = property(bench)


def once(call: Callable[[], Any]) -> float:
    """Milliseconds of one call on the device, to its end."""
    from triton.runtime import driver

    device = driver.active.get_device_interface()
    device.synchronize()
    start = time.perf_counter()
    call()
    device.synchronize()
    return 1e3 * (time.perf_counter() - start)


def build_side_by_side(threads: int = 8, shortlist: Path | None = None, few: int | None = None) -> None:
    """Triton's autotuner builds its candidates one after another, minutes for a model; here threads build them first. It measures and
    chooses as it always does. shortlist: a folder that holds the autotuner's files of an earlier run (Triton's cache, or a copy of its
    *.autotune.json). A kernel timed there for the same key has the choice made there, as Triton itself would keep it; for another key
    it is offered the BEST of the keys most like it, but for hopeless ones; where the device can run none, those of their kinds; then all.
    few: any other kernel is offered so many of its candidates, evenly spread over their list."""
    from triton.runtime.autotuner import Autotuner

    one_by_one, timed = Autotuner.prune_configs, _timed(shortlist) if shortlist else {}
    if getattr(one_by_one, "side_by_side", False):
        return

    def prune(self: Autotuner, kwargs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        configs = one_by_one(self, kwargs, *rest, **named)

        self.fastest = float("inf")  # of this key

        def build(config: Any) -> Any:
            try:
                return self.fn.run(*self.nargs.values(), **{**kwargs, **config.all_kwargs(), "warmup": True})
            except Exception:  # it cannot be built: the autotuner will see that too
                return None

        runs = timed.get(getattr(self.base_fn, "__name__", ""), {})
        best = _best(runs, _key(self, kwargs) if runs else "")
        with ThreadPoolExecutor(threads) as pool:
            for about in (_name, _kind):  # themselves; or, where none fits, others of their kinds
                known = [c for c in configs if about(vars(c)) in map(about, best)]
                if any(map(_fits, list(pool.map(build, known)))):
                    self.offered = len(known)
                    return known
            if few is not None and len(configs) > few:
                configs = [configs[i * len(configs) // few] for i in range(few)]
            list(pool.map(build, configs))
        self.offered = len(configs)
        return configs

    prune.side_by_side = True  # type: ignore[attr-defined]
    Autotuner.prune_configs = prune


def offer_all() -> None:
    """Triton's autotuner launches every candidate and times none: where launches are heard, not run."""
    from triton.runtime.autotuner import Autotuner

    def run(self: Autotuner, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args))
        for config in self.prune_configs(kwargs):
            self.fn.run(*args, **{**kwargs, **config.all_kwargs()})

    Autotuner.run = run


def _fits(kernel: Any) -> bool:
    """Whether it was built, and the device has the shared memory that it wants."""
    return kernel is not None and kernel.metadata.shared <= _shared()


def _shared() -> int:
    from triton.runtime import driver

    return driver.active.utils.get_device_properties(driver.active.get_current_device())["max_shared_mem"]


def _key(tuner: Any, kwargs: Mapping[str, Any]) -> str:
    """What Triton's autotuner chooses by: the arguments it was told of, and the types of all tensors."""
    given = {n: x for n, x in {**tuner.nargs, **kwargs}.items() if n in tuner.arg_names}
    return json.dumps([*(given[n] for n in tuner.keys if n in given), *(str(x.dtype) for x in given.values() if hasattr(x, "dtype"))])


def _name(config: Mapping[str, Any]) -> str:
    return json.dumps([config["kwargs"], config["num_warps"], config["num_stages"]], sort_keys=True)


def _kind(config: Mapping[str, Any]) -> str:
    """Candidates that differ in their stages alone are one kind: beside the fastest of them the others say little."""
    return json.dumps([config["kwargs"], config["num_warps"]], sort_keys=True)


Runs = dict[str, list[tuple[dict[str, Any], float]]]  # key -> candidates and the median of their milliseconds, the fastest first


def _timed(folder: Path) -> dict[str, Runs]:
    """kernel -> what an earlier run timed."""
    timed: dict[str, Runs] = defaultdict(dict)
    for file in folder.rglob("*.autotune.json"):
        run = json.loads(file.read_text())
        medians = [(config, ms[0] if isinstance(ms, list) else ms) for config, ms in run["configs_timings"]]  # Triton's: and quantiles
        timed[file.name.removesuffix(".autotune.json")][json.dumps(run["key"])] = sorted(medians, key=lambda one: one[1])
    return dict(timed)


def _best(runs: Runs, key: str) -> list[dict[str, Any]]:
    """The candidates that are tried for a key: its choice, else the fastest kinds of the keys with the fewest other entries."""
    if key in runs:
        return [runs[key][0][0]]
    wanted = json.loads(key) if runs else []
    unlike = {k: sum(a != b for a, b in zip_longest(json.loads(k), wanted, fillvalue=())) for k in runs}
    best: list[dict[str, Any]] = []
    for order in (order for k, order in runs.items() if unlike[k] == min(unlike.values())):
        good = [config for config, ms in order if ms <= HOPELESS * order[0][1]]
        fastest = {_kind(config): config for config in reversed(good)}  # of every kind
        kinds = list(dict.fromkeys(_kind(config) for config in good))
        best += [fastest[kind] for kind in kinds[:BEST]]
    return best
