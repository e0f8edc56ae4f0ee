"""The benchmark of the modules around the operator: proved before it is timed, like that of members."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chunkwise.bench import table
from chunkwise.bench.measure import OURS
from chunkwise.bench.measure_module import ModuleBench
from chunkwise.bench.module import LIBRARIES, MODULES, Module, module
from chunkwise.bench.record import load
from chunkwise.cli import main

CPU, TINY = torch.device("cpu"), (2, 33, 128)


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return end.value.code or 0


def rows(m: Module, *others: str) -> dict[tuple[str, str], dict]:
    bench = ModuleBench(m, CPU, others, passes=("forward", "forward+backward"), rounds=1)
    return {(r["who"], r["pass"]): r for r in bench.rows()}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_right_and_has_libraries_to_be_compared_with(name):
    m = module(name, CPU, torch.float32, TINY)
    made = rows(m)
    assert made and not any(r["wrong"] for r in made.values()), [r["why"] for r in made.values()]
    assert set(m.others) <= set(LIBRARIES) and len(made) == 1 + (m.both is not None)
    assert all(r["floor_ms"] > 0 and r["ms"]["p50"] > 0 for r in made.values())


def test_a_wrong_side_has_no_speed_and_an_absent_one_a_reason(capsys):
    m = module("gated", CPU, torch.float32, TINY)

    def absent():
        raise ImportError("no such package")

    off = lambda: lambda x, g, w: m.plain(x, g, w) * 1.01
    made = rows(replace(m, others={"torch": lambda: m.plain, "fla-core": off, "liger-kernel": absent}), *LIBRARIES)
    assert not made["torch", "forward"]["wrong"] and "ms" in made["torch", "forward+backward"]
    assert made["fla-core", "forward"]["wrong"] and "ms" not in made["fla-core", "forward"]
    assert "is off by" in made["fla-core", "forward+backward"]["why"]
    assert made[OURS, "forward"]["absent"] == {"liger-kernel": "ImportError: no such package"}


def test_the_command_writes_rows_that_the_table_shows(tmp_path, capsys):
    assert call("bench", "--module", "swiglu", "--shape", "2,33,128", "--device", "cpu", "--repeat", 1, "--out", tmp_path) == 0
    made = load(tmp_path)
    assert [r["pass"] for r in made] == ["forward", "forward+backward"] and "SwiGLU" in capsys.readouterr().out
    text = table.TABLES["speed of modules"](made)
    assert text.count("| SwiGLU, 66 rows of 352 |") == 2 and table.TABLES["speed"](made) == table.NOTHING
    text = table.TABLES["speed of modules"]([*made, *({**r, "case": {**r["case"], "dtype": "float64"}} for r in made)])
    assert text.count(", float32, milliseconds") == text.count(", float64, milliseconds") == 1 and text.count("| module |") == 2


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--module", "nothing"], "no module 'nothing'"),
        (["gla", "--module", "conv"], "--module takes no members"),
        (["--module", "conv", "--gates", "fast"], "--module takes no members, --form, --gates"),
        (["--module", "conv", "--peer", "nobody"], "no library of modules 'nobody'"),
        (["--module", "conv", "--shape", "S1"], "a module's shape must be B,T,D, got 'S1'"),
        (["--module", "conv", "--shape", "1,64,100"], "D a multiple of 128"),
        (["--module", "conv", "--dtype", "int8"], "dtype must be one of"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(arguments, named, capsys):
    assert call("bench", *arguments, "--device", "cpu") == 2
    said = capsys.readouterr().err
    assert named in said and said.count("\n") == 1
