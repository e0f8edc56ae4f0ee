"""`chunkwise precompile`: fill Triton's kernel cache ahead of time, without a GPU."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from .refusal import Failure, Refusal, refusing

SIZES = ("K", "V", "C", "BK", "BV", "BLOCK", "GROUP", "GATE")  # switches that are shown with their values, whatever those are


def precompile(
    arch: Annotated[str, typer.Option(help="The card: sm_80, sm_90, sm_100, gfx942, ...")] = "sm_90",
    op: Annotated[list[str] | None, typer.Option(help="A member (see chunkwise ops), again for more; none: all.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bfloat16, float16 or float32; again for more; none: bfloat16.")] = None,
    head: Annotated[list[str] | None, typer.Option(help="Channels of a key and of a value; again for more; none: 128,128.")] = None,
    group: Annotated[list[int] | None, typer.Option(help="Value heads a key head; again for more; none: 1.")] = None,
    way: Annotated[list[str] | None, typer.Option(help="training, prefill, ...; again for more; none: all.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk: 16, 32 or 64.")] = 64,
    precision: Annotated[str, typer.Option(help="Of float32 products: ieee or tf32.")] = "ieee",
    inverse_precision: Annotated[str, typer.Option(help="Of the inverse: auto, ieee, tf32x3, bf16x3, tf32 or bf16.")] = "auto",
    modules: Annotated[str | None, typer.Option(help="D,K,V: convolutions, norms, loss of that width, head, vocabulary too.")] = None,
    card: Annotated[str, typer.Option(help="A card whose measured configs to build: nvidia_h200; see chunkwise tune.")] = "",
    shape: Annotated[
        list[str] | None, typer.Option(help="Instead of heads and ways: what chunkwise bench of this shape launches; again for more; grid.")
    ] = None,
    gates: Annotated[str, typer.Option(help="With --shape: slow, fast or raw, as for chunkwise bench.")] = "slow",
    peer: Annotated[list[str] | None, typer.Option(help="With --shape: this library's Triton kernels too, for its tuner.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes; 0: one a core.")] = 0,
) -> None:
    """Build every kernel that calls would launch on a card, into Triton's cache (TRITON_CACHE_DIR). Needs no GPU."""
    from rich.console import Console
    from rich.table import Table

    from chunkwise.engine.precompile import WAYS, Built
    from chunkwise.engine.precompile import build as build_calls
    from chunkwise.engine.precompile import precompile as build

    if jobs < 0:
        raise Refusal(f"--jobs must be at least 0, got {jobs}")
    sizes = [_pair(h) for h in head or ["128,128"]]
    width = None if modules is None else _numbers("--modules", "D,K,V such as 2048,128,32000", modules, 3)
    if width is not None and min(width) < 1:
        raise Refusal(f"--modules must be at least 1 each, got {modules!r}")
    if not shape and (peer or gates != "slow"):
        raise Refusal(f"--{'peer' if peer else 'gates'} wants --shape: what is built is what given calls launch")
    other = dict(head=head, group=group, way=way, modules=modules, chunk=chunk != 64, precision=precision != "ieee")
    taken = [n for n, given in {**other, "inverse-precision": inverse_precision != "auto"}.items() if given]
    if shape and taken:
        raise Refusal(f"--shape takes no --{taken[0]}: calls are those of chunkwise bench")
    console = Console(highlight=False)
    start, count = time.perf_counter(), 0

    with console.status("listening to what calls launch ...") as status:

        def heard(built: Built, of: int) -> None:
            nonlocal count
            count += 1
            status.update(f"{count} of {of} kernels for {arch}: {built.kernel}")

        with refusing(ValueError, RuntimeError):
            if shape:
                from chunkwise.bench.ahead import ahead
                from chunkwise.bench.case import plain, shapes
                from chunkwise.spec import all_ops

                names = op or [n for n, member in all_ops().items() if plain(member)]
                given = (names, shapes(shape), dtype or ("bfloat16",), peer or ["none"])
                made, others, why = ahead(arch, *given, jobs or None, card, heard, gates)
            else:
                others, why = {}, []
                made = build(
                    arch, op, dtypes=dtype or ("bfloat16",), sizes=sizes, groups=group or (1,), ways=way or tuple(WAYS), chunk_size=chunk,
                    precision=precision, inverse_precision=inverse_precision, jobs=jobs or None, card=card, heard=heard,
                )  # fmt: skip
        if width is not None:
            from chunkwise.nn.launch.sample import launches

            calls = [(name, *width) for name in dtype or ("bfloat16",)]
            with refusing(ValueError, RuntimeError):
                made += build_calls(arch, launches, calls, jobs or None, heard)
    table = Table("kernel", "dtype", "switches", box=None, header_style="bold")
    for name in ("warps", "stages", "registers", "spills", "shared", "seconds"):
        table.add_column(name, justify="right")
    for b in made:
        numbers = [str(x) if x is not None else "?" for x in (b.registers, b.spills, b.shared)]
        name, built = b.kernel.removesuffix("_kernel"), (str(b.warps), str(b.stages), *numbers, f"{b.seconds:.1f}")
        table.add_row(name, _dtype(b), _switches(b.switches), *built)
    console.print(table) if console.is_terminal else Console(width=240, highlight=False).print(table)
    for name, theirs in others.items():
        print(f"{name}: {len(theirs)} candidates, {sum(not b.fits for b in theirs)} of them not for this card")
    print("\n".join(why), end="\n" * bool(why))
    print(f"{len(made)} kernels for {arch} in {time.perf_counter() - start:.0f} s")
    wide = "{0.shared} bytes of shared memory, {0.arch} has {0.limit}"
    bad = [f"{b.kernel} ({_switches(b.switches)}): {b.error or wide.format(b)}" for b in made if not b.fits]
    if bad:
        raise Failure(f"{len(bad)} cannot run there: {'; '.join(bad)}")


def _pair(text: str) -> tuple[int, int]:
    K, V = _numbers("--head", "K,V such as 128,128", text, 2)
    return K, V


def _numbers(option: str, wanted: str, text: str, count: int) -> list[int]:
    parts = text.split(",")
    if len(parts) != count or not all(p.strip().isdecimal() for p in parts):
        raise Refusal(f"{option} must be {wanted}, got {text!r}")
    return [int(p) for p in parts]


def _dtype(b: Any) -> str:
    """Of the first operand."""
    return b.signature[0].split("[")[0].lstrip("*").removeprefix("tensordesc<") if b.signature else "?"


def _switches(switches: dict[str, Any]) -> str:
    """Those that are on; sizes and the gate with their values."""
    shown = [f"{n}={v}" for n, v in switches.items() if n in SIZES]
    return " ".join([*shown, *(n.lower() for n, v in switches.items() if v is True)])
