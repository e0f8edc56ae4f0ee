"""Measure anew, on the card at hand, what the tables and the pages of facts are made from: what is worth most first, within minutes.

    python bench/device/sweep.py --dry                           what this commit has in --out, and what would run
    python bench/device/sweep.py --minutes 9 --out runs/sweep    again until nothing is left; its rows then go into bench/results
    python bench/device/sweep.py --device cpu --dtype float32 --shape 1,64,2,2,16,16 --peer sdpa --steps tables    a trial anywhere

A step's processes, one a member, build and tune side by side, then each times alone (`chunkwise bench --turns`, whose rows they write).
The end of each is a line of OUT/sweep.jsonl, what it says a file beside it. What this commit has is not run again, but where a first call
had too little time. What still runs when the minutes are over is ended. `chunkwise precompile --shape ... --peer ...` builds the kernels of
first calls beforehand, without a card.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch

from chunkwise.bench.case import GRID, SHAPES, Case, case
from chunkwise.bench.measure import OURS, PASSES, TookTooLong, select
from chunkwise.bench.module import MODULES
from chunkwise.bench.record import ROOT, commit, load, surroundings

LONG = [n for n, of in GRID.items() if of["T"] == max(x["T"] for x in GRID.values()) or of["H"] == 1]
EXACT = [n for n, of in GRID.items() if of.get("dtype") == "float32"]  # whose kernels take longest to build
GRACE = 10  # seconds between asking a process to end and ending it


@dataclass(frozen=True)
class Command:
    """A process, by Python's arguments. cases: what it makes rows of; None: it is done when it has ended well."""

    words: tuple[str, ...]
    cases: tuple[Case, ...] | None = None


def of_cases(a: argparse.Namespace, shapes: list[str], op: str, pool: str = "") -> Command:
    """Of these shapes, what is missing."""
    cases = tuple(c for s in shapes if not there(a, c := case(op, shape=s, dtype=a.dtype, pool=pool)))
    given = [x for c in cases for x in ("--shape", c.shape)] + [x for name in a.peer for x in ("--peer", name)]
    more = ["--pool", pool] * bool(pool) + ["--dtype", a.dtype, "--warm-seconds", str(a.warm_seconds), "--turns", str(a.out / "turns")]
    more += ["--shortlist", str(a.shortlist)] if a.shortlist else []
    return of_bench(a, op, *given, *more, cases=cases)


def of_bench(a: argparse.Namespace, *words: str, cases: tuple[Case, ...] | None = None) -> Command:
    return Command(("-m", "chunkwise.cli", "bench", *words, "--device", a.device, "--out", str(a.out)), cases)


def there(a: argparse.Namespace, c: Case) -> bool:
    """Whether this commit has rows of ours, and of every peer a row or a reason other than the time that it had."""
    for name, backward in PASSES.items():
        run = {r["who"]: r for r in a.rows if (r["case"], r["pass"], r["commit"]) == (c.record, name, commit())}
        if not (backward and c.decode) and (OURS not in run or any(_cut_off(run[OURS], p) for p in select(a.peer) if p not in run)):
            return False
    return True


def _cut_off(own: dict[str, Any], peer: str) -> bool:
    return str(own["absent"].get(peer, TookTooLong.SAYS)).startswith(TookTooLong.SAYS)


def steps(a: argparse.Namespace) -> dict[str, list[Command]]:
    """What is worth measuring, the most first. Which members and pools: those of which the repository has rows from a GPU."""
    rows = [r for r in load(ROOT / "bench" / "results") if r["threads"] is None and r["pass"] in PASSES]
    old = [r["case"] for r in rows if "module" not in r["case"]]
    ops = a.op or sorted({c["op"] for c in old})
    pools = sorted({(c["op"], c["pool"]) for c in old if c.get("pool") and c["op"] in ops})
    tables = dict(tables=a.shape or [*SHAPES], exact=EXACT, long=LONG, grid=[n for n in GRID if n not in (*EXACT, *LONG)])
    made = {name: [of_cases(a, shapes, op) for op in ops] for name, shapes in tables.items()}
    steps_of = {pool: sorted({c["shape"] for c in old if (c["op"], c.get("pool")) == pool}) for pool in pools}
    made["steps"] = [of_cases(a, shapes, *pool) for pool, shapes in steps_of.items()]
    made["tests"] = [Command(("-m", "pytest", "-q", "-m", "gpu", "-n", str(a.jobs), str(ROOT / "tests")))]
    turns = ("--peer", "all", "--turns", str(a.out / "turns"))
    made["modules"] = [of_bench(a, "--module", name, *turns) for name in MODULES]
    made["first calls"] = [of_bench(a, *ops, "--shape", "S3", "--first-call")]
    device = ROOT / "bench" / "device"
    made["layer"] = [Command((str(device / "drop_in.py"), "--device", a.device, "--out", str(a.out / "layer.jsonl")))]
    made["training"] = [Command((str(device / "train.py"), str(a.text), "--out", str(a.out / "training.jsonl")))] if a.text else []
    return made


def left(a: argparse.Namespace, commands: list[Command]) -> list[Command]:
    """Those that have not been done at this commit."""
    file = a.out / "sweep.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    ended = [tuple(line["command"]) for line in lines if line["code"] == 0 and line["commit"] == commit()]
    return [c for c in commands if (c.words not in ended if c.cases is None else c.cases)]


def run(a: argparse.Namespace, name: str, commands: list[Command], until: float) -> None:
    """All of a step side by side, until then."""
    begun = time.monotonic()
    alive: dict[Command, subprocess.Popen[bytes]] = {}
    for i, c in enumerate(commands):
        with (a.out / f"{name.replace(' ', '_')}_{i}.log").open("ab") as log:
            command = [sys.executable, *c.words]
            alive[c] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    try:
        while alive and time.monotonic() < until:
            time.sleep(0.2)
            for c in [c for c, process in alive.items() if process.poll() is not None]:
                code = alive.pop(c).returncode
                line = {**surroundings(torch.device(a.device)), "step": name, "command": c.words, "code": code}
                line["seconds"] = round(time.monotonic() - begun, 1)
                with (a.out / "sweep.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{name}: {_short(c)}: {'done' if code == 0 else f'code {code}'}, {line['seconds']:.0f} s", flush=True)
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + GRACE
            for process in alive.values():
                if process.poll() is None:
                    os.killpg(process.pid, how)  # and what it started
            while any(p.poll() is None for p in alive.values()) and time.monotonic() < end:
                time.sleep(0.1)
    for c in alive:
        print(f"{name}: {_short(c)}: not to its end", flush=True)


def _short(c: Command) -> str:
    if c.cases is None:
        return " ".join(pathlib.Path(w).name for w in (c.words[1:] if c.words[0] == "-m" else c.words))
    one = c.cases[0]
    return f"{one.op}{f' {one.pool}' if one.pool else ''}: {'; '.join(x.shape for x in c.cases)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="after which nothing is begun and what runs is ended")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/sweep"), help="folder of the rows, of what is done, of logs")
    parser.add_argument("--dry", action="store_true", help="say what is there and what would run")
    parser.add_argument("--steps", nargs="+", help="these alone, in this order")
    parser.add_argument("--op", nargs="+", help="these members alone")
    parser.add_argument("--shape", nargs="+", help="in place of the tables' shapes: for a trial")
    parser.add_argument("--peer", nargs="+", default=["fla-core"], help="other libraries")
    parser.add_argument("--warm-seconds", type=float, default=0, help="give up on a peer whose first calls take longer; 0: never")
    parser.add_argument("--shortlist", type=pathlib.Path, help="Triton's cache of an earlier run, whose best candidates peers' tuners try")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes of the tests")
    parser.add_argument("--text", type=pathlib.Path, help="what bench/device/train.py trains on; none: it is left out")
    a = parser.parse_args()
    until = time.monotonic() + 60 * a.minutes
    a.out = a.out.resolve()
    a.rows = load(a.out)
    known = steps(a)
    unknown = [name for name in a.steps or () if name not in known]
    if unknown:
        parser.error(f"--steps must be among {', '.join(known)}, got {unknown[0]}")
    a.out.mkdir(parents=True, exist_ok=True)
    for name in a.steps or known:
        todo = left(a, known[name])
        print(f"{name}: {len(todo)} of {len(known[name])} processes left", flush=True)
        if a.dry:
            print("".join(f"    {_short(c)}\n" for c in todo), end="")
        elif todo and time.monotonic() < until:
            run(a, name, todo, until)


if __name__ == "__main__":
    main()
