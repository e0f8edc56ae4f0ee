"""The benchmark of the modules around the operator: proved before it is timed, like that of members."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from chunkwise.bench import table
from chunkwise.bench.clock import Side
from chunkwise.bench.measure import OURS
from chunkwise.bench.measure_module import ModuleBench, Work
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


class InPlace(torch.autograd.Function):
    """SwiGLU whose gradients are views of its inputs, written over them and the outputs' gradient."""

    @staticmethod
    def forward(ctx, a, b):
        rows = a.view(-1, a.shape[-1]), b.view(-1, b.shape[-1])
        ctx.save_for_backward(*rows)
        return (F.silu(rows[0]) * rows[1]).view(a.shape)

    @staticmethod
    def backward(ctx, d):
        (a, b), rows = ctx.saved_tensors, d.view(-1, d.shape[-1])
        s = torch.sigmoid(a)
        made = rows * b * s * (1 + a * (1 - s)), rows * a * s
        a.data.copy_(made[0])  # unseen by autograd, as kernels are
        b.data.copy_(made[1])
        d.data.zero_()
        return a.view(d.shape), b.view(d.shape)


def in_place(a, b):
    return InPlace.apply(a, b)


def test_a_side_that_writes_into_its_inputs_leaves_those_of_others_alone():
    m = module("swiglu", CPU, torch.float32, TINY)
    first = {n: t.clone() for n, t in m.leaves.items()}
    made = rows(replace(m, others={"liger-kernel": lambda: in_place, "causal-conv1d": lambda: m.plain}), *LIBRARIES)
    assert len(made) == 6 and not any(r["wrong"] for r in made.values()), [r["why"] for r in made.values()]
    assert all(torch.equal(m.leaves[n], t) for n, t in first.items())


def test_a_replay_of_such_a_side_begins_with_its_inputs(monkeypatch):
    m = module("swiglu", CPU, torch.float32, TINY)
    upstream = [torch.randn_like(m.plain(**m.leaves))]
    work, plain = Work(m, in_place, upstream), Work(m, m.plain, upstream).step()
    side = Side(work.step, CPU, restore=work.restore)
    side.kept = work.step()
    assert side.kept["da"].data_ptr() == work.leaves["a"].data_ptr()
    places = [t.detach() for t in side.kept.values()]
    side.graph = SimpleNamespace(replay=lambda: [t.copy_(x) for t, x in zip(places, work.step().values())])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for _ in range(2):
        torch.testing.assert_close({n: t * 1 for n, t in side.replayed().items()}, plain)


def test_a_state_is_whole_again_after_a_side_that_fails():
    m = module("step", CPU, torch.float32, TINY)

    def broken(x, w):
        m.state.zero_()
        raise RuntimeError("no kernel")

    made = rows(replace(m, others={"fla-core": lambda: broken, "causal-conv1d": lambda: m.ours}), *LIBRARIES)
    assert not any(r["wrong"] for r in made.values()), [r["why"] for r in made.values()]
    assert made["causal-conv1d", "forward"]["absent"] == {"fla-core": "RuntimeError: no kernel"}


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
