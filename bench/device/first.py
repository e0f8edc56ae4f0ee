"""First contact with a GPU: build, prove, then time every stage of the Triton plan under many configs. Needs torch and triton alone.

    python bench/device/first.py --sweep 0                                            prove all cells, time the rules' configs
    python bench/device/first.py --prove 0 --cells DeltaNet,GDN --shapes S1,S3        sweep the configs of some

Prints one line per fact while it runs and a table of the best configs last. One failing config never stops the rest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from chunkwise import draw
from chunkwise.engine import chunk, plan_triton, tune
from chunkwise.engine import stages_triton as stages
from chunkwise.engine.problem import Problem, problem
from chunkwise.engine.tune import Config
from chunkwise.spec import Gate, Rule, Streams

CELLS = {
    "linear": (Gate.NONE, Rule.ADD), "RetNet": (Gate.HEAD, Rule.ADD), "simpleGLA": (Gate.SCALAR, Rule.ADD), "GLA": (Gate.KEY, Rule.ADD),
    "DeltaNet": (Gate.NONE, Rule.DELTA), "GDN": (Gate.SCALAR, Rule.DELTA), "KDA": (Gate.KEY, Rule.DELTA),
}  # fmt: skip
SHAPES = {"S1": dict(B=8, T=4096, H=16, HV=16), "S2": dict(B=1, T=32768, H=32, HV=32), "S3": dict(B=1, T=8192, H=8, HV=8)}
PROOFS = [
    dict(B=2, T=200, H=2, HV=2, K=128, V=128), dict(B=1, T=333, H=1, HV=3, K=64, V=96), dict(B=2, T=65, H=2, HV=2, K=40, V=128),
    dict(B=1, T=100, H=2, HV=2, K=256, V=64), dict(B=1, T=1000, H=4, HV=4, K=128, V=128),
]  # fmt: skip
STATE = [Config(128, *c, tma=False) for c in ((128, 8, 3), (64, 4, 2), (64, 4, 3), (32, 4, 3))] + [
    Config(128, *c)
    for c in (
        (128, 8, 1), (128, 8, 2), (128, 8, 3), (64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 8, 2), (32, 4, 2), (32, 4, 3), (16, 4, 3),
    )
]  # fmt: skip
GRAD_BLOCKS, GRAD_LAUNCHES = ((64, 64), (128, 32), (128, 64), (64, 128), (64, 32)), ((4, 1), (8, 1), (4, 2), (8, 2))
SWEEP = {
    "inverse": [Config(128, 0, w, 1) for w in (1, 2, 4, 8)],
    **{f"state_pass{s}": STATE for s in ("", "_states", "_reverse")},
    "grad": [Config(*b, *c) for b in GRAD_BLOCKS for c in GRAD_LAUNCHES],
    "grad_key": [Config(bk, bv, w, s) for bk, bv in ((64, 32), (64, 64), (128, 64)) for w, s in GRAD_LAUNCHES],
    "score": [Config(bk, 0, w, 1) for bk in (32, 64, 128) for w in (4, 8)],
}
RULES = dict(tune.RULES)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def using(kernel: str, c: Config) -> Iterator[None]:
    """The kernel runs with this config inside."""
    tune.RULES[kernel] = lambda p: c
    try:
        yield
    finally:
        tune.RULES[kernel] = RULES[kernel]


def inputs(cell: str, dtype: torch.dtype = torch.bfloat16, slow: bool = True, *, B, T, H, HV, K=128, V=128) -> Streams:
    gate, rule = CELLS[cell]
    kw = dict(device=DEVICE)
    g = None
    if gate is Gate.HEAD:
        g = torch.log1p(-torch.exp2(-5.0 - torch.arange(HV, **kw) % 8))
    elif gate is not Gate.NONE:
        g = draw.log_decay(B, T, HV, *((K,) if gate is Gate.KEY else ()), **kw) / (16 if slow else 1)
        g = g.to(dtype if gate is Gate.KEY else torch.float32)
    q, k, v = draw.normal(B, T, H, K, **kw), draw.unit(B, T, H, K, **kw), draw.normal(B, T, HV, V, **kw)
    beta = draw.write_strength(B, T, HV, **kw).to(dtype) if rule is Rule.DELTA else None
    return Streams(q.to(dtype), k.to(dtype), v.to(dtype), g, beta)


def asked(cell: str, x: Streams, cu: Tensor | None = None) -> Problem:
    gate, rule = CELLS[cell]
    return problem(x, cu, None, gate=gate, rule=rule, chunk=64, scale=x.q.shape[-1] ** -0.5, precision="ieee")


def pieces(cell: str, p: Problem, x: Streams) -> dict[str, Callable[[], object]]:
    """Every stage as a function of nothing; earlier stages' results are computed once."""
    S0, do = None, torch.randn_like(x.v)
    at = stages.index(p)
    saved, _ = plan_triton.scores_of(p, x, at, None)
    saved, decayed = plan_triton.scores_of(p, x, at, saved)
    T = saved[-1] if saved is not None and p.rule is Rule.DELTA else None
    run: dict[str, Callable[[], object]] = {}
    if p.gate is Gate.KEY:
        run["score"] = lambda: plan_triton.scores_of(p, x, at, None)
    elif p.rule is Rule.DELTA:
        run["inverse"] = lambda: stages.inverse(p, x, at)
    run["state_pass"] = lambda: stages.state_pass(p, x, at, S0, T=T, decayed=decayed, output=True)
    run["state_pass_states"] = lambda: stages.state_pass(p, x, at, S0, T=T, decayed=decayed, store=True)
    run["state_pass_reverse"] = lambda: stages.state_pass(p, x, at, None, T=T, decayed=decayed, do=do, store=True)
    try:
        from chunkwise.engine.stages_triton_grad import grads

        there, back = run["state_pass_states"](), run["state_pass_reverse"]()
        run["grad_key" if p.gate is Gate.KEY else "grad"] = lambda: grads(
            p, x, at, do, S=there.S, dS=back.S, X=there.X, U=back.X, decayed=decayed
        )
    except Exception:
        traceback.print_exc()
    return run


def stages_of(cell: str) -> list[str]:
    gate, rule = CELLS[cell]
    first = ["score"] if gate is Gate.KEY else ["inverse"] if rule is Rule.DELTA else []
    return [*first, "state_pass", "state_pass_states", "state_pass_reverse", "grad_key" if gate is Gate.KEY else "grad"]


def flat(made: object) -> list[Tensor]:
    return [t for t in (made if isinstance(made, tuple) else (made,)) for t in (flat(t) if isinstance(t, tuple) else [t]) if t is not None]


# --- build ----------------------------------------------------------------------------------------------------------------------------


def build(job: tuple[str, str, Config | None, tuple[tuple[str, int], ...]]) -> str:
    """Compile what a stage launches, in a process of its own; the disk cache keeps it."""
    cell, kernel, c, size = job
    t = time.time()
    try:
        x = inputs(cell, **dict(size))
        p = asked(cell, x)
        if c is None:
            S0 = torch.zeros(p.N, p.HV, p.K, p.V, device=DEVICE)
            o, ST, T = plan_triton.forward(p, x, S0, final=True, save=True)
            plan_triton.backward(p, x, S0, T, x.v, S0)
        else:
            with using(kernel, c):
                pieces(cell, p, x)[kernel]()
        return f"built {cell} {kernel} {c} in {time.time() - t:.1f} s"
    except Exception as e:
        return f"NOT built {cell} {kernel} {c}: {type(e).__name__} {str(e)[-200:]!r}"


# --- prove ----------------------------------------------------------------------------------------------------------------------------


def recurrence(gate: Gate, rule: Rule, x: Streams, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The definition, token by token. S: [B, HV, K, V]."""
    n = x.v.shape[2] // x.q.shape[2]
    q, k = (t.repeat_interleave(n, 2) for t in x[:2])
    out = []
    for t in range(x.q.shape[1]):
        if x.g is not None:
            g = x.g.expand(S.shape[0], -1) if gate is Gate.HEAD else x.g[:, t]
            S = S * (g[..., None] if gate is Gate.KEY else g[..., None, None]).exp()
        kt, v = k[:, t, :, :, None], x.v[:, t, :, None, :]
        if rule is Rule.DELTA:
            v = x.beta[:, t, :, None, None] * (v - (kt * S).sum(-2, keepdim=True))
        S = S + kt * v
        out.append(scale * (q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(out, 1), S


def error(got: Tensor, truth: Tensor) -> float:
    e = float((got.double() - truth).norm() / truth.norm().clamp(min=1e-30))
    return e if e == e else float("inf")


def prove(cell: str, dtype: torch.dtype, size: dict[str, int], packed: bool = False) -> str:
    """Forward and all gradients against the float64 recurrence; the torch plan in the same dtype beside it."""
    gate, rule = CELLS[cell]
    torch.manual_seed(1)
    x = inputs(cell, dtype, slow=False, **({**size, "B": 1} if packed else size))
    cu = None
    if packed:
        cu = torch.tensor([0, 0, 1, 64, 64, 150, size["T"]], device=DEVICE, dtype=torch.int32).clamp(max=size["T"])
    p = asked(cell, x, cu)
    S0, dST = (torch.randn(p.N, p.HV, p.K, p.V, device=DEVICE) for _ in range(2))
    do = torch.randn_like(x.v)
    leaves = [None if t is None else t.double().requires_grad_() for t in (*x[:5], S0)]
    x64, S64 = Streams(*leaves[:5]), leaves[5]
    if packed:
        cuts = cu.tolist()
        parts = [
            recurrence(gate, rule, Streams(*(t if t is None or t.ndim < 3 else t[:, a:b] for t in x64)), S64[i : i + 1], p.scale)
            for i, (a, b) in enumerate(zip(cuts, cuts[1:])) if b > a
        ]  # fmt: skip
        empty = [S64[i : i + 1] for i, (a, b) in enumerate(zip(cuts, cuts[1:])) if b == a]
        o = torch.cat([a for a, _ in parts], 1)
        states, blank = iter([s for _, s in parts]), iter(empty)
        ST = torch.cat([next(states) if b > a else next(blank) for a, b in zip(cuts, cuts[1:])])
    else:
        o, ST = recurrence(gate, rule, x64, S64, p.scale)
    used = [t for t in leaves if t is not None]
    truth = [o, ST, *torch.autograd.grad((o * do).sum() + (ST * dST).sum(), used)]
    names = ["o", "ST", *(f"d{n}" for n, t in zip((*Streams._fields[:5], "S0"), leaves) if t is not None)]

    def all_of(plan) -> list[Tensor]:
        o, ST, saved = plan.forward(p, x, S0, final=True, save=True)
        d, dS0 = plan.backward(p, x, S0, saved, do, dST)
        return [o, ST, *(t for t in (*d[:5], dS0) if t is not None)]

    got, again, torchs = all_of(plan_triton), all_of(plan_triton), all_of(chunk)
    errors = [(n, error(a, t), error(b, t)) for n, a, b, t in zip(names, got, torchs, truth)]
    eps = torch.finfo(dtype).eps
    bad = [f"{n} {a:.1e} (torch {b:.1e})" for n, a, b in errors if not a <= 4 * (b + eps)]
    same = all(torch.equal(a, b) for a, b in zip(got, again))
    worst = max(errors, key=lambda e: e[1])
    flaws = f"{'' if same else 'NOT REPEATABLE'} {bad or ''}"
    label = f"{cell} {str(dtype)[6:]} {'packed ' if packed else ''}{' '.join(map(str, size.values()))}"
    return f"{'ok ' if same and not bad else 'BAD'} {label} worst {worst[0]} {worst[1]:.1e} {flaws}"


# --- time -----------------------------------------------------------------------------------------------------------------------------


def clock(f: Callable[[], object], rounds: int = 5, budget: float = 0.06) -> float:
    """Median milliseconds of a call, from replays of a graph that holds it."""
    f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def span(n: int) -> float:
        ends[0].record()
        for _ in range(n):
            graph.replay()
        ends[1].record()
        torch.cuda.synchronize()
        return ends[0].elapsed_time(ends[1]) / n

    n = max(1, min(50, int(budget * 1e3 / rounds / max(span(2), 1e-3))))
    return sorted(span(n) for _ in range(rounds))[rounds // 2]


def host(f: Callable[[], object], n: int = 30) -> float:
    """Microseconds the host spends on a call."""
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(n):
        f()
    spent = time.perf_counter() - t
    torch.cuda.synchronize()
    return spent / n * 1e6


def resources() -> str:
    """Registers, spills and shared memory of the kernels launched last, from Triton's own cache of loaded kernels."""
    from chunkwise.kernels import grad, inverse, score, state_pass

    out = []
    for module in (inverse, state_pass, score, grad):
        for f in vars(module).values():
            for caches in getattr(f, "device_caches", {}).values():
                for k in list(caches[0].values()):
                    if getattr(k, "n_regs", None) is not None and not getattr(k, "shown", False):
                        k.shown = True
                        out.append(f"regs {k.n_regs} spills {k.n_spills} smem {k.metadata.shared}")
    return "; ".join(out)


Best = dict[tuple[str, str, str], tuple[float, Config | None]]


def measure(shape: str, cell: str, kernels: list[str], sweep: bool, rows: list[dict], best: Best) -> None:
    """Every stage of one cell at one shape under every config, then the whole with the best ones."""
    x = inputs(cell, **SHAPES[shape])
    p = asked(cell, x)
    run = pieces(cell, p, x)
    resources()
    for kernel, f in run.items():
        if kernel not in kernels:
            continue
        base = flat(f())
        for c in (SWEEP[kernel] if sweep else []) + [None]:
            try:
                with using(kernel, c or RULES[kernel](p)):
                    off = max((error(t, b.double()) for t, b in zip(flat(f()), base)), default=0.0)
                    how = resources()
                    ms = clock(f)
            except Exception as e:
                print(f"failed {shape} {cell} {kernel} {c}: {type(e).__name__} {str(e)[-120:]!r}", flush=True)
                continue
            label = "rule" if c is None else f"BK {c.BK} BV {c.BV} w {c.num_warps} s {c.num_stages}{'' if c.tma else ' ptr'}"
            print(f"{shape} {cell:9s} {kernel:18s} {label:28s} {ms:7.3f} ms  differs {off:.0e}  {how}", flush=True)
            rows.append(dict(shape=shape, cell=cell, kernel=kernel, config=label, ms=ms, differs=off))
            key = (shape, cell, kernel)
            if off < 0.02 and (key not in best or ms < best[key][0]):
                best[key] = (ms, c)
    for kernel in run:
        c = best.get((shape, cell, kernel), (0, None))[1]
        if c is not None:
            tune.RULES[kernel] = lambda p, c=c: c
    do = torch.randn_like(x.v)

    def step() -> None:
        _, _, T = plan_triton.forward(p, x, None, final=False, save=True)
        plan_triton.backward(p, x, None, T, do, None)

    try:
        fwd = clock(lambda: plan_triton.forward(p, x, None, final=False, save=True))
        both, eager = clock(step), host(step)
        print(f"{shape} {cell} forward {fwd:.3f} forward+backward {both:.3f} ms, host time of both {eager:.0f} us", flush=True)
        rows.append(dict(shape=shape, cell=cell, kernel="all", forward=fwd, both=both, host_us=eager))
    finally:
        tune.RULES.update(RULES)


def main() -> None:
    a = argparse.ArgumentParser()
    a.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ".")))
    a.add_argument("--cells", default=",".join(CELLS))
    a.add_argument("--shapes", default=",".join(SHAPES))
    a.add_argument("--kernels", default=",".join(SWEEP))
    a.add_argument("--sweep", type=int, default=1)
    a.add_argument("--prove", type=int, default=1)
    a.add_argument("--seconds", type=float, default=540.0)
    a.add_argument("--dtypes", default="bfloat16,float32")
    args = a.parse_args()
    t0 = time.time()
    left = lambda: args.seconds - (time.time() - t0)
    cells, shapes, kernels = args.cells.split(","), args.shapes.split(","), args.kernels.split(",")
    rows: list[dict] = []
    if DEVICE == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
        size = tuple(dict(B=1, T=64, H=8, HV=8).items())
        jobs = [(c, "plan", None, size) for c in cells]
        if args.sweep:
            jobs += [(c, k, s, size) for c in cells for k in stages_of(c) if k in kernels for s in SWEEP[k]]
        if args.prove:
            jobs += [(c, "plan", None, tuple({**s, "T": 64}.items())) for c in cells for s in PROOFS]
        with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
            for line in pool.imap_unordered(build, jobs):
                if line.startswith("NOT"):
                    print(line, flush=True)
        print(f"built {len(jobs)} in {time.time() - t0:.0f} s", flush=True)
    if args.prove:
        for cell in cells:
            for name in args.dtypes.split(","):
                for i, size in enumerate(PROOFS if DEVICE == "cuda" else [dict(B=1, T=70, H=1, HV=2, K=16, V=16)]):
                    for packed in (False, True) if i == 0 else (False,):
                        if left() < 60:
                            continue
                        try:
                            print(prove(cell, getattr(torch, name), size, packed), flush=True)
                        except Exception as e:
                            print(f"BAD {cell} {name} {size} {type(e).__name__}: {str(e)[-300:]}", flush=True)
        print(f"proved in {time.time() - t0:.0f} s", flush=True)
    if DEVICE != "cuda":
        return
    best: Best = {}
    for shape in shapes:
        for cell in cells:
            if left() < 15:
                print("out of time", flush=True)
                break
            try:
                measure(shape, cell, kernels, bool(args.sweep), rows, best)
            except Exception as e:
                print(f"failed {shape} {cell} {type(e).__name__}: {str(e)[-300:]}", flush=True)
            torch.cuda.empty_cache()
    (args.out / "first.json").write_text("\n".join(json.dumps(r) for r in rows))
    print("--- best")
    for (shape, cell, kernel), (ms, c) in best.items():
        print(f"{shape} {cell:9s} {kernel:18s} {ms:7.3f}  {'rule' if c is None else (c.BK, c.BV, c.num_warps, c.num_stages, c.tma)}")
    for r in rows:
        if r["kernel"] == "all":
            print(f"{r['shape']} {r['cell']:9s} forward {r['forward']:.3f}  forward+backward {r['both']:.3f}")


if __name__ == "__main__":
    main()
