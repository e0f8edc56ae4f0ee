"""The benchmark proves before it times: what is wrong has no speed."""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chunkwise.bench import measure, peer, table
from chunkwise.bench.case import GRID, Case, Inputs, case, draw, plain, shapes
from chunkwise.bench.clock import Side, peak, percentiles
from chunkwise.bench.count import Ceiling, count, floor
from chunkwise.bench.measure import OURS, Bench, TookTooLong, limit, select
from chunkwise.bench.proof import part, solve
from chunkwise.bench.record import append, load
from chunkwise.cli import main
from chunkwise.spec import all_ops

CPU = torch.device("cpu")
TINY = "1,40,1,2,8,4"
BOTH = ("forward", "forward+backward")
README = Path(__file__).parents[1] / "README.md"


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return end.value.code or 0


class Fake(types.ModuleType):
    """A peer that calls the member token by token, and may spoil its result."""

    def __init__(self, spoil=lambda o, tensors: o):
        super().__init__("fake")
        self.spoil = spoil

    def available(self) -> str:
        return ""

    def supports(self, c: Case) -> str:
        return ""

    def call(self, c: Case, x: Inputs, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        o, S = c.member(tensors, form="recurrent", initial_state=x.S0, output_final_state=x.S0 is not None, cu_seqlens=x.cu)
        return self.spoil(o, tensors), S


class HalfGradient(torch.autograd.Function):
    """Right forward, wrong backward."""

    @staticmethod
    def forward(ctx, o: Tensor) -> Tensor:
        return o.clone()

    @staticmethod
    def backward(ctx, do: Tensor) -> Tensor:
        return do * 0.999


def one_head(o: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    return o * torch.tensor([1.0, 1.001])[:, None]


def rows(monkeypatch, peers: Mapping[str, types.ModuleType], op: str = "gated_delta_rule", shape: str = TINY, **kw) -> list[dict]:
    monkeypatch.setattr(peer, "peers", lambda: dict(peers))
    c = case(op, shape=shape, dtype=kw.pop("dtype", "float32"))
    return list(Bench(c, CPU, list(peers), passes=BOTH, rounds=2, **kw).rows())


def by_who(rows: list[dict]) -> dict[tuple[str, str], dict]:
    return {(r["who"], r["pass"]): r for r in rows}


def test_a_wrong_result_has_no_speed_and_a_right_one_has(monkeypatch):
    made = by_who(rows(monkeypatch, {"right": Fake(), "wrong": Fake(one_head)}))
    for name in BOTH:
        assert not made["right", name]["wrong"] and made["right", name]["ms"]["p50"] > 0
        assert not made[OURS, name]["wrong"] and made[OURS, name]["to_floor"] > 0
        assert made["wrong", name]["wrong"] and "ms" not in made["wrong", name]
        assert "o is off by" in made["wrong", name]["why"]


def test_a_wrong_gradient_is_found_where_the_output_is_right(monkeypatch):
    made = by_who(rows(monkeypatch, {"half": Fake(lambda o, _: HalfGradient.apply(o))}))
    assert not made["half", "forward"]["wrong"]
    wrong = made["half", "forward+backward"]
    assert wrong["wrong"] and "ms" not in wrong and "o is off" not in wrong["why"]
    assert all(f"d{n} is off" in wrong["why"] for n in ("q", "k", "v", "g", "beta"))


def test_a_missing_gradient_and_nan_are_wrong(monkeypatch):
    constant = Fake(lambda o, t: o - t["q"].sum() + t["q"].detach().sum())  # adds nothing but a gradient
    made = by_who(rows(monkeypatch, {"constant": constant, "nan": Fake(lambda o, _: o * float("nan"))}))
    assert not made["constant", "forward"]["wrong"] and "dq is off" in made["constant", "forward+backward"]["why"]
    assert made["nan", "forward"]["wrong"] and "ms" not in made["nan", "forward"]


def test_a_peer_that_fails_or_is_absent_is_named_with_its_reason(monkeypatch, capsys):
    broken, away = Fake(lambda o, _: o.nothing), Fake()
    away.available = lambda: "away is not installed"  # type: ignore[method-assign]
    made = rows(monkeypatch, {"away": away, "broken": broken}, say=print)
    assert "away: absent: away is not installed" in capsys.readouterr().out
    assert {r["who"] for r in made} == {OURS, "broken"} and all(r["absent"] == {"away": "away is not installed"} for r in made)
    assert all("nothing" in r["why"] for r in made if r["who"] == "broken")


def test_our_own_wrong_result_is_red_and_fails_the_command(monkeypatch, capsys, tmp_path):
    fake = Fake(one_head)
    monkeypatch.setattr(measure, "ours", lambda c, x: peer.torch_work(lambda t: fake.call(c, x, t), x))
    assert call("bench", "gla", "--shape", TINY, "--device", "cpu", "--repeat", 2, "--out", tmp_path) == 1
    text = capsys.readouterr()
    assert "WRONG" in text.out and text.err == f"chunkwise: wrong or failed: gla {TINY} forward, gla {TINY} forward+backward\n"
    assert all(r["wrong"] and "ms" not in r for r in load(tmp_path))


def test_the_command_writes_what_it_measured_and_from_what(capsys, tmp_path):
    assert call("bench", "gla", "retention", "--shape", TINY, "--device", "cpu", "--repeat", 2, "--peer", "sdpa", "--out", tmp_path) == 0
    made = load(tmp_path)
    assert [(r["case"]["op"], r["pass"], r["who"]) for r in made] == [
        (op, name, who) for op in ("gla", "retention") for name in BOTH for who in (OURS, "sdpa")
    ]
    for r in made:
        assert r["versions"]["torch"] == torch.__version__ and r["threads"] == torch.get_num_threads() and r["date"][:2] == "20"
        assert r["case"]["gates"] == "slow" and r["peak_extra_bytes"] > 0 and r["ms"]["p20"] <= r["ms"]["p50"] <= r["ms"]["p80"]
        assert set(r["errors"]) == {"o"} if r["pass"] == "forward" else "o" in r["errors"] and "dv" in r["errors"]
    assert [r["ran"][0]["plan"] for r in made if r["who"] == OURS] == ["chunk"] * 4
    assert capsys.readouterr().out.count("sdpa") == 4


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["nobody"], "nobody"), (["gla", "--shape", "S9"], "must be one of grid; S1;"), (["gla", "--shape", "1,2,3"], "1,2,3"),
        (["gla", "--shape", "1,8,2,3,4,4"], "HV=3"), (["gla", "--shape", "2,8,1,1,4,4,3"], "B=2"),
        (["gla", "--shape", "1,0,1,1,4,4"], "T >= 1"),
        (["gla", "--dtype", "int8"], "int8"), (["gla", "--gates", "none"], "none"), (["kda", "--form", "parallel"], "parallel"),
        (["gla", "--peer", "cublas"], "cublas"), (["gla", "--device", "tpu"], "tpu"), (["gla", "--threads", "-1"], "--threads"),
        (["--table", "--into", "no/such.md"], "there is no no/such.md here; run it in a clone, or name files by --into"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_in_one_line(arguments, named, capsys):
    assert call("bench", *arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("chunkwise: ") and said.err.count("\n") == 1 and named in said.err and said.out == ""


def test_bytes_and_work_are_those_of_the_floors():
    """Per token and value head, K = V = 128 in bfloat16: counted by hand, input by input."""
    want = {  # bytes forward, both passes; FLOP forward, both passes, at chunks of 64
        "linear_attn": (1024, 2816, 4 * 64 * 128 + 4 * 128**2, 14 * 64 * 128 + 14 * 128**2),
        "gla": (1280, 3584, 4 * 64 * 128 + 4 * 128**2, 14 * 64 * 128 + 14 * 128**2),
        "delta_rule": (1026, 2822, 8 * 64 * 128 + 6 * 128**2 + 64**2, 28 * 64 * 128 + 24 * 128**2 + 5 * 64**2),
        "kda": (1282, 3590, 8 * 64 * 128 + 6 * 128**2 + 64**2, 28 * 64 * 128 + 24 * 128**2 + 5 * 64**2),
    }
    for op, (forward, both, work, work_both) in want.items():
        c = case(op, shape="1,64,2,2,128,128")
        x = draw(c, CPU)
        assert count(c, x, False) == (128 * forward, 128 * work) and count(c, x, True) == (128 * both, 128 * work_both)
    assert floor(count(c, x, False), Ceiling(bytes=1282, flop=1e30)) == 128


def test_gates_are_slow_or_fast_and_a_quarter_of_the_heads_never_forgets():
    slow, fast = (draw(case("kda", shape="1,64,8,8,4,4", gates=g, dtype="float32"), CPU).x["g"] for g in ("slow", "fast"))
    assert [bool((slow[:, :, h] == 0).all()) for h in range(8)] == [h % 4 == 3 for h in range(8)]
    assert torch.equal(slow[:, :, :3] * 16, fast[:, :, :3]) and (fast < 0).all()
    half = draw(case("gated_delta_rule", shape=TINY, dtype="bfloat16"), CPU).x
    assert half["g"].dtype == torch.float32 and half["beta"].dtype == half["q"].dtype == torch.bfloat16


@pytest.mark.parametrize("op", ["gated_delta_rule", "retention"])
def test_the_part_that_is_proved_is_a_part_of_the_whole(op, monkeypatch):
    c = case(op, shape="3,20,6,12,4,4", dtype="float64")
    x = draw(c, CPU)
    whole = part(c)
    assert len(whole.rows) == 2 and len(whole.values) == 12
    monkeypatch.setattr("chunkwise.bench.proof.ENOUGH", 2 * 20 * 2 * 3)
    some = part(c)
    assert some.rows.tolist() == [0, 2]
    assert some.heads.tolist() == ([0, 2, 5] if op == "gated_delta_rule" else list(range(6)))  # retention's gate is the head's number
    whole_rows = type(some)(torch.arange(3), torch.arange(6), torch.arange(12))
    everything, little = solve(c, x, True, whole_rows, torch.float64), solve(c, x, True, some, torch.float64)
    for n, t in little.items():
        axes = "B T HV V" if n == "o" else c.member.args[n[1:]].axes
        torch.testing.assert_close(t, some.pick(everything[n], axes))


def test_decoding_carries_the_state_and_has_no_backward(monkeypatch):
    made = by_who(rows(monkeypatch, {"right": Fake()}, shape="3,1,2,4,8,4"))
    assert set(made) == {(OURS, "forward"), ("right", "forward")}
    assert set(made["right", "forward"]["errors"]) == {"o", "S"} and not made["right", "forward"]["wrong"]
    assert made[OURS, "forward"]["ran"][0]["plan"] == "recurrent"


@pytest.mark.parametrize("pool", ["float32", "bfloat16-vk"])
def test_a_step_in_a_pool_is_proved_from_the_state_it_began_with(pool, monkeypatch):
    monkeypatch.setattr(peer, "peers", lambda: {"right": Fake()})
    c = case("kda", shape="3,1,2,4,8,4", dtype="bfloat16", pool=pool)
    made = by_who(list(Bench(c, CPU, ["right"], passes=BOTH, rounds=2).rows()))
    assert set(made) == {(OURS, "forward"), ("right", "forward")} and not any(r["wrong"] for r in made.values())
    assert set(made[OURS, "forward"]["errors"]) == {"o", "S"} and made[OURS, "forward"]["case"]["pool"] == pool


@pytest.mark.parametrize("op, shape", [("gated_delta_rule", "2,70,1,2,8,4"), ("kda", "2,70,2,2,8,4"), ("kda", "2,1,2,2,8,4")])
def test_transformers_fallbacks_are_the_same_functions(op, shape):
    pytest.importorskip("transformers")
    c = case(op, shape=shape, dtype="float32")
    made = list(Bench(c, CPU, ["transformers"], passes=BOTH, rounds=1).rows())
    assert {r["who"] for r in made} == {OURS, "transformers"} and not any(r["wrong"] for r in made)
    assert "HV=4" in peer.peers()["transformers"].supports(case("kda", shape="1,8,2,4,8,4", dtype="float32"))


def test_fla_functions_are_found_by_name_and_given_what_they_take(monkeypatch):
    from chunkwise.bench.peer import fla_core

    seen = {}

    def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
        seen.update(cu_seqlens=cu_seqlens, output_final_state=output_final_state)
        return all_ops()["gla"](dict(q=q, k=k, v=v, g=g), cu_seqlens=cu_seqlens)

    def chunk_linear_attn(q, k, v, normalize=True, output_final_state=False):
        seen["normalize"] = normalize
        return all_ops()["linear_attn"](dict(q=q, k=k, v=v))

    ops, guard = types.ModuleType("fla.ops"), types.ModuleType("fla.ops.common.chunk_o")
    ops.chunk_gla, ops.chunk_linear_attn = chunk_gla, chunk_linear_attn  # type: ignore[attr-defined]
    knobs = types.ModuleType("triton.knobs")
    knobs.language = types.SimpleNamespace(fp32_default=None)  # type: ignore[attr-defined]
    for module in (types.ModuleType("fla"), ops, types.ModuleType("fla.ops.common"), guard, knobs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    fla_core._function.cache_clear()
    try:
        c = case("gla", shape="1,40,1,2,8,4,3", dtype="float32")
        x = draw(c, CPU)
        assert fla_core.supports(c) == "" and fla_core.supports(case("kda")) == "has no chunk_kda"
        o, _ = fla_core.call(c, x, x.x)
        assert seen == {"cu_seqlens": x.cu, "output_final_state": False} and o.shape == x.do.shape
        lin = case("linear_attn", shape=TINY, dtype="float32")
        fla_core.call(lin, draw(lin, CPU), draw(lin, CPU).x)
        assert knobs.language.fp32_default == "ieee"  # products as exact as ours
        assert seen["normalize"] is False and guard.TRITON_ABOVE_3_7_1 is True  # type: ignore[attr-defined]
    finally:
        fla_core._function.cache_clear()


def test_every_peer_has_what_a_peer_must_have():
    assert set(peer.peers()) == {"fla-core", "flash-qla", "jax-linear-attention", "nvidia", "sdpa", "transformers"}
    for name, module in peer.peers().items():
        assert isinstance(module.available(), str), name
        assert callable(getattr(module, "call", None) or getattr(module, "work", None)), name
        if name != "fla-core":
            assert module.supports(case("iplr_delta_rule", shape="1,8,1,1,4,4,2")), name  # none has it, and it says so
    assert select(["none"]) == [] and select(["sdpa", "sdpa"]) == ["sdpa"] and select(["all"]) == list(peer.peers())


def test_members_of_plain_arguments_are_those_that_others_have_too():
    names = {n for n, op in all_ops().items() if plain(op)}
    assert {"linear_attn", "retention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda"} <= names
    assert not names & {"rwkv6", "rwkv7", "gated_delta_product", "lightning_attn", "comba"}


def test_peak_memory_is_what_a_call_holds_at_once():
    x = torch.randn(1000)
    one = x.numel() * x.element_size()
    assert peak(Side(lambda: x.neg(), CPU)) == one
    assert peak(Side(lambda: x.neg().abs(), CPU)) == 2 * one  # a temporary and the result
    assert one < peak(Side(lambda: [x.neg().sum() for _ in range(3)], CPU)) < 2 * one  # one temporary at a time
    assert percentiles([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == (2.0, 3.0, 5.0)


def test_a_first_call_that_takes_too_long_is_given_up():
    with pytest.raises(TookTooLong, match="more than 0 s"), limit(0.05):
        time.sleep(5)
    with limit(5):
        pass
    time.sleep(0.01)  # and no alarm is left behind


def test_a_first_call_is_timed_in_a_fresh_process(capsys, tmp_path):
    assert call("bench", "linear_attn", "--shape", "1,8,1,1,4,4", "--device", "cpu", "--forward", "--first-call", "--out", tmp_path) == 0
    [row] = load(tmp_path)
    assert row["pass"] == "first call" and set(row["seconds"]) == {"empty", "filled"}
    assert all(set(run) == {"import", "forward"} and run["forward"] > 0 for run in row["seconds"].values())
    assert "empty cache: import" in capsys.readouterr().out


def test_the_grid_is_asked_for_as_one_and_its_shapes_say_what_they_are(capsys):
    assert shapes(["S1", "grid"]) == ["S1", *GRID]
    assert case("gla", shape="float16").dtype == "float16" and case("gla", shape="64 channels", dtype="float32").dtype == "float32"
    packed = case("gla", shape="64 documents")
    assert packed.N == 64 and draw(replace(packed, T=200, H=1, HV=1, K=4, V=4), CPU).cu.shape == (65,)
    assert all(case("gla", shape=name).K % 64 == 0 for name in GRID)


def row(who: str, ms: float, date: str = "2026-01-01", **kw) -> dict:
    c = case("gla", shape="S1").record
    return {
        "device": "NVIDIA H200", "threads": None, "date": f"{date}T00:00:00", "commit": "c1",
        "case": c, "pass": "forward", "who": who, "version": "1",
        "wrong": False, "why": "", "absent": {}, "ran": [{"backend": "kernels", "plan": "triton", "chunk": 64}] if who == OURS else [],
        "errors": {"o": {"error": 2e-3}}, "method": "graph", "ms": {"p20": ms, "p50": ms, "p80": ms},
        "eager_ms": {"p50": 4 * ms if who == OURS else ms},
        "floor_ms": 0.1, "tb_s": 1.0, "tflop_s": 1.0, "to_floor": 2.0, **kw,
    }  # fmt: skip


def test_the_table_shows_the_newest_run_and_no_speed_for_what_is_wrong(tmp_path):
    append(tmp_path, [row(OURS, 9.0), row("old", 9.0), row(OURS, 0.5, "2026-01-02"), row("fla-core", 1.25, "2026-01-02")])
    append(tmp_path, [row("bad", 0.1, "2026-01-02", wrong=True)])
    text = table.markdown(load(tmp_path))
    assert "| gla | S1 | bfloat16, slow | forward | 0.5 / 2 | wrong | 1.25 / 1.25 | 2.50 / 0.62 | 2.0e-03, 2.0e-03, 2.0e-03 |" in text
    assert "old" not in text and "0.1" not in text
    append(tmp_path, [row(OURS, 0.4, "2026-01-03", ran=[{"backend": "torch", "plan": "chunk", "chunk": 64}])])
    assert "| 0.4 / 1.6 (torch) |" in table.markdown(load(tmp_path))
    (tmp_path / "nvidia_h200" / "x.jsonl").write_text(json.dumps({"no": "date"}))
    with pytest.raises(ValueError, match="x.jsonl:1"):
        load(tmp_path)


def test_the_grid_is_a_line_for_a_shape_and_a_column_for_a_member():
    narrow, wide = (case("gla", shape=name).record for name in ("64 channels", "256, 512 channels"))
    one = [row(who, ms, case=narrow, **{"pass": p}) for p in BOTH for who, ms in ((OURS, 0.5), ("fla-core", 1.25))]
    kda = [row(OURS, 0.5, case={**narrow, "op": "kda"}), row("fla-core", 0.1, case={**narrow, "op": "kda"}, wrong=True, why="o is off")]
    queued = [row(OURS, 0.5, case={**narrow, "op": "z"}), row("fla-core", 0.75, case={**narrow, "op": "z"}, method="queued")]
    assert "| 64 channels | - / ? |" in (text := table.markdown(queued, "grid")) and "| 64 channels | 0.38 / ? |" in text
    alone = [row(OURS, 0.5, case=wide, absent={"fla-core": "K <= 256"}, **{"pass": p}) for p in BOTH]
    text = table.TABLES["speed of the grid"]([*one, *kda, *alone, row(OURS, 0.5)])
    assert "| | gla | kda |" in text and "| 64 channels | 2.50 / 2.50 | - / ? |" in text and "| 64 channels | 0.62 / 0.62 | - / ? |" in text
    assert "| 256, 512 channels | refused / refused | ? / ? |" in text and "S1" not in text
    assert "- fla-core: K <= 256 (gla, 256, 512 channels, forward; gla, 256, 512 channels, forward+backward)\n" in text
    assert "- at commit c1: 64 channels (gla, kda); 256, 512 channels (gla)\n" in text
    assert "- fla-core: o is off (kda, 64 channels, forward)\n" in text and "| 0.5 / 2 | 1.25 / 1.25 |" in text
    late = row(OURS, 0.5, case=wide, absent={"fla-core": f"{TookTooLong.SAYS} 60 s"})
    assert "| 256, 512 channels | ? / ? |" in table.markdown([late], "grid")
    assert "64 channels" not in table.markdown([*one, row(OURS, 0.5)])


def test_the_table_goes_between_its_markers_and_nowhere_else(tmp_path, capsys):
    (begin, end), (steps, last), *_ = ((table.BEGIN.format(name), table.END.format(name)) for name in table.TABLES)
    (readme := tmp_path / "README.md").write_text(f"before\n{begin}\nstale\n{end}\nbetween\n{steps}\n{last}\nafter\n")
    pooled = case("gla", shape="64,1,2,2,4,4", pool="float32-vk").record
    append(tmp_path / "results", [row(OURS, 0.5), *(row(who, ms, case=pooled) for who, ms in ((OURS, 0.0625), ("fla-core", 0.125)))])
    again = lambda: call("bench", "--table", "--into", readme, "--out", tmp_path / "results")
    assert again() == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{begin}\n") and f"{end}\nbetween\n{steps}" in text and text.endswith(f"{last}\nafter\n")
    assert "stale" not in text and text.count("| 0.5 / 2 |") == 1
    assert "| gla | 64, 1, 2, 2, 4, 4 | float32, values first | 62.5 / 250 | 125 / 125 | 2.00 | 2.00 / 0.50 | 2e-03 |" in text
    assert again() == 0 and readme.read_text() == text and "was up to date" in capsys.readouterr().out
    readme.write_text(begin)
    assert again() == 2


def test_tables_are_written_all_or_none_and_never_emptied(tmp_path, capsys):
    begin, end = table.BEGIN.format("speed"), table.END.format("speed")
    (good := tmp_path / "good.md").write_text(text := f"{begin}\nold\n{end}\n")
    (bare := tmp_path / "bare.md").write_text("no markers")
    append(tmp_path / "results", [row(OURS, 0.5)])

    def refused(*files: Path, out: str = "results") -> str:
        assert call("bench", "--table", "--out", tmp_path / out, *(x for file in files for x in ("--into", file))) == 2
        assert good.read_text() == text
        return capsys.readouterr().err

    assert f"there is no {tmp_path / 'absent.md'} here" in refused(good, tmp_path / "absent.md")
    said = refused(good, bare)
    assert "bare.md has no place for a table" in said and all(table.BEGIN.format(name) in said for name in table.TABLES)
    assert refused(good, out="nowhere") == f"chunkwise: --table: no results under {tmp_path / 'nowhere'}\n"


@pytest.mark.parametrize("name, file", list(zip(table.TABLES, ("README.md", "docs/decode.md", "docs/modules.md", "docs/speed.md"))))
def test_documents_show_the_results_of_the_repository(name, file):
    text, begin, end = (README.parent / file).read_text(), table.BEGIN.format(name), table.END.format(name)
    made = table.TABLES[name](load(README.parent / "bench" / "results"))
    assert text[text.index(begin) + len(begin) : text.index(end)] == f"\n\n{made}\n"
