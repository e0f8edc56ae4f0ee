"""bench/device/sweep.py: what is there is not measured again, what outlasts its time is ended."""

import importlib.util
import json
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from chunkwise.bench.case import GRID, SHAPES, case
from chunkwise.bench.measure import OURS, PASSES, TookTooLong
from chunkwise.bench.record import commit

FILE = Path(__file__).parents[1] / "bench" / "device" / "sweep.py"


@pytest.fixture(scope="module")
def sweep():
    spec = importlib.util.spec_from_file_location("sweep", FILE)
    module = sys.modules["sweep"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sweep"]


C = case("gla", shape="S1")


def row(name: str, who: str, **kw) -> dict:
    return {"case": C.record, "pass": name, "commit": commit(), "who": who, "absent": {}} | kw


WHOLE = [row(name, who) for name in PASSES for who in (OURS, "sdpa")]
ALONE = [r for r in WHOLE if r["who"] == OURS]


@pytest.mark.parametrize(
    ("rows", "there"),
    [
        ([], False), (WHOLE, True), (WHOLE[:2], False), (ALONE, False),
        ([r | {"absent": {"sdpa": "has no such function"}} for r in ALONE], True),
        ([r | {"absent": {"sdpa": f"{TookTooLong.SAYS} 90 s"}} for r in ALONE], False),
        ([r | {"commit": "another"} for r in WHOLE], False), ([r | {"case": case("kda").record} for r in WHOLE], False),
    ],
)  # fmt: skip
def test_what_this_commit_has_of_every_side_is_there(sweep, rows, there):
    assert sweep.there(Namespace(rows=rows, peer=["sdpa"]), C) is there


def test_what_outlasts_its_time_is_ended_and_left_for_the_next(sweep, tmp_path, capsys):
    a = Namespace(out=tmp_path, device="cpu")
    commands = [sweep.Command(("-c", text)) for text in ("import time; time.sleep(600)", "print('said')", "raise SystemExit(3)")]
    start = time.monotonic()
    sweep.run(a, "a step", commands, start + 20)
    assert time.monotonic() - start < 120
    assert [c.words[1] for c in sweep.left(a, commands)] == [commands[0].words[1], commands[2].words[1]]
    codes = {json.loads(line)["command"][1]: json.loads(line)["code"] for line in (tmp_path / "sweep.jsonl").read_text().splitlines()}
    assert codes == {commands[1].words[1]: 0, commands[2].words[1]: 3}
    assert (tmp_path / "a_step_1.log").read_text() == "said\n"
    told = capsys.readouterr().out
    assert "not to its end" in told and "code 3" in told


def test_everything_of_the_tables_is_asked_for(sweep, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--dry", "--out", str(tmp_path)])
    sweep.main()
    out = capsys.readouterr().out
    for op in ("delta_rule", "gated_delta_rule", "gla", "kda", "linear_attn", "retention", "rwkv7", "simple_gla"):
        lines = [line.split(": ", 1)[1] for line in out.splitlines() if line.startswith(f"    {op}: ")]
        assert sorted(shape for line in lines for shape in line.split("; ")) == sorted([*SHAPES, *GRID])
    assert "gated_delta_rule float32-vk: " in out and "pytest -q -m gpu" in out and "--module" in out


def test_a_trial_on_a_cpu_is_measured_once(sweep, tmp_path, capsys, monkeypatch):
    words = ["--device", "cpu", "--dtype", "float32", "--shape", "1,40,1,1,8,4", "--peer", "none", "--op", "retention", "--steps", "tables"]
    for left in (1, 0):
        monkeypatch.setattr(sys, "argv", ["sweep.py", *words, "--out", str(tmp_path)])
        sweep.main()
        assert f"tables: {left} of 1 processes left" in capsys.readouterr().out
    rows = [json.loads(line) for file in tmp_path.glob("*/*.jsonl") for line in file.read_text().splitlines()]
    assert [(r["who"], r["pass"], r["case"]["shape"]) for r in rows] == [(OURS, name, "1,40,1,1,8,4") for name in PASSES]
