"""Triton's autotuner, as other libraries use it, made fit for measuring: built side by side, timed in turn, helped by what is known."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .turn import turn

BEST = 3  # candidates an earlier run's shortlist keeps of a kernel, for every key it was tuned for


def tune_in_turns(lock: Path) -> None:
    """Let Triton's autotuner build beside other processes, but time its candidates alone, so that none is judged on a busy device."""
    import triton
    from triton.runtime.autotuner import Autotuner

    def bench(self: Autotuner):
        def timed(call, quantiles):
            call()  # builds it
            with turn(lock, alone=True):
                return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)  # milliseconds

        return timed

    Autotuner.do_bench = property(bench)


def build_side_by_side(threads: int = 8, shortlist: Path | None = None) -> None:
    """Triton's autotuner builds its candidates one after another, minutes for a model; here threads build them first. It measures and
    chooses as it always does. shortlist: a folder that holds the autotuner's files of an earlier run (Triton's cache, or a copy of its
    *.autotune.json); a kernel timed there is offered the BEST of that run instead of all its candidates."""
    from triton.runtime.autotuner import Autotuner

    one_by_one, best = Autotuner.prune_configs, _best(shortlist) if shortlist else {}
    if getattr(one_by_one, "side_by_side", False):
        return

    def known(self: Autotuner, configs: Sequence[Any]) -> Sequence[Any]:
        good = best.get(getattr(self.base_fn, "__name__", ""), ())
        return [c for c in configs if _name(vars(c)) in good] or configs

    def prune(self: Autotuner, kwargs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        configs = known(self, one_by_one(self, kwargs, *rest, **named))

        def build(config: Any) -> None:
            try:
                self.fn.run(*self.nargs.values(), **{**kwargs, **config.all_kwargs(), "warmup": True})
            except Exception:  # too large for the device: the autotuner will see that too
                pass

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(build, configs))
        return configs

    prune.side_by_side = True  # type: ignore[attr-defined]
    Autotuner.prune_configs = prune


def _name(config: Mapping[str, Any]) -> str:
    return json.dumps([config["kwargs"], config["num_warps"], config["num_stages"]], sort_keys=True)


def _best(folder: Path) -> dict[str, set[str]]:
    """kernel -> names of the configs that were among the fastest for one of the keys it was tuned for."""
    best: dict[str, set[str]] = defaultdict(set)
    for file in folder.rglob("*.autotune.json"):
        timed = sorted(json.loads(file.read_text())["configs_timings"], key=lambda one: one[1])
        best[file.name.removesuffix(".autotune.json")] |= {_name(config) for config, _ in timed[:BEST]}
    return dict(best)
