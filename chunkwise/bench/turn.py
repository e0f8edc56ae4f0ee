"""Turns among processes on one device: many may warm up together, one alone may time. A lock goes with the process that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def turn(lock: Path | None, *, alone: bool) -> Iterator[None]:
    """Wait for a turn: alone, or beside others that do not ask to be alone. lock: a file, made if need be; None: no waiting."""
    if lock is None:
        yield
        return
    import fcntl

    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


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


def build_side_by_side(threads: int = 8) -> None:
    """Triton's autotuner builds its candidates one after another, minutes for a model; here threads build them first. It measures and
    chooses as it always does."""
    from triton.runtime.autotuner import Autotuner

    one_by_one = Autotuner.prune_configs
    if getattr(one_by_one, "side_by_side", False):
        return

    def prune(self: Autotuner, kwargs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        configs = one_by_one(self, kwargs, *rest, **named)

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
