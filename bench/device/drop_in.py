"""One Gated DeltaNet layer of transformers' Qwen3.5 (H=16, HV=32, K=V=128): through chunkwise's drop-in and through fla-core.

    python bench/device/drop_in.py                       every side in a process of its own, in turn, twice; the errors beside the times
    python bench/device/drop_in.py --together            the same in one process, which patches and unpatches the layer
    OMP_NUM_THREADS=2 python bench/device/drop_in.py --device cpu     on a CPU: the drop-in beside transformers alone, half a minute

Sides: ours (the drop-in), fla (fla-core's operator, the convolution of causal_conv1d where it is installed, else transformers' own: what a
user of these has), fla+conv (fla-core's operator, our convolution: the operators alone differ), fallback (transformers alone). Errors are
relative, against the layer in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import inspect
import json
import pathlib
import subprocess
import sys
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch

from chunkwise.bench.record import surroundings

DEFAULTS = {
    "cuda": dict(sides="ours,fla,fla+conv", sizes="1x8192,4x4096", dtype="bfloat16", hidden=2048, rounds=2),
    "cpu": dict(sides="ours,fallback", sizes="1x2048", dtype="float32", hidden=256, rounds=1, together=True),
}


def layer(device: str, hidden: int = 2048):
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config = Qwen3_5TextConfig(
        hidden_size=hidden, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip
    torch.manual_seed(0)
    made = Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        made.dt_bias.uniform_(-6.9, -2.3)  # softplus: 0.001 to 0.1, as trained models have it
    return made.to(device)


def results(model, x, call=None):
    """Output, and the gradients of the input and of every parameter, of the model or of what was compiled of it."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = (model if call is None else call)(x)
    out.backward(torch.sin(torch.arange(out.numel(), device=x.device, dtype=torch.float32)).view(out.shape).to(out.dtype))
    return {"out": out.detach(), "dx": x.grad, **{f"d{n}": p.grad for n, p in model.named_parameters()}}


def errors(got, truth):
    one = {n: ((got[n].double() - t).norm() / t.norm()).item() for n, t in truth.items()}
    worst = max((e, n) for n, e in one.items() if n != "out")
    return {"out": one["out"], "gradients": worst[0], "worst": worst[1]}


def clock(call, device: str, repeat: int):
    """(median milliseconds on the device's clock, median milliseconds of the call)."""
    for _ in range(3 if device == "cuda" else 1):
        call()
    spans, calls = [], []
    for _ in range(repeat):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start = time.perf_counter()
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            calls.append((time.perf_counter() - start) * 1e3)
            spans.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            calls.append((time.perf_counter() - start) * 1e3)
            spans.append(calls[-1])
    return sorted(spans)[repeat // 2], sorted(calls)[repeat // 2]


def graph_milliseconds(call, repeat: int):
    """Median milliseconds of the captured call: the device's work without the host's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return clock(graph.replay, "cuda", repeat)[0]


def attempt(line, name, call):
    try:
        line[name] = call()
    except Exception as error:
        line[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        if "--verbose" in sys.argv:
            traceback.print_exc()


@contextlib.contextmanager
def bound(side: str, a):
    """transformers' modeling file with the functions of that side."""
    from chunkwise.compat import patch_transformers

    if "fla" in side and "fla" not in sys.modules:
        import fla.ops.common.chunk_o

        # Its guard refuses the gated backward on Triton 3.4.0 to 3.7.0 (fla #640). Off for timing; the errors say if it is right.
        fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True
        from chunkwise.bench.autotuner import build_side_by_side

        build_side_by_side(threads=a.threads, shortlist=a.shortlist, few=a.few)
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    if side == "ours":
        with patch_transformers(replace=True):
            yield modeling
        return
    before = modeling.causal_conv1d_fn
    if side == "fla+conv":
        with patch_transformers(replace=True):
            ours = modeling.causal_conv1d_fn
        modeling.causal_conv1d_fn = ours
    try:
        yield modeling
    finally:
        modeling.causal_conv1d_fn = before


def sides(a) -> None:
    """The sides in this process, in turn."""
    if any("fla" in s for s in a.sides.split(",")):
        with bound("fla", a):  # transformers' file takes what it finds when it is imported
            pass
    model, found = layer(a.device, a.hidden), []
    for round_ in range(a.rounds):
        for name in a.sides.split(","):
            with bound(name, a) as modeling:
                names = dict(operator=modeling.torch_chunk_gated_delta_rule, convolution=modeling.causal_conv1d_fn)
                parts = {n: inspect.getclosurevars(f).nonlocals["implementation"].__module__ for n, f in names.items()}
                for size in a.sizes.split(","):
                    low, (B, T) = copy.deepcopy(model).to(getattr(torch, a.dtype)), map(int, size.split("x"))
                    torch.manual_seed(1)
                    x = torch.randn(B, T, a.hidden, device=a.device, dtype=getattr(torch, a.dtype))
                    line = {**surroundings(x.device), "pass": "layer", "side": name, "dtype": a.dtype, **parts}
                    line |= {"case": {"op": "qwen3_5", "shape": f"{B},{T},{a.hidden}"}, "hidden": a.hidden, "B": B, "T": T}
                    found.append(measure(line | {"round": round_}, low, x, a))
    for one in found:
        if one["side"] == "ours":
            compare(one, [other for other in found if other["side"] != "ours" and all(one[n] == other[n] for n in ("B", "T", "round"))])


def compare(one, others) -> None:
    """How many times as fast as each of the others `one` was: calls, by the host's clock."""
    where = f"{one['B']}x{one['T']}, hidden {one['hidden']}"
    for other in others:
        for name in ("forward", "step"):
            ours, theirs = one[f"{name}_ms"], other[f"{name}_ms"]
            if isinstance(ours, list) and isinstance(theirs, list):
                print(f"{where}, {name}: the drop-in is {theirs[1] / ours[1]:.2f} times as fast as {other['side']}", flush=True)


def said(line, a) -> None:
    print(json.dumps(line), flush=True)
    if a.out:
        with open(a.out, "a") as file:
            file.write(json.dumps(line) + "\n")


@functools.lru_cache(maxsize=1)
def truth(low, x):
    """What the layer computes in float64, by the drop-in."""
    from chunkwise.compat import patch_transformers

    with patch_transformers(replace=True):
        return results(copy.deepcopy(low).double(), x.double())


def measure(line, low, x, a):
    """Errors and times of the layer `low` of x [B, T, hidden], as it is or compiled, said as they come and returned."""
    call = low
    if a.compile:
        torch._dynamo.reset()
        line, call = line | {"compiled": True}, torch.compile(low, fullgraph=line["side"] == "ours")  # others as far as they let
    grown, dout = x.detach().clone().requires_grad_(), torch.randn_like(x)

    def forward():
        with torch.no_grad():
            return call(x)

    def step():
        for p in (grown, *low.parameters()):
            p.grad = None
        call(grown).backward(dout)

    def first(call):
        start = time.perf_counter()
        call()
        return round(time.perf_counter() - start, 2)

    repeat = a.repeat if a.device == "cuda" else min(a.repeat, 2)
    if a.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for name, timed in (("step", step), ("forward", forward)):
        attempt(line, f"{name}_first_s", functools.partial(first, timed))
        attempt(line, f"{name}_ms", lambda timed=timed: [round(t, 3) for t in clock(timed, a.device, repeat)])
        if a.compile:
            said(line, a)
    if a.device == "cuda":
        line["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        for name, timed in (("forward", forward), ("step", step)):
            attempt(line, f"{name}_graph_ms", lambda timed=timed: round(graph_milliseconds(timed, repeat), 3))
    if line["round"] == 0 and not a.no_errors:
        attempt(line, "errors", lambda: errors(results(low, x, call), truth(low, x)))
    said(line, a)
    if a.compile:
        attempt(line, "graph_breaks", lambda: torch._dynamo.explain(low)(grown).graph_break_count)
        said(line, a)
    return line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--together", action="store_true", help="all sides in this process")
    parser.add_argument("--sides")
    parser.add_argument("--sizes")
    parser.add_argument("--dtype")
    parser.add_argument("--device", default="cuda", choices=DEFAULTS)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--limit", type=float, default=300, help="seconds that a side may take")
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--compile", action="store_true", help="the layer compiled by inductor: ours whole")
    parser.add_argument("--shortlist", type=pathlib.Path, help="Triton's cache of an earlier run, whose best candidates fla's tuner tries")
    parser.add_argument("--few", type=int, help="candidates that fla's tuner tries of every other kernel, spread over its list")
    parser.add_argument("--threads", type=int, default=8, help="that build its candidates")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", help="a file that the lines are added to")
    parser.set_defaults(**DEFAULTS[parser.parse_args().device])
    a = parser.parse_args()
    if a.together:
        sides(a)
        return
    for round_ in range(a.rounds):
        for name in a.sides.split(","):
            given = [sys.argv[0], "--together", "--sides", name, "--rounds", "1"]
            for option in ("sizes", "dtype", "device", "hidden", "repeat", "threads", "few", "shortlist", "out"):
                given += [f"--{option}", str(getattr(a, option))] if getattr(a, option) else []
            given += ["--no-errors"] * (a.no_errors or round_ > 0) + ["--compile"] * a.compile + ["--verbose"] * a.verbose
            start = time.perf_counter()
            try:
                subprocess.run([sys.executable, *given], timeout=a.limit)
            except subprocess.TimeoutExpired:
                print(f"{name}: more than {a.limit} s", flush=True)
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
