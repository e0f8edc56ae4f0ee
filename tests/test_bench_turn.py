"""Turns on a device, and Triton's autotuner as other libraries use it."""

from __future__ import annotations

import gc
import json
import threading
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chunkwise.bench import autotuner
from chunkwise.bench.autotuner import BEST, HOST, LOST, build_side_by_side, offer_all, tune_in_turns
from chunkwise.bench.case import case, draw
from chunkwise.bench.measure import Bench, frozen
from chunkwise.bench.turn import turn
from chunkwise.cli import main


def test_whoever_times_waits_for_those_who_warm_up(tmp_path):
    lock, order = tmp_path / "lock", []

    def time_alone() -> None:
        with turn(lock, alone=True):
            order.append("timed")

    with turn(lock, alone=False), turn(lock, alone=False):
        thread = threading.Thread(target=time_alone)
        thread.start()
        thread.join(0.2)
        order.append("warm")
    thread.join(10)
    assert order == ["warm", "timed"]


def test_an_autotuner_builds_beside_others_and_times_alone(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    lock, held = tmp_path / "lock", []
    lock.touch()
    takes = iter((9.0, HOST + LOST * 0.5 + 0.1, HOST + LOST * 0.5))  # milliseconds of one call: the first's, too many, just as many
    monkeypatch.setattr(autotuner, "once", lambda call: (call(), next(takes))[1])
    monkeypatch.setattr(triton.testing, "do_bench", lambda call, warmup, rep, quantiles: [call() or 0.5, *quantiles])
    monkeypatch.setattr(Autotuner, "do_bench", Autotuner.do_bench)  # put back afterwards
    tune_in_turns(lock)
    tuner = Autotuner.__new__(Autotuner)

    def timed() -> list[float]:
        held.clear()
        return tuner.do_bench(lambda: held.append(not free(lock, alone=False)), quantiles=(0.5, 0.2, 0.8))

    assert (timed(), held) == ([0.5, 0.5, 0.2, 0.8], [False, True, True])
    assert (timed(), held) == ([HOST + LOST * 0.5 + 0.1] * 3, [False, True])  # one call says enough
    assert (timed(), held) == ([0.5, 0.5, 0.2, 0.8], [False, True, True])
    tuner.offered = 1  # an earlier run chose
    assert (timed(), held) == ([0, 0, 0], [False])


def test_an_autotuner_has_its_candidates_built_first_and_keeps_them_all(monkeypatch):
    pytest.importorskip("triton")
    from triton import Config
    from triton.runtime.autotuner import Autotuner

    class Kernel:
        def run(self, *args, warmup, BLOCK, **kwargs):
            built.append((args, warmup, BLOCK))
            if BLOCK == 64:
                raise RuntimeError("too large for the device")

    built, candidates = [], [Config(dict(BLOCK=b)) for b in (16, 32, 64)]
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, kwargs: candidates)  # put back afterwards
    for _ in range(2):  # asked twice, they are built once
        build_side_by_side()
    tuner = Autotuner.__new__(Autotuner)
    tuner.fn, tuner.base_fn, tuner.nargs = Kernel(), None, dict(x=7)
    assert tuner.prune_configs(dict(grid=(1,), warmup=False)) == candidates
    assert sorted(built) == [((7,), True, b) for b in (16, 32, 64)]


def test_a_shortlist_leaves_an_autotuner_what_was_fastest_before(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    from triton import Config
    from triton.runtime.autotuner import Autotuner

    class Kernel:
        def run(self, *args, **kwargs):
            built.append(kwargs["BLOCK"])
            return types.SimpleNamespace(metadata=types.SimpleNamespace(shared=kwargs["BLOCK"] * kwargs["num_stages"] * size))

    def kernel(x, N):
        pass

    def other(x, N):
        pass

    def offered(N, function=kernel):
        tuner = Autotuner.__new__(Autotuner)
        tuner.fn, tuner.base_fn, tuner.arg_names, tuner.keys, tuner.nargs = Kernel(), function, ["x", "N"], ["N"], dict(x=x)
        built.clear()
        return tuner.prune_configs(dict(N=N))

    x, size, built = torch.zeros(1), 1, []
    candidates = [Config(dict(BLOCK=b), num_warps=w, num_stages=s) for b in (16, 32) for w in (1, 2, 4) for s in (2, 3)]
    keys = ((1, "float32", candidates), (2, "float32", candidates[::-1]), (4, "float16", candidates[3:]))
    for N, dtype, order in keys:
        (tmp_path / str(N)).mkdir()
        slow = 9.0 * (dtype == "float16")  # all but its fastest
        medians = [1 + i / 20 + slow * (i > 0) for i in range(len(order))]
        times = [ms if N == 2 else [ms, 0.9 * ms, 1.1 * ms] for ms in medians]  # Triton writes a median and quantiles
        timed = [[{**vars(c), "pre_hook": None}, time] for c, time in zip(order, times)]
        data = {"key": [N, f"torch.{dtype}"], "configs_timings": timed}
        (tmp_path / str(N) / "kernel.autotune.json").write_text(json.dumps(data))
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, kwargs: candidates)  # put back afterwards
    monkeypatch.setattr("chunkwise.bench.autotuner._shared", lambda: 100)
    build_side_by_side(shortlist=tmp_path)
    assert offered(1) == candidates[:1] and offered(2) == candidates[-1:]  # the same keys again: what was chosen
    x = x.half()
    assert offered(5) == candidates[3:4]  # nothing hopeless
    size = 2.5  # its three stages do not fit
    assert offered(5) == candidates[2:4] and len(built) == 1 + 2  # of its kind, two stages do
    x, size = x.float(), 1
    assert offered(3) == [candidates[i] for i in (0, 2, 9, 11)] and len(built) == 2 * BEST  # of each key like it, two kinds' fastest
    size = 10  # none of the shortlist fits
    assert offered(3) == candidates and len(built) == 2 * BEST * (1 + 2) + len(candidates)
    size = 1
    assert offered(1, other) == candidates


def test_an_autotuner_may_be_offered_few_candidates(monkeypatch):
    pytest.importorskip("triton")
    from triton import Config
    from triton.runtime.autotuner import Autotuner

    class Kernel:
        def run(self, *args, **kwargs):
            pass

    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, kwargs: self.configs)  # put back afterwards
    build_side_by_side(few=3)
    tuner = Autotuner.__new__(Autotuner)
    tuner.fn, tuner.base_fn, tuner.nargs = Kernel(), None, {}
    for offered, kept in ((2, [0, 1]), (3, [0, 1, 2]), (8, [0, 2, 5])):
        tuner.configs = [Config(dict(BLOCK=b)) for b in range(offered)]
        assert [c.kwargs["BLOCK"] for c in tuner.prune_configs({})] == kept


def test_an_autotuner_whose_launches_are_heard_offers_all_and_times_none(monkeypatch):
    pytest.importorskip("triton")
    from triton import Config
    from triton.runtime.autotuner import Autotuner

    class Kernel:
        def run(self, *args, **kwargs):
            launched.append((args, kwargs["BLOCK"], kwargs["num_warps"]))

    launched = []
    monkeypatch.setattr(Autotuner, "run", Autotuner.run)  # put back afterwards
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, kwargs: self.configs[1:])
    offer_all()
    tuner = Autotuner.__new__(Autotuner)
    tuner.fn, tuner.arg_names, tuner.cache = Kernel(), ["x"], {}
    tuner.configs = [Config(dict(BLOCK=b), num_warps=w) for b in (16, 32) for w in (1, 2)]
    for _ in range(2):  # nothing was chosen
        assert tuner.run(7, grid=(1,)) is None
    assert launched == 2 * [((7,), 16, 2), ((7,), 32, 1), ((7,), 32, 2)]


def test_all_cases_are_warm_before_the_first_is_timed(tmp_path, monkeypatch):
    """So that processes which share a device build side by side, and nothing is built beside what is timed. One that fails is out."""
    lock, order = tmp_path / "lock", []

    def warm(bench: Bench) -> None:
        if free(lock):
            order.append("somebody else may time")
        order.append(f"warm {bench.c.op}")
        if bench.c.op == "kda":
            raise RuntimeError("does not build")

    monkeypatch.setattr(Bench, "warm", warm)
    monkeypatch.setattr(Bench, "rows", lambda bench: iter([order.append(f"rows {bench.c.op}")][:0]))
    with pytest.raises(SystemExit):
        main(["bench", "gla", "kda", "retention", "--device", "cpu", "--shape", "1,8,1,1,4,4", "--turns", str(lock)])
    assert order == ["warm gla", "warm kda", "warm retention", "rows gla", "rows retention"]


def test_a_truth_made_while_warming_up_is_the_one_that_is_used_and_then_let_go(monkeypatch):
    bench = Bench(case("gla", shape="1,8,1,1,4,4", dtype="float32"), torch.device("cpu"), [], passes=["forward"], rounds=2)
    right = bench._proved(draw(bench.c, bench.device))
    monkeypatch.setattr(Bench, "_proved", lambda bench, x: right)
    assert not list(bench.rows())[0]["wrong"]
    bench.proof = replace(right, truth={"o": right.truth["o"] + 1})
    assert list(bench.rows())[0]["wrong"] and bench.proof is None
    assert not list(bench.rows())[0]["wrong"]


def test_what_is_frozen_while_rows_are_timed_is_let_go_afterwards():
    before = gc.get_freeze_count()
    with pytest.raises(RuntimeError), frozen():
        assert gc.get_freeze_count() > before
        raise RuntimeError("a side fails")
    assert gc.get_freeze_count() == 0


def free(lock: Path, *, alone: bool = True) -> bool:
    """Whether a turn is to be had: alone, or beside others."""
    import fcntl

    with lock.open("a") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
