"""`chunkwise bench`: prove, then time, in turn with other libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .recipe import choose_threads
from .refusal import Failure, Refusal, make_folder, refusing

if TYPE_CHECKING:
    from chunkwise.bench.case import Case
    from chunkwise.bench.measure import Bench

RESULTS = Path("bench/results")
TABLES = (Path("README.md"), Path("docs/decode.md"), Path("docs/modules.md"), Path("docs/speed.md"))


def bench(
    ops: Annotated[list[str] | None, typer.Argument(help="Members (see chunkwise ops); none: those of q, k, v, g and beta alone.")] = None,
    form: Annotated[str, typer.Option(help="auto, chunk, fused_chunk, recurrent or parallel.")] = "auto",
    module: Annotated[
        list[str] | None, typer.Option(help="Instead of members: parts of chunkwise.nn, as conv or loss, again for more; all.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="S1, S2, S3, grid or B,T,H,HV,K,V[,N: packed sequences]; again for more; none: S1. Of modules: B,T,D."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64; auto: bfloat16 on a GPU, float32 on a CPU.")] = "auto",
    gates: Annotated[str, typer.Option(help="slow: a quarter of the heads never forget; fast.")] = "slow",
    pool: Annotated[
        str,
        typer.Option(
            help="Instead of the form a step of chunkwise.decode in a pool: "
            "float32, bfloat16, float32-vk or bfloat16-vk (vk: values first)."
        ),
    ] = "",
    backward: Annotated[bool, typer.Option("--backward/--forward", help="Forward and forward+backward, or forward alone.")] = True,
    peer: Annotated[list[str] | None, typer.Option(help="Another library, again for more; all, or none.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: PyTorch's own choice.")] = 0,
    repeat: Annotated[int, typer.Option(help="Rounds; 0: what fits into a second or so.")] = 0,
    first_call: Annotated[bool, typer.Option("--first-call", help="Instead: seconds of a first call in a fresh process.")] = False,
    turns: Annotated[Path | None, typer.Option(help="A lock file: processes that share it build side by side, then time in turn.")] = None,
    warm_seconds: Annotated[float, typer.Option(help="Give up on a peer whose first calls take longer; 0: never.")] = 0,
    shortlist: Annotated[Path | None, typer.Option(help="With --turns: a Triton cache whose best candidates a peer's tuner tries.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder the rows are added to, <device>/<day>.jsonl.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Instead: print the rows in --out and bring the tables up to date.")] = False,
    into: Annotated[list[Path] | None, typer.Option(help="With --table: files that hold tables; else README.md and three in docs.")] = None,
) -> None:
    """Prove members against float64, then time them in turn with other libraries. A wrong row has no speed."""

    from chunkwise.bench.case import case, plain, shapes
    from chunkwise.bench.measure import OURS, Bench, frozen, select
    from chunkwise.bench.record import append, load
    from chunkwise.bench.table import fill, latest, show
    from chunkwise.bench.turn import turn
    from chunkwise.spec import all_ops

    if table:
        with refusing(ValueError):
            rows = load(out or RESULTS)
            texts = fill(into or TABLES, rows)
        if not latest(rows):
            raise Refusal(f"--table: no results under {out or RESULTS}")
        show(latest(rows))
        for file, text in texts.items():
            new = text != file.read_text()
            if new:
                file.write_text(text)
            print(f"{file} {'is new' if new else 'was up to date'}")
        return
    where = _device(device)
    if first_call and pool:
        raise Refusal("--first-call takes no --pool")
    if repeat < 0 or not warm_seconds >= 0:
        raise Refusal(f"--repeat and --warm-seconds must be at least 0, got {repeat} and {warm_seconds}")
    if shortlist is not None and not (turns and shortlist.is_dir()):
        raise Refusal(f"--shortlist wants --turns and a folder, got {shortlist}")
    choose_threads(threads)
    dtype = dtype if dtype != "auto" else "bfloat16" if where.type == "cuda" else "float32"
    passes = ["forward", "forward+backward"] if backward else ["forward"]
    if module:
        if ops or pool or first_call or (form, gates) != ("auto", "slow") or shortlist or warm_seconds:
            raise Refusal("--module takes no members, --form, --gates, --pool, --first-call, --shortlist or --warm-seconds")
        return _modules(module, shape or [""], dtype, where, peer or ["none"], passes, repeat or None, turns, out)
    with refusing(ValueError):
        names = ops or [n for n, op in all_ops().items() if plain(op)]
        cases = [case(n, form, s, dtype, gates, pool) for n in names for s in shapes(shape or ["S1"])]
        peers = select(peer or ["none"])
    _places(out, turns)
    if first_call:
        from chunkwise.bench.first import first_calls

        for c in cases:
            for row in first_calls(c, where, [OURS, *peers], backward=backward):
                print(row["text"])
                if out is not None:
                    append(out, [row["row"]])
        return
    done: list[dict[str, Any]] = []
    failed: list[str] = []

    def beginning(c: Case) -> Bench:
        return Bench(
            c, where, peers, passes=passes, rounds=repeat or None, say=lambda line: print(f"{c.op} {c.shape}: {line}", flush=True),
            lock=turns, warm_seconds=warm_seconds or None, shortlist=shortlist,
        )  # fmt: skip

    def each(benches: list[Bench], work: Callable[[Bench], None]) -> list[Bench]:
        """Those whose work came to its end."""
        good = []
        for b in benches:
            try:
                work(b)
                good.append(b)
            except Exception as error:  # a device that fails or is full, a kernel that does not build: the other cases go on
                failed.append(f"{b.c.op} {b.c.shape}")
                b.say(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return good

    def measure(b: Bench) -> None:
        for row in b.rows():
            done.append(row)
            if out is not None:
                append(out, [row])

    benches = [beginning(c) for c in cases]
    if turns is not None:
        with turn(turns, alone=False):  # nobody times before all are warm
            benches = each(benches, Bench.warm)
    with frozen():
        each(benches, measure)
    if done:
        show(done)
    failed += [f"{r['case']['op']} {r['case']['shape']} {r['pass']}" for r in done if r["who"] == OURS and r["wrong"]]
    if failed:
        raise Failure(f"wrong or failed: {', '.join(failed)}")


def _modules(
    names: list[str], shapes: list[str], dtype: str, where: Any, libraries: list[str], passes: list[str], rounds: int | None,
    turns: Path | None, out: Path | None,
) -> None:  # fmt: skip
    from chunkwise.bench.case import DTYPES
    from chunkwise.bench.measure import OURS
    from chunkwise.bench.measure_module import ModuleBench
    from chunkwise.bench.module import module, select, sizes
    from chunkwise.bench.record import append
    from chunkwise.bench.table import show

    with refusing(ValueError):
        chosen, others = select(names, libraries)
        asked = [sizes(s, where) for s in shapes]
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    _places(out, turns)
    done: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in chosen:
        for size in asked:
            try:
                m = module(name, where, DTYPES[dtype], size)
                say = lambda line, m=m: print(f"{m.name}, {m.shape}: {line}", flush=True)  # noqa: E731
                for row in ModuleBench(m, where, others, passes=passes, rounds=rounds, lock=turns, say=say).rows():
                    done.append(row)
                    if out is not None:
                        append(out, [row])
            except Exception as error:
                failed.append(name)
                print(f"{name}: failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
    show(done)
    failed += [f"{r['case']['op']}, {r['case']['shape']}, {r['pass']}" for r in done if r["who"] == OURS and r["wrong"]]
    if failed:
        raise Failure(f"wrong or failed: {'; '.join(failed)}")


def _places(out: Path | None, turns: Path | None) -> None:
    """Refused now, not when all is measured."""
    if out is not None:
        make_folder(out, "--out")
    if turns is not None:
        make_folder(turns.parent, "--turns: the folder")
        if turns.is_dir():
            raise Refusal(f"--turns must be a file, {turns} is a folder")


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise Refusal(f"--device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda: PyTorch sees no GPU")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
