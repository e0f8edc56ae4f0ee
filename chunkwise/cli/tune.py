"""`chunkwise tune`: measure which configs are the fastest on this card, and keep them."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from .refusal import Failure, Refusal, refusing

DTYPES = ("bfloat16", "float16", "float32")


def tune(
    ops: Annotated[list[str] | None, typer.Argument(help="Members (see chunkwise ops); none: those of q, k, v, g and beta alone.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="As chunkwise bench takes it; again for more; none: S1.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    kernel: Annotated[list[str] | None, typer.Option(help="Tune this kernel alone; again for more; none: all that run.")] = None,
    backward: Annotated[bool, typer.Option("--backward/--forward", help="Forward and forward+backward, or forward alone.")] = True,
    jobs: Annotated[int, typer.Option(help="Processes that build, fewer where the card's memory is short; 0: a core each, to 16.")] = 0,
    repeat: Annotated[int, typer.Option(help="Rounds of a race of two; 0: what fits into a tenth of a second.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the card's file; none: in the package, where calls look for it.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Say what would be kept, and keep nothing.")] = False,
) -> None:
    """Time configs of every kernel that members run here. The fastest that give the same bits are kept, and used from then on."""
    import torch

    from chunkwise import __version__
    from chunkwise.bench import tuner
    from chunkwise.bench.case import case, plain, shapes
    from chunkwise.engine.measured import at, load, save
    from chunkwise.spec import all_ops

    if jobs < 0 or repeat < 0:
        raise Refusal(f"--jobs and --repeat must be at least 0, got {jobs} and {repeat}")
    if dtype not in DTYPES:
        raise Refusal(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    unknown = set(kernel or ()) - set(tuner.RULES)
    if unknown:
        raise Refusal(f"--kernel must be among {', '.join(tuner.RULES)}, got {', '.join(sorted(unknown))}")
    with refusing(ValueError):
        names = ops or [n for n, op in all_ops().items() if plain(op)]
        cases = [case(n, "auto", s, dtype) for n in names for s in shapes(shape or ["S1"])]
    if not torch.cuda.is_available():
        raise Refusal("tune: PyTorch sees no GPU: configs are measured on the card they are for")
    device = torch.device("cuda", torch.cuda.current_device())
    card = torch.cuda.get_device_name(device)
    with refusing(ValueError):  # broken files first: calls read the package's, and what is kept goes into the other
        for folder in (None, out):
            load(card, folder)
    if not dry:
        _writable(at(card, out).parent)
    import triton

    when = f"{datetime.date.today().isoformat()}, chunkwise {__version__}, torch {torch.__version__}"
    failed = []
    jobs = jobs or min(16, len(os.sched_getaffinity(0)))
    for c in cases:
        start = time.perf_counter()
        say = lambda line, c=c: print(f"{c.op} {c.shape}: {line}", flush=True)  # noqa: E731
        try:
            made = tuner.tune(c, device, backward=backward, jobs=jobs, rounds=repeat or None, kernels=kernel, say=say)
        except Exception as error:  # one member that fails does not stop the others
            failed.append(f"{c.op} {c.shape}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        for b in made:
            rule = "as the rule says" if b.config == b.use.ruled else f"instead of {tuner.text(b.use.ruled)}, {b.ruled_ms:.4f} ms"
            say(f"{b.use.kernel}: {tuner.text(b.config)}, {b.ms:.4f} ms, {rule}; {b.tried} others tried")
        if made and not dry:
            say(f"kept in {save(card, tuner.kept(made, when, triton.__version__), out)}")
        say(f"{time.perf_counter() - start:.0f} s")
    if failed:
        raise Failure("; ".join(failed))


def _writable(folder: Path) -> None:
    """Refused now, not when all is measured."""
    made = next(f for f in (folder, *folder.parents) if f.exists())
    if not made.is_dir() or not os.access(made, os.W_OK):
        raise Refusal(f"tune: {folder} cannot be written to; --out FOLDER keeps the file elsewhere, where calls do not look for it")
