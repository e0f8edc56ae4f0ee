"""On a GPU: the modules around the operator, proved against float64, then timed beside the other ways to have them.

    python bench/device/module.py [--cases conv,gate,...] [--sides ours,compiled,...] [--out bench/results] [--warm]

Prints for every side the error of each result against float64, milliseconds forward and forward with backward (graph replays, medians), the
floor (bytes that must move at the measured copy rate, or products at 790 TFLOP/s), and the peak of extra memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from chunkwise import nn
from chunkwise.bench.record import folder_name, surroundings

Function = Callable[..., Any]
BF16 = torch.bfloat16
PRODUCTS = 790e12


@dataclass
class Case:
    """inputs by name (those of floating dtype get gradients); truth works in float64; sides by name."""

    inputs: dict[str, Tensor]
    truth: Function
    sides: Mapping[str, Callable[[], Function]]
    forward: float  # bytes, or seconds of products
    both: float
    products: bool = False


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def compiled(f: Function) -> Callable[[], Function]:
    return lambda: torch.compile(f, dynamic=False)


def conv_case() -> Case:
    x, w = draw(8, 4096, 4096), draw(4096, 4, scale=0.5)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return F.silu(F.conv1d(x.transpose(1, 2), w.unsqueeze(1), padding=3, groups=4096)[..., : x.shape[1]]).transpose(1, 2)

    def taps(x: Tensor, w: Tensor) -> Tensor:
        rows = F.pad(x, (0, 0, 3, 0))
        return F.silu(sum(rows[:, j : j + x.shape[1]].to(w.dtype) * w[:, j] for j in range(4)))

    def fused(x: Tensor, w: Tensor) -> Tensor:
        return taps(x, w.float()).to(x.dtype)

    def fla() -> Function:
        from fla.modules.convolution import causal_conv1d

        return lambda x, w: causal_conv1d(x, w, activation="silu")[0]

    def theirs() -> Function:
        from causal_conv1d import causal_conv1d_fn  # where it is built: its wheels are for other versions of PyTorch

        return lambda x, w: causal_conv1d_fn(x.transpose(1, 2), w, activation="silu").transpose(1, 2)

    ours = lambda: lambda x, w: nn.causal_conv1d(x, w, activation="silu")[0]
    n, sides = size(x), dict(compiled=compiled(fused), cudnn=lambda: plain, fla=fla, causal_conv1d=theirs)
    return Case(dict(x=x, w=w), taps, dict(ours=ours, **sides), 2 * n, 5 * n)


def packed_case() -> Case:
    x, w = draw(1, 32768, 4096), draw(4096, 4, scale=0.5)
    cu = torch.tensor([0, 1000, 1003, 9001, 17000, 17001, 26000, 32768], device="cuda")

    def taps(x: Tensor, w: Tensor) -> Tensor:
        parts = [F.pad(p, (0, 0, 3, 0)) for p in x.tensor_split(cu[1:-1].cpu(), 1)]
        return F.silu(torch.cat([sum(p[:, j : p.shape[1] - 3 + j] * w[:, j] for j in range(4)) for p in parts], 1))

    def fla() -> Function:
        from fla.modules.convolution import causal_conv1d

        return lambda x, w: causal_conv1d(x, w, activation="silu", cu_seqlens=cu)[0]

    ours = lambda: lambda x, w: nn.causal_conv1d(x, w, activation="silu", cu_seqlens=cu)[0]
    n = size(x)
    return Case(dict(x=x, w=w), taps, dict(ours=ours, fla=fla), 2 * n, 5 * n)


def gate_case() -> Case:
    x, g, w = draw(8, 4096, 16, 128), draw(8, 4096, 16, 128), draw(128) + 1

    def plain(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        y, z = (t if t.dtype == torch.float64 else t.float() for t in (x, g))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * w.to(y.dtype)
        return (y * F.silu(z)).to(x.dtype)

    def fla() -> Function:
        from fla.modules.fused_norm_gate import rms_norm_gated

        return lambda x, g, w: rms_norm_gated(x, g, w, None, "swish", eps=1e-5)

    def ours() -> Function:
        return lambda x, g, w: nn.rms_norm(x, w, eps=1e-5, gate=g, activation="silu")

    n = size(x)
    return Case(dict(x=x, g=g, w=w), plain, dict(ours=ours, compiled=compiled(plain), fla=fla), 3 * n, 8 * n)


def norm_case() -> Case:
    x, r, w = draw(8, 4096, 2048), draw(8, 4096, 2048), draw(2048) + 1

    def plain(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        y = h if h.dtype == torch.float64 else h.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * w.to(y.dtype)).to(x.dtype), h

    def fla() -> Function:
        from fla.modules.layernorm import rms_norm

        return lambda x, r, w: rms_norm(x, w, None, residual=r, eps=1e-5, prenorm=True)

    def liger() -> Function:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        return lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-5, 0.0, "llama", False)

    ours = lambda: lambda x, r, w: nn.add_rms_norm(x, r, w, eps=1e-5)
    n = size(x)
    return Case(dict(x=x, r=r, w=w), plain, dict(ours=ours, compiled=compiled(plain), fla=fla, liger=liger), 4 * n, 8 * n)


def rotary_case() -> Case:
    x, at = draw(8, 4096, 16, 128), torch.arange(4096, device="cuda")[None]

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.to(cos.dtype).chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    def table(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        pair = torch.arange(64, device="cuda", dtype=torch.float64)
        angle = at.double()[..., None, None] * 10000.0 ** (pair / -64)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def stored() -> Function:  # tables made beforehand: neither their making nor their memory is counted
        made, f = table(torch.float32), torch.compile(turn, dynamic=False)
        return lambda x: f(x, *made)

    def fla() -> Function:
        from fla.modules.rotary import rotary_embedding

        cos, sin = (t[0, :, 0] for t in table(BF16))
        return lambda x: rotary_embedding(x, cos, sin)

    def liger() -> Function:
        from liger_kernel.ops.rope import LigerRopeFunction

        cos, sin = (torch.cat([t[:, :, 0]] * 2, -1) for t in table(BF16))
        other = x[:, :, :1].transpose(1, 2)
        # it turns its inputs in place: the copy is what leaves x alone
        return lambda x: LigerRopeFunction.apply(x.transpose(1, 2).clone(), other.clone(), cos, sin)[0].transpose(1, 2)

    sides = dict(ours=lambda: lambda x: nn.rotary(x, at), stored=stored, fla=fla, liger=liger)
    return Case(dict(x=x), lambda x: turn(x, *table(torch.float64)), sides, 2 * size(x), 4 * size(x))


def swiglu_case() -> Case:
    a, b = draw(8, 4096, 5632), draw(8, 4096, 5632)
    plain = lambda a, b: (F.silu(a if a.dtype == torch.float64 else a.float()) * b).to(a.dtype)

    def fla() -> Function:
        from fla.modules.activations import swiglu

        return swiglu

    def liger() -> Function:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply

    ours = lambda: nn.swiglu
    n = size(a)
    return Case(dict(a=a, b=b), plain, dict(ours=ours, compiled=compiled(plain), fla=fla, liger=liger), 3 * n, 8 * n)


def loss_case() -> Case:
    N, D, V = 16384, 2048, 32000
    x, w, target = draw(N, D), draw(V, D, scale=D**-0.5), torch.randint(0, V, (N,), device="cuda")
    target[::9] = -100

    def plain(x: Tensor, w: Tensor) -> Tensor:
        z = F.linear(x, w)
        return F.cross_entropy(z if z.dtype == torch.float64 else z.float(), target)

    def fla() -> Function:
        from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

        return lambda x, w: fused_linear_cross_entropy_loss(x, target, w, accumulate_grad_in_fp32=False)

    def liger() -> Function:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return lambda x, w: LigerFusedLinearCrossEntropyLoss()(w, x, target)

    def liger_wide() -> Function:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return lambda x, w: LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)(w, x, target)

    def blocks(rows: int) -> Callable[[], Function]:
        return lambda: lambda x, w: nn.linear_cross_entropy(x, w, target, rows=rows)

    sides = {"ours": lambda: lambda x, w: nn.linear_cross_entropy(x, w, target), "ours 2048": blocks(2048), "ours 8192": blocks(8192)}
    sides |= {"eager": lambda: plain, "compiled": compiled(plain), "fla": fla, "liger": liger, "liger fp32": liger_wide}
    once = 2 * N * D * V / PRODUCTS
    return Case(dict(x=x, w=w), plain, sides, once, 3 * once, products=True)


CASES = dict(conv=conv_case, packed=packed_case, gate=gate_case, norm=norm_case, swiglu=swiglu_case, loss=loss_case, rotary=rotary_case)


def flat(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, (tuple, list)) else [made]


def with_gradients(f: Function, leaves: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    made = flat(f(*leaves))
    return [*(t.detach() for t in made), *torch.autograd.grad(made, leaves, [u.to(t.dtype) for u, t in zip(upstream, made)])]


def clock(f: Callable[[], Any], budget: float = 0.15, graphs: bool = True) -> tuple[float, str]:
    """Median milliseconds of a call, from replays of a graph that holds it, or of calls between events."""
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    how, run = "graph", f
    try:
        if not graphs:
            raise NotImplementedError
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            f()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = f()  # noqa: F841
        run = graph.replay
    except Exception as e:
        torch.cuda.synchronize()
        how, run = f"events ({type(e).__name__})", f
    times = []
    while sum(times) < budget * 1e3 or len(times) < 5:
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        ends[0].record()
        run()
        ends[1].record()
        torch.cuda.synchronize()
        times.append(ends[0].elapsed_time(ends[1]))
    return statistics.median(times), how


def peak(f: Callable[[], Any]) -> float:
    """MiB beyond what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def rows(name: str, case: Case, wanted: list[str], rate: float, warm: bool) -> Iterator[dict[str, Any]]:
    names = list(case.inputs)
    leaves = [t.requires_grad_() for t in case.inputs.values()]
    truth: list[Tensor] = []
    upstream: list[Tensor] = []
    for side, make in case.sides.items():
        if wanted and side not in wanted:
            continue
        row: dict[str, Any] = {"case": name, "side": side}
        try:
            f = make()
            if not truth and not warm:
                wide = [t.detach().double().requires_grad_() for t in leaves]
                shapes = [t.shape for t in flat(case.truth(*wide))]
                upstream = [torch.randn(s, device="cuda").to(BF16) if s else torch.ones((), device="cuda") for s in shapes]
                truth = with_gradients(case.truth, wide, upstream)
                del wide
            if warm:
                made = flat(f(*leaves))
                torch.autograd.grad(made, leaves, [torch.ones_like(t) for t in made])
                torch.cuda.synchronize()
                yield row | {"warm": True}
                continue
            got = with_gradients(f, leaves, upstream)
            labels = [*(f"o{i}" for i in range(len(shapes))), *(f"d{n}" for n in names)]
            row["errors"] = {n: ((g.double() - t).norm() / t.norm()).item() for n, g, t in zip(labels, got, truth)}
            again = with_gradients(f, leaves, upstream)
            row["repeats"] = all(torch.equal(a, b) for a, b in zip(got, again))
            del got, again

            def ahead(f: Function = f) -> Any:
                with torch.no_grad():
                    return f(*leaves)

            both = functools.partial(with_gradients, f, leaves, upstream)
            row["extra MiB"] = peak(both)
            row["forward"], row["how"] = clock(ahead)
            row["both"], _ = clock(both)
            floors = [b if case.products else b / rate for b in (case.forward, case.both)]
            row["floors"] = [1e3 * s for s in floors]
        except Exception as e:
            row["failed"] = f"{type(e).__name__}: {' '.join(str(e).split())[-300:]}"
        torch.cuda.empty_cache()
        yield row


def told(row: dict[str, Any]) -> str:
    label = f"{row['case']:8s} {row['side']:12s}"
    if "failed" in row or "warm" in row:
        return f"{label} {row.get('failed', 'warm')}"
    errors = " ".join(f"{n} {e:.1e}" for n, e in row["errors"].items())
    least = row["floors"]
    share = f"{100 * least[0] / row['forward']:.0f} %, {100 * least[1] / row['both']:.0f} %"
    times = f"{row['forward']:.3f} {row['both']:.3f} ms (floors {least[0]:.3f} {least[1]:.3f}: {share}) {row['how']}"
    return f"{label} {times}, {row['extra MiB']:.0f} MiB, repeats {row['repeats']}; {errors}"


def copy_rate() -> float:
    """Bytes a second, read and written."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * size(source) / clock(lambda: target.copy_(source), graphs=False)[0] * 1e3


def main() -> None:
    a = argparse.ArgumentParser()
    a.add_argument("--cases", default=",".join(CASES))
    a.add_argument("--sides", default="")
    a.add_argument("--warm", action="store_true")
    a.add_argument("--out", type=pathlib.Path, help="folder the rows are added to, <device>/module/<day>.jsonl")
    args = a.parse_args()
    torch.manual_seed(0)
    rate = 0.0 if args.warm else copy_rate()
    print(torch.cuda.get_device_name(), torch.__version__, f"copy {rate / 1e12:.2f} TB/s", flush=True)
    where = surroundings(torch.device("cuda", torch.cuda.current_device()))
    for name in args.cases.split(","):
        for row in rows(name, CASES[name](), [s for s in args.sides.split(",") if s], rate, args.warm):
            print(told(row), flush=True)
            if args.out is not None and not args.warm:
                file = args.out / folder_name(where["device"]) / "module" / f"{where['date'][:10]}.jsonl"
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("a") as f:
                    f.write(json.dumps({**where, "copy_tb_s": rate / 1e12, **row}) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
