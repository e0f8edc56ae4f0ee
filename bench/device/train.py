"""Train one Gated DeltaNet by chunkwise and by flash-linear-attention, from the same weights on the same text, and compare.

    python bench/device/train.py data/shakespeare --steps 200                  both, tokens/s and memory, losses side by side
    python bench/device/train.py tokens.npy --vocab 4096 --sides chunkwise     token ids [n] instead of text

First it proves: logits of both in bfloat16 against float64. Then the sides train by turns, each in a process state of its own: built anew,
warmed up, timed, dropped. One line a fact; a side that fails is reported and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import sys
import time
import traceback
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from chunkwise.bench.autotuner import build_side_by_side
from chunkwise.bench.record import surroundings
from chunkwise.data.mix import mix
from chunkwise.models import ChunkwiseConfig, ChunkwiseForCausalLM
from chunkwise.models.capture import Captured

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tokens_of(path: pathlib.Path, vocab: int) -> Tensor:
    """Token ids [n] int64 of a folder of texts (by a tokenizer learnt from it), or of a .npy file."""
    if path.suffix == ".npy":
        import numpy

        return torch.from_numpy(numpy.load(path).astype("int64"))
    from chunkwise.data.text import read_texts
    from chunkwise.data.tokenizer import bpe_tokenizer, encode

    texts = read_texts([path])
    tokenizer = bpe_tokenizer(texts, vocab)
    return torch.tensor([i for t in texts for i in encode(tokenizer, t)])


def batch(tokens: Tensor, step: int, B: int, T: int) -> Tensor:
    """[B, T] crops that depend on the step alone."""
    starts = [mix(step, b) % (len(tokens) - T) for b in range(B)]
    return torch.stack([tokens[s : s + T] for s in starts])


def ours(a: argparse.Namespace) -> Any:
    config = ChunkwiseConfig(
        mixer="gated_delta_rule", hidden_size=a.width, num_hidden_layers=a.layers, num_heads=a.heads, head_dim=a.head, expand_v=1.0,
        intermediate_size=a.inner, vocab_size=a.vocab, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return ChunkwiseForCausalLM(config).to(DEVICE)


def theirs(a: argparse.Namespace) -> Any:
    import fla.ops.common.chunk_o
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    # Its guard refuses the gated backward on Triton 3.4.0 to 3.7.0 (fla #640). For timing it is off; the proof says if the result is right.
    fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True
    build_side_by_side(threads=a.threads, shortlist=a.shortlist, few=a.few)
    config = GatedDeltaNetConfig(
        hidden_size=a.width, num_hidden_layers=a.layers, num_heads=a.heads, head_dim=a.head, expand_v=1.0, intermediate_size=a.inner,
        vocab_size=a.vocab, use_cache=False, norm_eps=1e-6, fuse_linear_cross_entropy=a.fused_head, fuse_cross_entropy=not a.fused_head,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GatedDeltaNetForCausalLM(config)
    model.load_state_dict(ours(a).state_dict())
    return model.to(DEVICE)


# captured: forward and backward pass by `models.capture`; graph: the optimizer too; compiled: by torch.compile, of fla what it lets through
BUILD = {f"{name}{how}": make for name, make in (("chunkwise", ours), ("fla", theirs)) for how in ("", " captured", " graph", " compiled")}


def prove(side: str, a: argparse.Namespace, tokens: Tensor) -> None:
    """The first layers' logits and loss gradient in bfloat16 autocast against float64 by the same weights, our model in float64."""
    small = argparse.Namespace(**{**vars(a), "layers": 2})
    x = batch(tokens, 0, a.batch, a.context).to(DEVICE)  # the size that is timed: kernels are tuned and built once
    model, truth = BUILD[side](small), ours(small).double()
    results = []
    for m, auto in ((model, True), (truth, False)):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=auto):
            logits = m(x).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), x[:, 1:].flatten()).backward()
        grads = {n: p.grad.double() for n, p in m.named_parameters()}
        results.append((logits.detach().double(), grads))
    (logits, grads), (want, dwant) = results
    worst = max((((grads[n] - d).norm() / d.norm()).item(), n) for n, d in dwant.items())
    error = ((logits - want).norm() / want.norm()).item()
    print(f"{side}: bf16 logits differ from float64 by {error:.1e}, gradients by at most {worst[0]:.1e} ({worst[1]})", flush=True)


def prepare(side: str, a: argparse.Namespace) -> tuple[Any, Any]:
    """The model, and step(ids [B, T], its number) -> loss: forward, backward, clipping, AdamW, the rate rising for 20 steps."""
    model = BUILD[side](a).train()
    run = torch.compile(model, fullgraph=side.startswith("chunkwise")) if side.endswith("compiled") else model
    passes = Captured(model, dtype=torch.bfloat16) if side.endswith("captured") else None
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=rest, weight_decay=0.0)]
    rate = torch.tensor(a.lr, device=DEVICE)
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=DEVICE == "cuda", capturable=side.endswith("graph"))

    def once(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = run(input_ids=x, labels=x).loss
        loss.backward()
        return loss

    def step(x: Tensor) -> Tensor:
        loss = once(x) if passes is None else passes(input_ids=x, labels=x)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    taken = whole(step, a) if side.endswith("graph") else step

    def scheduled(x: Tensor, s: int) -> Tensor:
        rate.fill_(a.lr * min(1.0, (s + 1) / 20))
        return taken(x)

    return model, scheduled


def whole(step: Any, a: argparse.Namespace) -> Any:
    """The step as one CUDA graph, after three that warm it up: what it takes without the host."""
    given = torch.zeros(a.batch, a.context, dtype=torch.int64, device=DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(given)

    def replay(x: Tensor) -> Tensor:
        given.copy_(x)
        graph.replay()
        return loss.clone()

    return replay


def train(side: str, a: argparse.Namespace, tokens: Tensor, steps: int) -> dict[str, Any]:
    """Warm up, then time `steps` steps of AdamW; {"loss": [...], "tokens/s", "ms", "GiB", "warm s"}."""
    begin = time.monotonic()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, step = prepare(side, a)
    data = [batch(tokens, s, a.batch, a.context).to(DEVICE) for s in range(a.warm + steps)]
    losses, events = [], []
    for s, x in enumerate(data):
        if s == a.warm:
            _sync()
            warm = time.monotonic() - begin
            start = time.monotonic()
        losses.append(step(x, s))
        if DEVICE == "cuda":
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
    issued = time.monotonic()
    _sync()
    seconds = time.monotonic() - start
    ms = sorted(x.elapsed_time(y) for x, y in zip(events[a.warm :], events[a.warm + 1 :]))
    return {
        "side": side, "steps": steps, "parameters": sum(p.numel() for p in model.parameters()),
        "tokens/s": round(steps * a.batch * a.context / seconds),
        "ms a step, p20 p50 p80": [round(ms[len(ms) * q // 100], 2) for q in (20, 50, 80)] if ms else None,
        "ms a step till all is issued": round((issued - start) * 1e3 / steps, 2),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if DEVICE == "cuda" else None,
        "reserved GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2) if DEVICE == "cuda" else None, "warm-up s": round(warm, 1),
        "losses": [round(x.item(), 4) for x in losses][:: max(1, len(losses) // 20)],
    }  # fmt: skip


def profile(side: str, a: argparse.Namespace, tokens: Tensor) -> None:
    """Where two steps go: kernels by their time on the device, then operators by the host's."""
    from torch.profiler import ProfilerActivity

    _, step = prepare(side, a)
    x = batch(tokens, 0, a.batch, a.context).to(DEVICE)
    for s in range(a.warm):
        step(x, s)
    _sync()
    on = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (DEVICE == "cuda")
    with torch.profiler.profile(activities=on) as seen:
        for s in range(2):
            step(x, s)
        _sync()
    rows = seen.key_averages()
    kernels = sorted((r for r in rows if r.device_type.name == "CUDA"), key=lambda r: -r.self_device_time_total)
    spent, count = sum(r.self_device_time_total for r in kernels) / 2e3, sum(r.count for r in kernels) // 2
    print(f"{side}: {spent:.1f} ms of kernels a step, {count} of them")
    for r in kernels[:45]:
        print(f"{r.self_device_time_total / 2e3:9.3f} ms {r.count // 2:5d}  {r.key[:110]}")
    print(rows.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60), flush=True)


def _sync() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path)
    sizes = dict(vocab=4096, width=768, layers=12, heads=6, head=128, inner=2048, batch=16, context=2048, steps=100, warm=10, turns=2)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--fused-head", action="store_true", help="fla's fused linear cross entropy")
    parser.add_argument("--shortlist", type=pathlib.Path, help="Triton's cache of an earlier run, whose best candidates fla's tuner tries")
    parser.add_argument("--few", type=int, help="candidates that fla's tuner tries of every other kernel, spread over its list")
    parser.add_argument("--threads", type=int, default=8, help="that build its candidates")
    parser.add_argument("--sides", default=",".join(BUILD), help="comma-separated")
    parser.add_argument("--prove-only", action="store_true", help="prove, and take two steps: fills the compilers' caches")
    parser.add_argument("--profile", action="store_true", help="say where two steps go, instead")
    parser.add_argument("--no-proof", action="store_true", help="the proof has been made")
    parser.add_argument("--out", type=pathlib.Path, help="a .jsonl file the rows are added to")
    a = parser.parse_args()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, {json.dumps({k: str(v) for k, v in vars(a).items()})}", flush=True)
    tokens = tokens_of(a.text, a.vocab)
    sides = a.sides.split(",")
    for turn in range(1 if a.prove_only else a.turns):
        for side in sides:
            try:
                if turn == 0 and not a.no_proof:
                    prove(side, a, tokens)
                if a.profile:
                    profile(side, a, tokens)
                    continue
                if a.prove_only:
                    a.warm = 1
                row = train(side, a, tokens, 2 if a.prove_only else a.steps)
                print(json.dumps(row), flush=True)
                if a.out is not None and not a.prove_only:
                    with a.out.open("a") as file:
                        case = {"op": "gated_delta_rule", "shape": f"{a.batch},{a.context}", **{n: getattr(a, n) for n in sizes}}
                        facts = {**surroundings(torch.device(DEVICE)), "case": case, "pass": "training"}
                        file.write(json.dumps({**facts, **row}) + "\n")
            except Exception:
                print(f"{side}: failed\n{traceback.format_exc()[-2000:]}", flush=True)
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
            torch._dynamo.reset()


if __name__ == "__main__":
    main()
