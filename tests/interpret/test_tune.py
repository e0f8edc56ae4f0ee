"""Candidates are compared bit by bit and timed in turn, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from gate_case import draw, posed

from chunkwise.bench import tuner
from chunkwise.bench.case import case
from chunkwise.bench.clock import Samples, Time
from chunkwise.bench.peer import Work
from chunkwise.engine import plan_triton
from chunkwise.engine.config import Config
from chunkwise.engine.tune import RULES
from chunkwise.spec import Gate, Rule


class Here:
    """Workers that are this process."""

    def __init__(self, start, jobs):
        self.pool = torch.no_grad()

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
    ways = {"inverse": [Config(16, 0, 1, 1), Config(16, 0, 2, 1)], "state_pass": [Config(16, 32, 4, 1)]}
    monkeypatch.setattr(tuner, "candidates", lambda use: asked.append(use) or ways.get(use.kernel, []))

    def forward():
        o, _, _ = plan_triton.forward(p, x, None, final=False, save=False)
        spoilt = RULES["inverse"](p) == ways["inverse"][1]
        return {"o": o + spoilt}

    monkeypatch.setattr(tuner, "Crew", Here)
    monkeypatch.setattr(tuner, "ours", lambda c, x: Work(forward, None))
    monkeypatch.setattr(tuner, "prove", lambda *a: Right())
    quick = lambda i, n: Samples(1.0, n - i, 1.0)  # the last is the fastest
    monkeypatch.setattr(tuner, "race", lambda s, *a, **k: {n: Time(quick(i, len(s)), *[quick(0, 1)] * 2) for i, n in enumerate(s)})
    c = case("delta_rule", shape="1,20,1,1,16,16", dtype="float32")
    won = tuner.tune(c, torch.device("cpu"), rounds=1, say=said.append)
    assert {u.kernel for u in asked} == {"inverse", "state_pass"}
    assert "inverse BK 16 BV 0 warps 2 stages 1: other bits" in said
    assert {w.use.kernel: w.config for w in won} == {name: one[0] for name, one in ways.items()}
    assert all((w.before, w.ms) == (2e3, 1e3) for w in won)
    assert all(tuner.kept(won)[w.use.key] == w.config for w in won)
    monkeypatch.setattr(Right, "why", "o is off")
    with pytest.raises(ValueError, match="o is off"):
        tuner.tune(c, torch.device("cpu"), rounds=1)
