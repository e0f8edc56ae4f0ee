"""Fill Triton's kernel cache ahead of time, without a GPU.

The hosts of the Triton plan run on tensors that have shapes but no contents, under a stand-in driver that reports the wanted card. What
they would launch is noted, then built. The same Triton version finds the results on the card by the same key; where the cache lies is
Triton's own affair (TRITON_CACHE_DIR). All of it happens in worker processes: the caller's driver is never touched.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..spec import EXTRA_SIZES, Op, all_ops, extent
from .crew import Crew
from .decode import decode, step
from .dispatch import CHUNKS, INVERSES, choose, run
from .library import BESIDE, STREAMS, resolve
from .measured import cards
from .plan import BACKWARD_KERNELS, KERNELS
from .prologue import all_raw
from .raw import made
from .way import LOADS, WAYS, Way


class Target(NamedTuple):
    """A card that kernels are built for."""

    backend: str
    arch: int | str
    lanes: int  # of a warp
    shared: int  # bytes of shared memory that a program can have


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 << 10),  # A100
    "sm_86": Target("cuda", 86, 32, 99 << 10),  # RTX 30
    "sm_89": Target("cuda", 89, 32, 99 << 10),  # RTX 40, L4, L40
    "sm_90": Target("cuda", 90, 32, 227 << 10),  # H100, H200
    "sm_100": Target("cuda", 100, 32, 227 << 10),  # B200
    "sm_120": Target("cuda", 120, 32, 99 << 10),  # RTX 50
    "gfx942": Target("hip", "gfx942", 64, 64 << 10),  # MI300
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Launch(NamedTuple):
    """A kernel that a host wants, in Triton's own words."""

    module: str
    name: str
    data: str  # JSON: signature, constants, options


@dataclass(frozen=True)
class Built:
    """One kernel of the cache. None where it could not be built, and error says why."""

    kernel: str
    arch: str
    switches: dict[str, Any]  # its compile-time arguments
    signature: tuple[str, ...]  # types of the others
    warps: int
    stages: int
    registers: int | None = None  # a thread
    spills: int | None = None  # bytes a thread keeps in memory for want of registers
    shared: int | None = None  # bytes a program
    limit: int = 0  # of shared, on this card
    seconds: float = 0.0  # to build, or to find in the cache
    key: str = ""  # Triton's name for it there
    error: str | None = None

    @property
    def fits(self) -> bool:
        """Whether the card can run it."""
        return self.error is None and self.shared is not None and self.shared <= self.limit


class _StandIn:
    """What Triton asks a driver before it builds anything."""

    def __init__(self, arch: str, name: str = ""):
        from triton.backends.compiler import GPUTarget

        self.arch, self.name, of = arch, name, TARGETS[arch]
        self.target = GPUTarget(of.backend, of.arch, of.lanes)
        self.utils = self

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return f"{self.arch} {self.name}"  # kernels are kept per device: no real one is called so

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": TARGETS[self.arch].shared, "warpSize": TARGETS[self.arch].lanes}


class _Hosts(TorchDispatchMode):
    """Runs the plan's hosts for every pass on tensors without contents; the shapes of results are the operators' own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        ahead, back = torch.ops.chunkwise.forward.default, torch.ops.chunkwise.backward.default
        if func is ahead and KERNELS & {a for a in args if isinstance(a, str)}:
            plan, p, x = resolve(args[:STREAMS], *args[STREAMS + 1 : -2])
            plan.forward(p, x, args[STREAMS], final=args[-2], save=args[-1])
        elif func is back and BACKWARD_KERNELS & {a for a in args if isinstance(a, str)}:
            saved, do, dST, *fixed = args[STREAMS + 1 + BESIDE :]
            plan, p, x = resolve(args[:STREAMS], *args[STREAMS + 1 : STREAMS + 1 + BESIDE])
            plan.backward(replace(p, fixed=any(fixed)), x, args[STREAMS], saved if saved.numel() else None, do, dST)
        elif func is torch.ops.chunkwise.raw.default:
            made(*args)
        elif func is torch.ops.chunkwise.decode.default:
            step(*args)
        return func(*args, **(kwargs or {}))


def _choose(*args: Any, **options: Any) -> Any:
    """dispatch.choose as it decides on a GPU."""
    return choose(*args, **{**options, "device": "cuda"})


def _call_once(op: Op, way: Way, sizes: dict[str, int], dtype: torch.dtype, packed: bool, **options: Any) -> None:
    """One call of a member, and its gradient. packed: sizes' B sequences in one row of T tokens."""

    def empty(shape: Iterable[int], dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta", requires_grad=way.grad)

    N, sizes = sizes["B"], {**sizes, "B": 1} if packed else sizes
    x = {n: empty(extent(a, sizes) for a in arg.axes.split()) for n, arg in op.args.items()}
    if way.pool:
        return None if packed else _decode_once(op, x, sizes, way.drafts)
    if packed:
        options["cu_seqlens"] = torch.empty(N + 1, dtype=torch.int32, device="meta")
    S0 = empty(op.state_shape(sizes, N), torch.float32) if way.initial else None
    raw = _raw(op, x) if way.raw else {}
    call(op, x, way.grad, **{"form": way.form, **options, **raw}, initial_state=S0, output_final_state=way.final)


def _raw(op: Op, x: dict[str, Tensor]) -> dict[str, Any]:
    """Options that leave to kernels what they can prepare."""
    raw = all_raw(op)
    if "use_gate_in_kernel" in raw:
        heads = x["g"].shape[2:]
        raw |= {n: torch.empty(size, device="meta") for n, size in (("A_log", heads[0]), ("dt_bias", heads.numel()))}
    return raw


def call(op: Op, x: dict[str, Tensor], grad: bool, **options: Any) -> None:
    """A call of a member on tensors without contents, and its gradient, by the hosts that would launch its kernels."""
    with torch.set_grad_enabled(grad), _Hosts():
        out = run(op, x, op.check(x), {**op.defaults, **options}, _choose)
        if grad:
            made = [t for t in out if t is not None]
            wanted = [t for t in (*x.values(), options["initial_state"]) if t is not None]
            torch.autograd.grad(made, wanted, [torch.empty_like(t) for t in made], allow_unused=True)


def _decode_once(op: Op, x: dict[str, Tensor], sizes: dict[str, int], drafts: bool) -> None:
    """Steps of a member in pools of either layout and type, its streams ready and raw."""
    index, table = (torch.empty(size, dtype=torch.int32, device="meta") for size in ((sizes["B"],), (sizes["B"], sizes["T"])))
    hows: tuple[dict[str, Tensor], ...] = (dict(index=index),)
    if drafts:
        hows += (dict(index=table, accepted=index), dict(index=index, into=table, parents=table))
    with _Hosts():
        for v_first, options, dtype, how in product((False, True), (_raw(op, x), {}), (torch.float32, torch.bfloat16), hows):
            pool = torch.empty(op.state_shape(sizes, sizes["B"]), dtype=dtype, device="meta")
            decode(op, x, pool.mT.contiguous() if v_first else pool, state_v_first=v_first, **how, **options)


def hear(run: Callable[[], None]) -> list[Launch]:
    """What run() launches under the driver of this process, each kernel once; nothing is built."""
    from triton import knobs

    heard: dict[str, Launch] = {}

    def listen(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        data = compile["specialization_data"]
        heard.setdefault(data, Launch(fn.module, fn.name, data))
        return True  # that is all: nothing is built here

    knobs.runtime.jit_cache_hook = listen
    try:
        run()
    finally:
        knobs.runtime.jit_cache_hook = None
    return list(heard.values())


def launches(
    op: str, dtype: str, K: int, V: int, group: int, packed: bool, chunk: int, precision: str, inverse: str, ways: tuple[str, ...],
    loads: tuple[Any, ...],
) -> list[Launch]:  # fmt: skip
    """What calls of a member launch under the driver of this process."""
    member, options = all_ops()[op], dict(chunk_size=chunk, precision=precision, backend="auto")
    if "inverse_precision" in member.defaults:
        options["inverse_precision"] = inverse

    def run() -> None:
        for way in [WAYS[w] for w in ways if WAYS[w].form in ("auto", *member.forms)]:
            for T, HV, B in dict.fromkeys((way.tokens or T, HV, B) for T, HV, B in loads if HV % group == 0):
                sizes = {**EXTRA_SIZES, "B": B, "T": T, "H": HV // group, "HV": HV, "K": K, "V": V}
                _call_once(member, way, sizes, DTYPES[dtype], packed, **options)

    return hear(run)


def _usage(kernel: Any) -> tuple[int | None, int | None]:
    """(registers, bytes of spills) of a thread."""
    from triton import knobs

    if "cubin" in kernel.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", text)
        return (int(found[1]), int(found[2])) if found else (None, None)
    text = kernel.asm.get("amdgcn", "")
    count, spilled = (re.search(rf"\.vgpr_{what}:\s*(\d+)", text) for what in ("count", "spill_count"))
    return (int(count[1]) if count else None, 4 * int(spilled[1]) if spilled else None)


def _build(arch: str, launch: Launch) -> Built:
    """Build one kernel under the driver of this process."""
    kernel = getattr(importlib.import_module(launch.module), launch.name.rpartition(".")[2])
    while not hasattr(kernel, "preload"):  # an autotuner or what else stands around another library's
        kernel = kernel.fn
    said, start = json.loads(launch.data), time.perf_counter()
    constants = {kernel.arg_names[k[0]]: v for k, v in zip(said["constant_keys"], said["constant_vals"])}
    types = tuple(t for t in said["signature"].values() if t != "constexpr")
    on = said["options"]
    about = dict(kernel=kernel.__name__, arch=arch, switches=constants, signature=types, warps=on["num_warps"], stages=on["num_stages"])
    try:
        made = kernel.preload(launch.data)
        registers, spills = _usage(made)
    except Exception as fault:  # whatever the compiler raises is a result here, not a failure of ours
        return Built(**about, seconds=time.perf_counter() - start, error=_complaint() or f"{type(fault).__name__}: {str(fault)[:200]}")
    took = time.perf_counter() - start
    about |= dict(registers=registers, spills=spills, shared=made.metadata.shared, limit=TARGETS[arch].shared)
    return Built(**about, seconds=took, key=made.hash)


def stand_in(arch: str, name: str) -> None:
    """Begin a worker: the stand-in driver, and compilers' complaints (pages of them) into a file."""
    from triton.runtime import driver

    from .fingerprint import remember, settle

    settle()
    remember()
    torch.set_num_threads(1)
    log = tempfile.TemporaryFile()
    os.dup2(log.fileno(), 2)
    driver.set_active(_StandIn(arch, name))


def _complaint() -> str | None:
    """The last error that a compiler wrote."""
    end = os.lseek(2, 0, os.SEEK_CUR)
    tail = os.pread(2, 1 << 20, max(0, end - (1 << 20))).decode(errors="replace")
    found = [line for line in tail.splitlines() if "error:" in line or "LLVM ERROR" in line]
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)
    return found[0][-300:] if found else None


def _workers(arch: str, jobs: int, name: str = "", begin: Callable[..., None] = stand_in, given: Sequence[Any] = ()) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=begin, initargs=(arch, name, *given))


def _check(name: str, given: Sequence[Any], allowed: Iterable[Any]) -> None:
    for x in given:
        if x not in allowed:
            raise ValueError(f"precompile: {name} must be among {', '.join(map(str, allowed))}, got {x!r}")


def possible(arch: str, ops: Sequence[str], dtypes: Sequence[str], card: str) -> None:
    """Raise ValueError for what is unknown, RuntimeError without Triton or under its interpreter."""
    _check("arch", [arch], TARGETS)
    _check("ops", ops, all_ops())
    _check("dtypes", dtypes, DTYPES)
    if card and card not in cards():
        known = f"{card!r} (there are: {', '.join(cards()) or 'none'})"
        raise ValueError(f"precompile: there are no measured configs of {known}; `chunkwise tune` makes them on the card")
    if find_spec("triton") is None:
        raise RuntimeError("precompile: triton is not installed; without it there are no kernels to build (pip install 'chunkwise[gpu]')")
    from triton import knobs

    if knobs.runtime.interpret:
        raise RuntimeError("precompile: Triton's interpreter is on (TRITON_INTERPRET): it runs kernels without building them")


def precompile(
    arch: str = "sm_90",
    ops: Sequence[str] | None = None,
    *,
    dtypes: Sequence[str] = ("bfloat16",),
    sizes: Sequence[tuple[int, int]] = ((128, 128),),
    groups: Sequence[int] = (1,),
    packed: Sequence[bool] = (False, True),
    ways: Sequence[str] = tuple(WAYS),
    loads: Sequence[tuple[int, int, int]] = LOADS,
    chunk_size: int = 64,
    precision: str = "ieee",
    inverse_precision: str = "auto",
    jobs: int | None = None,
    card: str = "",
    heard: Callable[[Built, int], None] = lambda built, of: None,
) -> list[Built]:
    """Build every kernel that calls of `ops` (names; None: all members) launch on a card of `arch`, into Triton's cache. Needs no GPU.

    dtypes of q, k, v; sizes: (K, V) channels of a key and a value; groups: value heads a key head; packed: without and with cu_seqlens;
    inverse_precision: of members that take it; ways: what is asked of a call, see WAYS; loads: (tokens of a row, value heads,
    sequences), by which work is cut up; jobs: worker processes, one a core by default; card: whose measured configs to build, a name in
    measured.cards(). heard(built, how many in all) is called after each kernel.
    Returns a record a kernel, those that cannot be built or do not fit the card among them. Workers are new processes: a script calls this
    below `if __name__ == "__main__":`. Raises ValueError for what is unknown, RuntimeError without Triton or under its interpreter.
    """
    possible(arch, ops or (), dtypes, card)
    _check("packed", packed, (False, True))
    _check("ways", ways, WAYS)
    _check("chunk_size", [chunk_size], CHUNKS)
    _check("precision", [precision], ("ieee", "tf32"))
    _check("inverse_precision", [inverse_precision], INVERSES)
    for label, numbers in (("sizes", sizes), ("groups", [(n,) for n in groups]), ("loads", loads), ("jobs", [(jobs or 1,)])):
        for some in numbers:
            if any(n < 1 for n in some):
                raise ValueError(f"precompile: {label} must be at least 1, got {some[0] if len(some) == 1 else some}")
    calls = [
        (op, dtype, K, V, group, pack, chunk_size, precision, inverse_precision, tuple(ways), tuple(loads))
        for op, dtype, (K, V), group, pack in product(all_ops() if ops is None else ops, dtypes, sizes, groups, packed)
    ]
    return build(arch, launches, calls, jobs, heard, card)


def build(
    arch: str,
    listen: Callable[..., list[Launch]],
    calls: Sequence[tuple[Any, ...]],
    jobs: int | None,
    heard: Callable[[Built, int], None] = lambda built, of: None,
    card: str = "",
    choose: Callable[[list[Launch]], list[Launch]] = list,
    begin: Callable[..., None] = stand_in,
    given: Sequence[Any] = (),
) -> list[Built]:
    """Build what `listen`, a function of a module (see `hear`), finds launched by each of the calls, its arguments; of that what `choose`
    leaves. jobs: processes, which begin by begin(arch, card, *given); None: one a core that this process may run on."""
    made: list[Built] = []
    with Crew(lambda jobs: _workers(arch, jobs, card, begin, given), jobs or len(os.sched_getaffinity(0))) as crew:
        found = list(crew.each(listen, calls))
        if None in found:
            raise RuntimeError(f"precompile: a worker died while it listened to what {calls[found.index(None)][0]} launches")
        wanted = choose(list(dict.fromkeys(launch for some in found for launch in some)))
        for launch, built in zip(wanted, crew.each(_build, [(arch, launch) for launch in wanted])):
            made.append(built or Built(launch.name.rpartition(".")[2], arch, {}, (), 0, 0, error="the compiler died"))
            heard(made[-1], len(wanted))
    return made
