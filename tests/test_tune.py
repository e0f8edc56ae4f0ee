"""Configs measured on a card go before the rules, are found by what they were measured for, and are what is built ahead of time."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from chunkwise.bench import tuner  # noqa: E402
from chunkwise.bench.case import case  # noqa: E402
from chunkwise.cli import main  # noqa: E402
from chunkwise.engine import measured, precompile, tune  # noqa: E402
from chunkwise.engine.config import Card, Config  # noqa: E402
from chunkwise.engine.problem import problem  # noqa: E402
from chunkwise.spec import EXTRA_SIZES, Gate, Rule, Streams, all_ops  # noqa: E402

CARD = "NVIDIA Test 9000"


def posed(B=2, HV=5, K=64, V=64, dtype=torch.bfloat16):
    x = torch.zeros(B, 100, HV, K, dtype=dtype)
    streams = Streams(x, x, torch.zeros(B, 100, HV, V, dtype=dtype))
    return problem(streams, None, None, gate=Gate.NONE, rule=Rule.ADD, chunk=64, scale=1.0, precision="ieee")


def use(config: Config, V: int = 128) -> tuner.Use:
    return tuner.Use("grad", measured.key("grad", posed()), config, V)


def found(config: Config, version: str = triton.__version__) -> measured.Found:
    return measured.Found(config, "linear_attn 2,100,5,5,64,64 bfloat16 forward", 0.25, 0.5, 3, "a day, versions", version)


def save(config: Config, ruled: Config | None = None, kernel: str = "grad", folder: Path | None = None) -> Path:
    of = measured.key(kernel, posed()), ruled or tune.RULES[kernel].rule(posed())
    return measured.save(CARD, {of: found(config)}, folder)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A package whose files of measured configs are these."""
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    monkeypatch.setattr(tune, "card", lambda: Card("sm_90", 227 << 10, CARD))
    measured.measured.cache_clear()
    yield tmp_path
    measured.measured.cache_clear()


def test_what_was_measured_goes_before_the_rule_for_such_problems_alone(folder):
    fast = replace(tune.config("grad", posed()), num_warps=8)
    save(fast)
    assert (folder / "nvidia_test_9000.json").exists() and measured.cards() == ["nvidia_test_9000"]
    assert tune.config("grad", posed()) == tune.config("grad", posed(B=1, HV=15)) == fast  # 8 to 15 heads in all
    for other in (posed(B=4), posed(K=128), posed(V=32), posed(dtype=torch.float16), posed(B=1), replace(posed(), inverse="bf16")):
        assert tune.config("grad", other) == tune.RULES["grad"].rule(other)
    assert tune.config("inverse", posed()) == tune.RULES["inverse"].rule(posed())


def test_what_was_measured_beside_another_rule_is_asleep(folder):
    """A rule that has changed since was measured later."""
    ruled = tune.config("grad", posed())
    then = replace(ruled, num_stages=4)
    save(replace(then, num_warps=8), then)
    assert tune.config("grad", posed()) == ruled


def test_what_another_triton_built_is_asleep(folder):
    """It may have ordered sums otherwise."""
    ruled = tune.config("grad", posed())
    measured.save(CARD, {(measured.key("grad", posed()), ruled): found(replace(ruled, num_warps=8), "1.0")})
    assert tune.config("grad", posed()) == ruled


def test_a_later_measurement_replaces_the_same_one_and_keeps_the_others(folder):
    ruled = {name: tune.RULES[name].rule(posed()) for name in ("grad", "inverse")}
    faster = [replace(ruled["grad"], num_warps=w) for w in (1, 2)]
    save(faster[0], replace(ruled["grad"], num_stages=4))  # of a rule that there was
    save(ruled["inverse"], kernel="inverse")
    save(faster[1])
    held = {(measured.key(name, posed()), ruled[name]): found(c) for name, c in (("grad", faster[1]), ("inverse", ruled["inverse"]))}
    assert measured.load(CARD) == held and measured.load("another") == measured.load("") == {}


def test_a_file_that_cannot_be_written_leaves_what_was_there(folder, monkeypatch):
    """Calls refuse a broken file."""
    write = Path.write_text

    def full(path, text):
        write(path, text[: len(text) // 2])
        raise OSError("No space left on device")

    save(Config(32, 64, 4, 2))
    kept = measured.load(CARD)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        save(Config(32, 64, 8, 2))
    assert measured.load(CARD) == kept and measured.cards() == ["nvidia_test_9000"]


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda d: {}, "no file of measured"), (lambda d: d | {"configs": [3]}, r"configs\[0\] must have kernel, .* got 3"),
        (lambda d: d | {"configs": d["configs"] * 2 + [{"kernel": "grad"}]}, r"configs\[2\] must have .*, got kernel"),
        (lambda d: row(d, K="64"), "K must be of type int, got '64'"), (lambda d: row(d, config={"BK": 64}), "must have BV, got BK"),
        (lambda d: row(d, config=[]), r"config must be of type dict, got \[\]"),
        *((lambda d, f=f, x=x: row(d, config=d["configs"][0]["config"] | {f: x}), said) for f, x, said in (
            ("warps", 4, "has no 'warps', but BK"), ("num_warps", 3, "num_warps must be 1, 2, 4, 8 or 16, got 3"),
            ("tma", 1, "tma must be true"), ("num_stages", True, "num_stages must be 1 to 16, got True"),
            ("BV", 48, "BV must be 0 or a power of two, got 48"),
            ("registers", 1000, "registers must be null or 16 to 255, got 1000"),
            *((f, x, "grad is not what was measured on NVIDIA Test 9000: its seal is broken") for f, x in (
                ("num_warps", 8), ("num_stages", 3), ("BV", 32), ("fuse", False), ("tma", False), ("registers", 128),
            )),
        )),
        *((lambda d, n=n, x=x: row(d, **{n: x}), "its seal is broken") for n, x in (
            ("heads", 16), ("seal", ""), ("ms", 0.2), ("when", "later"), ("ruled", {"BK": 32, "BV": 64, "num_warps": 8, "num_stages": 2}),
        )),
        (lambda d: row(d, ms=1), "ms must be of type float, got 1"), (lambda d: row(d, ruled={}), "a config must have BK, got nothing"),
    ],
)  # fmt: skip
def test_a_file_that_was_broken_is_refused_by_name(folder, change, named, capsys, monkeypatch):
    file = save(Config(64, 64, 4, 2), Config(64, 64, 8, 2))
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    measured.measured.cache_clear()
    for asks in (lambda: measured.load(CARD), lambda: tune.config("grad", posed())):
        with pytest.raises(ValueError, match=f"nvidia_test_9000.json.*{named}"):
            asks()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: CARD)
    with pytest.raises(SystemExit) as end:  # before anything is tried
        main(["tune", "gla"])
    assert end.value.code == 2 and "nvidia_test_9000.json" in capsys.readouterr().err


def row(d: dict, **change: object) -> dict:
    """The file with one row's entries changed."""
    return d | {"configs": [d["configs"][0] | change]}


@pytest.mark.parametrize("name, other", [("BK", lambda BK: 2 * BK), ("fuse", lambda fuse: not fuse)])
def test_what_was_measured_of_other_sums_is_refused(folder, name, other):
    """They go over blocks of keys, and a product may be rounded before it is added: a result would have other bits."""
    ruled = tune.config("grad", posed())
    wanted, got = getattr(ruled, name), other(getattr(ruled, name))
    save(replace(ruled, **{name: got}))
    with pytest.raises(ValueError, match=rf"nvidia_test_9000.json: configs\[0\]: grad must have {name} {wanted}, got {got}"):
        tune.config("grad", posed())


def test_what_was_measured_on_one_card_is_not_another_s(folder):
    file = save(Config(64, 64, 4, 2), Config(64, 64, 4, 2))
    file.rename(measured.at("another"))
    with pytest.raises(ValueError, match="another.json: .* grad is not what was measured on another: its seal is broken"):
        measured.load("another")


ARCH = {"nvidia_h200": ("sm_90", "NVIDIA H200")}  # cards whose measurements come with the package
SHIPPED = [(card, case) for card in measured.cards() for case in dict.fromkeys(f.case for f in measured.load(ARCH[card][1]).values())]


@pytest.mark.parametrize("card, timed", SHIPPED, ids=str)
def test_what_was_measured_is_beside_what_the_rules_say_now(card, timed, monkeypatch):
    """A row whose rule has changed is asleep: measure that case anew (`chunkwise tune`) or take its rows out, and say which is faster."""
    runtime = pytest.importorskip("triton.runtime")
    arch, name = ARCH[card]
    monkeypatch.setattr(runtime.driver, "_active", precompile._StandIn(arch, name))
    op, shape, dtype, way = timed.split()
    sizes = {**EXTRA_SIZES, **dict(zip("B T H HV K V".split(), map(int, shape.split(","))))}
    call = partial(precompile._call_once, all_ops()[op], precompile.Way(way == "forward+backward", False, False), sizes)
    seen: list[tuner.Use] = []
    precompile.hear(lambda: seen.extend(tuner.uses(lambda: call(precompile.DTYPES[dtype], False, chunk_size=64))))
    now = {u.key: u.ruled for u in seen}
    for (key, ruled), found in measured.load(name).items():
        if found.case == timed:
            assert now[key] == ruled, f"{card}: {key[0]} of {timed} was measured beside {ruled}, its rule says {now[key]} now"


def test_candidates_change_one_thing_and_never_the_sums():
    rule = Config(64, 64, 4, 2, registers=168)
    made = tuner.candidates(use(rule), rule)
    assert rule not in made and len(set(made)) == len(made) <= 10
    assert all(c.BK == rule.BK and c.BV in (64, 128) and c.num_warps in (2, 4, 8) for c in made)  # never narrower than 64
    assert {c.num_stages for c in made} == {1, 2, 3} and any(not c.tma for c in made) and any(c.registers is None for c in made)
    bare = Config(64, 0, 4, 1)  # a kernel without blocks of values
    assert all(c.BV == 0 for c in tuner.candidates(use(bare), bare))
    narrow = Config(64, 32, 4, 1)
    assert {c.BV for c in tuner.candidates(use(narrow, V=40), narrow)} == {16, 32, 64}
    assert narrow not in tuner.candidates(use(narrow), replace(narrow, num_stages=2))  # a step away, not back


def test_overridden_configs_last_as_long_as_they_should():
    before, other = dict(tune.RULES), Config(16, 16, 1, 1)
    with pytest.raises(KeyError), tuner.using({"grad": other}):
        assert tune.config("grad", posed()) == other
        raise KeyError
    assert tune.RULES == before


def test_kernels_of_a_call_are_seen_with_their_configs(folder):
    def call():
        tune.config("inverse", posed())
        tune.config("grad", posed())
        tune.config("grad", posed(K=16))  # two configs: it is not known which is whose

    said: list[str] = []
    assert [(u.kernel, u.ruled) for u in tuner.uses(call, said.append)] == [("inverse", tune.config("inverse", posed()))]
    assert said == ["grad: the call runs it in 2 ways: not tuned"]


def test_what_cannot_be_captured_is_not_timed(monkeypatch):
    """It would run with the configs of whoever is timed beside it."""

    class Side:
        cuda, graph, why = True, None, "not captured: out of memory"

        def __init__(self, call, device): ...

        def warm(self, most): ...

        def prepare(self, seconds): ...

    said: list[str] = []
    monkeypatch.setattr(tuner, "Side", Side)
    rule = Config(64, 64, 4, 2)
    search = tuner.Search(case("gla"), torch.device("cuda"), None, False, lambda: None, {}, None, said.append)  # type: ignore[arg-type]
    search.moves = {use(rule): False}
    assert search.fastest(use(rule), rule, [replace(rule, num_warps=8)]) == rule and not search.moves[use(rule)]
    assert said[0].startswith("grad BK 64 BV 64 warps 8 stages 2: cannot be timed: not captured: out of memory")


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["gla"], "no GPU"), (["gla", "--jobs", "-1"], "--jobs"), (["nobody"], "chunkwise: no member 'nobody'"),
        (["gla", "--kernel", "corn"], "--kernel must be among"), (["gla", "--dtype", "float64"], "float16, float32, got float64"),
    ],
)  # fmt: skip
def test_what_cannot_be_tuned_is_refused_in_one_line(arguments, named, capsys):
    if named == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit) as end:
        main(["tune", *arguments])
    said = capsys.readouterr()
    assert end.value.code == 2 and named in said.err and said.err.count("\n") == 1
