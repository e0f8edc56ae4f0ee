"""chunkwise precompile: the kernels that calls will want are in Triton's cache before there is a GPU."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest
import torch
from crew_case import divmod_or_die

from chunkwise import kernels
from chunkwise.bench import ahead
from chunkwise.bench.case import case, draw
from chunkwise.cli import main
from chunkwise.engine import precompile as module
from chunkwise.engine.crew import Crew
from chunkwise.engine.precompile import DTYPES, LOADS, WAYS, Built, Launch, precompile

SMALL = dict(sizes=((16, 16),), ways=("prefill",), loads=((64, 1, 1),), packed=(False,), chunk_size=16, jobs=1)


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return end.value.code or 0


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache of Triton's, for the workers too."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_what_was_built_is_found_again_and_nothing_is_built_twice(cache):
    from triton.runtime import driver

    heard, before = [], driver._active
    made = precompile("sm_90", ["linear_attn"], heard=lambda built, of: heard.append((built, of)), **SMALL)
    assert [b.kernel for b in made] == ["state_pass_kernel"] and heard == [(made[0], 1)]
    (b,) = made
    assert b.fits and b.arch == "sm_90" and b.registers > 0 and b.spills == 0 and 0 <= b.shared <= b.limit and b.seconds > 0
    assert b.switches["K"] == 16 and b.switches["OUTPUT"] is True and b.switches["STORE"] == 0
    found = {p: p.stat().st_mtime_ns for p in cache.rglob("*") if p.is_file()}
    assert any(p.suffix == ".cubin" for p in found)
    again = precompile("sm_90", ["linear_attn"], **SMALL)
    assert [x.switches for x in again] == [b.switches]
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("*") if p.is_file()} == found
    assert driver._active is before  # the caller's own


def test_a_kernel_s_hash_does_not_depend_on_which_came_first():
    """Else what one process has built another does not find."""
    jit = pytest.importorskip("triton.runtime.jit")
    modules = [import_module(m.name) for m in walk_packages(kernels.__path__, "chunkwise.kernels.")]
    functions = {f"{m.__name__}.{n}": f for m in modules for n, f in vars(m).items() if isinstance(f, jit.JITFunction)}
    import_module("chunkwise.engine.launch")

    def hashes(names):
        for f in functions.values():
            f.hash, f.used_global_vals = None, {}
        return {n: functions[n].cache_key for n in names}

    assert len(functions) > 100 and hashes(sorted(functions)) == hashes(sorted(functions, reverse=True))


LAUNCH = """
import torch
from triton.runtime import driver
from triton import knobs
from chunkwise.engine import precompile as m
stand_in = m._StandIn("sm_90")
class Launcher:
    def __init__(self, src, metadata): pass
    def __call__(self, *args): print("launched")
stand_in.launcher_cls = Launcher
stand_in.load_binary = lambda *a: (None, None, 0, 0, 1024)
driver.set_active(stand_in)
knobs.compilation.listener = lambda *, cache_hit, **_: print("found" if cache_hit else "built")
op = m.all_ops()["linear_attn"]
sizes = {**m.EXTRA_SIZES, "B": 1, "T": 64, "H": 1, "HV": 1, "K": 16, "V": 16}
m._call_once(op, m.WAYS["prefill"], sizes, torch.bfloat16, False, chunk_size=16)
"""


def test_a_real_launch_finds_what_was_built(cache):
    """Through Triton's whole path of a launch, which asks its cache by its own key."""
    precompile("sm_90", ["linear_attn"], **SMALL)
    done = subprocess.run([sys.executable, "-c", LAUNCH], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["found", "launched"]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("op", ["linear_attn", "gated_delta_rule"])
def test_what_calls_of_any_sizes_launch_is_asked_for(op, packed, monkeypatch):
    """However many tokens, heads and sequences; many long ones are scanned one piece after the other, by kernels of their own."""
    runtime = pytest.importorskip("triton.runtime")
    monkeypatch.setattr(runtime.driver, "_active", module._StandIn("sm_90"))

    def heard(*loads):
        return set(module.launches(op, "bfloat16", 128, 128, 1, packed, 64, "ieee", "auto", ("training",), loads))

    known, drawn = heard(*LOADS), random.Random(0)
    for _ in range(60):
        sizes = round(2 ** drawn.uniform(2, 17)), drawn.randint(1, 128), round(2 ** drawn.uniform(0, 9))
        assert heard(sizes) <= known, sizes


def test_a_call_of_given_sizes_is_built_as_a_benchmark_makes_it(monkeypatch):
    """Gates in float32 beside inputs of 16 bits, and a forward pass that keeps nothing: the ways above have neither."""
    runtime = pytest.importorskip("triton.runtime")
    monkeypatch.setattr(runtime.driver, "_active", module._StandIn("sm_90"))
    made = [json.loads(launch.data) for launch in ahead._ours("simple_gla", "1,64,1,1,16,16", "bfloat16")]
    assert any("*fp32" in said["signature"].values() for said in made)
    op, how = module.all_ops()["simple_gla"], dict(form="auto", initial_state=None, output_final_state=False)
    x = draw(case("simple_gla", shape="1,64,1,1,16,16"), torch.device("meta")).x
    alone = {launch.data for launch in module.hear(lambda: module.call(op, x, False, **how))}
    assert alone and alone < {launch.data for launch in ahead._ours("simple_gla", "1,64,1,1,16,16", "bfloat16")}


PEER = Path(sys.prefix) / "peer"  # where the Makefile puts fla
THEIRS = """
import json
from chunkwise.bench import ahead
ahead._begin("sm_90", "", "fla-core", "float32")
asked = (("simple_gla", "1,64,1,1,16,16"), ("simple_gla", "1,64,1,1,16,16,3"), ("delta_rule", "1,64,1,1,16,16"))
print(json.dumps([ahead._theirs("fla-core", op, shape, "float32") for op, shape in asked]))
"""


@pytest.mark.skipif(not (PEER / "fla").is_dir(), reason="fla is not there; the Makefile installs it")
def test_another_library_s_kernels_are_heard_with_all_that_its_tuner_tries():
    """In a process of its own: what imports fla is changed."""
    pytest.importorskip("triton")
    path = os.pathsep.join((str(Path(__file__).parents[1]), str(PEER)))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", THEIRS], env=env, capture_output=True, text=True, check=True)
    theirs, packed, refused = json.loads(done.stdout)
    assert len(packed) == len(theirs) and not {data for *_, data in packed} & {data for *_, data in theirs}
    kernels = {name: [json.loads(data)["options"] for _, n, data in theirs if n == name] for _, name, _ in theirs}
    assert {"chunk_fwd_kernel_h", "chunk_bwd_kernel_dh"} <= set(kernels)  # forward and backward
    assert all(len({(o["num_warps"], o["num_stages"]) for o in some}) > 1 for some in kernels.values())
    [(where, why, _)] = refused
    assert not where and why.startswith("fla-core, delta_rule, 1,64,1,1,16,16, float32: AssertionError") and "float32" in why


def test_command_builds_what_is_benchmarked_and_says_what_is_not(monkeypatch, capsys):
    asked = []

    def build(arch, listen, calls, jobs, heard, card, choose, *begin):
        asked.append((listen.__name__, calls))
        return [Built("k", arch, {}, (), 4, 1, 8, 0, 9, 8)] if choose([Launch("", "it has none", ""), Launch("a", "k", "")])[1:] else []

    monkeypatch.setattr(ahead, "build", build)
    assert call("precompile", "--op", "gla", "--shape", "S1", "--shape", "float32", "--peer", "sdpa") == 0
    assert asked == [
        ("_ours", [("gla", "S1", "bfloat16"), ("gla", "float32", "float32")]),
        ("_theirs", [("sdpa", "gla", "S1", "bfloat16")]), ("_theirs", [("sdpa", "gla", "float32", "float32")]),
    ]  # fmt: skip
    assert "it has none" in capsys.readouterr().out


def test_what_cannot_be_built_or_does_not_fit_is_said(monkeypatch, capsys):
    about = ("k", "sm_90", {"K": 16}, (), 4, 1)
    made = [
        Built(*about, registers=32, spills=0, shared=8, limit=8),
        Built(*about, registers=32, spills=0, shared=9, limit=8),
        Built(*about, error="no such thing"),
    ]
    assert [b.fits for b in made] == [True, False, False]
    monkeypatch.setattr(module, "precompile", lambda *a, **k: made)
    assert call("precompile") == 1
    error = capsys.readouterr().err
    assert "2 cannot run there: k (K=16): 9 bytes of shared memory, sm_90 has 8; k (K=16): no such thing" in error


def test_a_member_the_compiler_dies_on_is_built_alone_or_said():
    """A worker that is killed takes the others' work with it: that is done again."""
    spawn = multiprocessing.get_context("spawn")  # as the compiler's workers begin, but for what they import
    with Crew(lambda jobs: ProcessPoolExecutor(jobs, mp_context=spawn), 2) as crew:
        assert list(crew.each(divmod_or_die, [(7, 2), (0, 0), (9, 4)])) == [(3, 1), None, (2, 1)]
        assert list(crew.each(divmod_or_die, [(7, 2)])) == [(3, 1)]
        many = [(7, 2), (0, 0), (9, 4), (8, 2), (7, 3), (0, 0), (5, 2), (1, 0), (6, 4)]  # more than were under way; two die
        assert list(crew.each(divmod_or_die, many)) == [None if b == 0 else divmod(a, b) for a, b in many]


def test_command_builds_the_modules_too(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(module, "precompile", lambda *a, **k: [])
    monkeypatch.setattr(module, "build", lambda arch, listen, calls, *rest: asked.append((arch, listen.__module__, calls)) or [])
    assert call("precompile", "--modules", "2048,128,32000", "--dtype", "float16") == 0
    assert asked == [("sm_90", "chunkwise.nn.launch.sample", [("float16", 2048, 128, 32000)])]


def test_command_lists_what_it_built(cache, capsys):
    assert call("precompile", "--op", "linear_attn", "--head", "16,16", "--way", "first token", "--chunk", 16, "--jobs", 1) == 0
    out = capsys.readouterr().out
    assert "state_pass" in out and "registers" in out and "kernels for sm_90 in" in out


REFUSALS = {
    "card": ("--arch sm_1", "arch must be among sm_80"),
    "member": ("--op nothing", "ops must be among"),
    "dtype": ("--dtype float64", "dtypes must be among bfloat16"),
    "head": ("--head 128", "--head must be K,V"),
    "modules": ("--modules 2048,128", "--modules must be D,K,V"),
    "no width": ("--modules 0,128,100", "--modules must be at least 1"),
    "no channels": ("--head 0,16", "sizes must be at least 1"),
    "group": ("--group 0", "groups must be at least 1"),
    "way": ("--way sideways", "ways must be among training"),
    "chunk": ("--chunk 48", "chunk_size must be among 16, 32, 64"),
    "precision": ("--precision low", "precision must be among ieee, tf32"),
    "inverse precision": ("--inverse-precision low", "inverse_precision must be among auto, ieee, tf32x3"),
    "unmeasured card": ("--card abacus", "there are no measured configs of 'abacus' (there are: "),
    "peers of no calls": ("--peer fla-core", "--peer wants --shape"),
    "shapes and heads": ("--shape S1 --head 16,16", "--shape takes no --head"),
    "no such shape": ("--shape S9", "shape must be one of"),
    "no such peer": ("--shape S1 --peer nobody", "no peer 'nobody'"),
    "peers on another card": ("--arch gfx942 --shape S1 --peer sdpa", "for NVIDIA's cards, got gfx942"),
    "jobs": ("--jobs -1", "--jobs must be at least 0"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_requests_are_refused_in_one_line(case, capsys):
    options, want = REFUSALS[case]
    assert call("precompile", *options.split()) == 2
    error = capsys.readouterr().err
    assert want in error and error.count("\n") == 1


def test_without_triton_it_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert call("precompile", "--op", "gla") == 2
    assert "triton is not installed" in capsys.readouterr().err


def test_the_interpreter_is_refused():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "chunkwise.cli", "precompile", "--op", "gla"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 2 and "interpreter is on" in done.stderr


def test_ways_cover_what_can_be_asked():
    assert {w.grad for w in WAYS.values()} == {w.initial for w in WAYS.values()} == {w.final for w in WAYS.values()} == {True, False}
    assert set(DTYPES) == {"bfloat16", "float16", "float32"}
