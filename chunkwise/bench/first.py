"""Seconds of a first call in a fresh process: import, forward, forward and backward; kernel caches empty, then filled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .case import Case, draw
from .case import case as checked
from .measure import OURS, PASSES
from .record import surroundings

LIMIT = 900  # seconds a process may take


def first_calls(c: Case, device: torch.device, who: Sequence[str], *, backward: bool) -> Iterator[dict[str, Any]]:
    """A row for every side: {"row": ..., "text": one line}."""
    for name in who:
        with tempfile.TemporaryDirectory() as cache:
            runs = {}
            for state in ("empty", "filled"):
                order = [name, c.op, c.form, c.shape, c.dtype, c.gates, device.type, str(int(backward)), cache]
                command = [sys.executable, "-m", "chunkwise.bench.first", *order]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
                except subprocess.TimeoutExpired:
                    runs[state] = {"why": f"took more than {LIMIT} s"}
                    continue
                lines = done.stdout.strip().splitlines()
                runs[state] = json.loads(lines[-1]) if done.returncode == 0 and lines else {"why": done.stderr.strip()[-300:]}
        row = {**surroundings(device), "case": c.record, "pass": "first call", "who": name, "seconds": runs, "wrong": False, "ran": []}
        told = "; ".join(f"{s} cache: {_told(r)}" for s, r in runs.items())
        yield {"row": row, "text": f"{c.op} {c.shape} {name}: {told}"}


def _told(run: dict[str, Any]) -> str:
    return run["why"] if "why" in run else ", ".join(f"{n} {t:.2f} s" for n, t in run.items())


def main(arguments: Sequence[str]) -> None:
    """In the fresh process: one side, timed from here, printed as one line of JSON."""
    name, op, form, shape, dtype, gates, device, backward, cache = arguments
    os.environ["TRITON_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    c, where = checked(op, form, shape, dtype, gates), torch.device(device)
    x = draw(c, where)
    torch.zeros(1, device=where).item()  # the GPU has started
    one = torch.ones(1, device=where, requires_grad=True)
    torch.autograd.grad(one * one, one, torch.ones_like(one))  # the first gradient that a program hands over: PyTorch imports sympy for it
    seconds = {}
    start = time.perf_counter()
    from . import measure, peer

    module = None if name == OURS else peer.peers()[name]
    why = module and peer.lacking(module, c)
    if why:
        sys.exit(why)
    work = measure.ours(c, x) if module is None else peer.work(module, c, x)
    seconds["import"] = time.perf_counter() - start
    for label, call in zip(PASSES, (work.forward, work.step if int(backward) and not c.decode else None)):
        if call is not None:
            seconds[label] = measure.Side(call, where, work.wait, work.capturable).wall()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
