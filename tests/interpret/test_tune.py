"""Candidates are compared bit by bit and timed in turn, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gate_case import draw, posed

from chunkwise.bench import tuner
from chunkwise.bench.case import case
from chunkwise.bench.clock import Samples, Time
from chunkwise.bench.peer import Work
from chunkwise.engine import plan_triton
from chunkwise.engine.tune import RULES
from chunkwise.spec import Gate, Rule


class Here:
    """Workers that are this process."""

    def __init__(self, start, jobs):
        assert jobs == 4

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def each(self, work, items):
        return (work(*item) for item in items)


class Right:
    def judge(self, made):
        return {}, self.why

    def outputs(self):
        return self

    why = ""


def test_a_case_is_tuned_by_what_keeps_its_bits(monkeypatch):
    x = draw(Gate.NONE, Rule.DELTA, B=1, T=20, H=1)
    p = posed(x, Gate.NONE, Rule.DELTA)
    said, asked = [], []
    inverse, scan = RULES["inverse"](p), RULES["state_pass"](p)
    spoils = replace(inverse, num_warps=8)
    beside = {inverse: [replace(inverse, num_stages=2), spoils], scan: [replace(scan, num_stages=5)]}
    beside[beside[scan][0]] = [replace(scan, num_stages=6)]  # found from there alone
    monkeypatch.setattr(tuner, "candidates", lambda use, c: asked.append(use) or beside.get(c, []))

    def forward():
        o, _, _ = plan_triton.forward(p, x, None, final=False, save=False)
        return {"o": o + (RULES["inverse"](p) == spoils)}

    monkeypatch.setattr(tuner, "Crew", Here)
    monkeypatch.setattr(tuner, "ours", lambda c, x: Work(forward, None))
    monkeypatch.setattr(tuner, "prove", lambda *a: Right())

    def race(sides, *rest, **named):
        seconds = {n: {2: 1.5, 5: 0.8, 6: 0.5}.get(int(n.split()[-1]), 1.0) * 1e-3 for n in sides}
        return {n: Time(*[Samples(0.99 * s, s, 1.01 * s)] * 3) for n, s in seconds.items()}

    monkeypatch.setattr(tuner, "race", race)
    c = case("delta_rule", shape="1,20,1,1,16,16", dtype="float32")
    best = tuner.tune(c, torch.device("cpu"), rounds=1, say=said.append)
    assert {u.kernel for u in asked} == {"inverse", "state_pass"}
    assert f"inverse {tuner.text(spoils)}: other bits" in said
    about = {b.use.kernel: (b.config, b.use.ruled, b.ms, b.ruled_ms, b.tried, b.case) for b in best}
    of = "delta_rule 1,20,1,1,16,16 float32 forward"
    assert about == {"inverse": (inverse, inverse, 1.0, 1.0, 1, of), "state_pass": (replace(scan, num_stages=6), scan, 0.5, 1.0, 2, of)}
    assert all(tuner.kept(best, "now", "3.6")[b.use.key, b.use.ruled].config == b.config for b in best)
    noisy = lambda s, *a, **k: {n: Time(*[Samples(0.9 * t, t, 1.2 * t)] * 3) for n, t in zip(s, (0.9, 1.0))}  # noqa: E731
    monkeypatch.setattr(tuner, "race", noisy)
    assert all(b.config == b.use.ruled for b in tuner.tune(c, torch.device("cpu"), rounds=1, say=said.append))
    assert any("by the rule: not kept" in line for line in said)
    monkeypatch.setattr(tuner, "race", lambda s, *a, **k: {n: Time(*[Samples(1.0, 1.0, 1.0)] * 3) for n in s})
    assert tuner.tune(c, torch.device("cpu"), rounds=1, say=said.append) == []
    assert "inverse: makes no difference to the call, with 1 others: nothing is kept" in said
    monkeypatch.setattr(Right, "why", "o is off")
    with pytest.raises(ValueError, match="o is off"):
        tuner.tune(c, torch.device("cpu"), rounds=1)
