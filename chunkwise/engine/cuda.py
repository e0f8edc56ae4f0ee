"""Kernels launched through the CUDA driver itself: their parameters lie ready in memory, and all launches of a pass are one call of C.

Triton's own launcher reads every argument of every launch anew, and is C code to be compiled for each kernel. What it hands to the driver
is little: the arguments that are no constants, each in its own size, a descriptor as its map, its shape and its strides, and two pointers
to scratch memory. That layout is held against what the driver knows of the kernel before anything is launched.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

MAP = 128  # bytes of a tensor map
LINE = 64  # which it is aligned to
ANYWHERE = 1 << 20  # an address to encode a map for, before a call brings its own
NUMBERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f"}
_Pointer, _Int, _Size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
CALLS = {
    "cuLaunchKernelEx": (_Pointer, _Pointer, _Pointer, _Pointer),
    "cuTensorMapEncodeTiled": (_Pointer, _Int, _Int, *(_Pointer,) * 5, *(_Int,) * 4),
    "cuTensorMapReplaceAddress": (_Pointer, _Pointer),
    "cuFuncGetParamInfo": (_Pointer, _Size, _Pointer, _Pointer),
    "cuCtxGetCurrent": (_Pointer,),
    "cuDevicePrimaryCtxRetain": (_Pointer, ctypes.c_int),
    "cuCtxSetCurrent": (_Pointer,),
}


class Place(NamedTuple):
    """An address that a call brings with it: so many bytes into one of its pieces of memory."""

    base: int
    offset: int


class Map(NamedTuple):
    """A descriptor for the copy engine; sizes and strides in elements, as Triton has them."""

    at: Place
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...] = ()  # what one instruction moves; the kernel says it, and what follows
    swizzle: int = 0
    size: int = 0  # bytes of an element
    kind: int = 0  # the driver's number of its type


class Ready(NamedTuple):
    """A kernel with its parameters in the driver's order."""

    function: int
    grid: tuple[int, int]
    threads: int
    shared: int
    parameters: tuple[Place | Map | bytes, ...]


@cache
def library() -> Any:
    """The driver's functions, or None where there is no driver, or one that does not have them all."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
        for name, types in CALLS.items():
            getattr(found, name).argtypes = types
        return found
    except (OSError, AttributeError):
        return None


def check(result: int, name: str) -> None:
    if result:
        raise RuntimeError(f"chunkwise engine: {name} failed with error {result} of the CUDA driver")


class Entered(threading.local):
    """The devices that a thread has met."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


ENTERED = Entered()


def enter(device: int) -> None:
    """Make the device's context this thread's, unless it has one."""
    context = ctypes.c_void_p()
    check(library().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if not context.value:
        check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        check(library().cuCtxSetCurrent(context), "cuCtxSetCurrent")
    ENTERED.devices.add(device)


FUNCTIONS: dict[tuple[CompiledKernel, int], int] = {}


def load(made: CompiledKernel, device: int) -> int:
    """The driver's handle of a kernel. Raises Triton's OutOfResources where the card is too small for it."""
    if (made, device) not in FUNCTIONS:
        m, utils = made.metadata, driver.active.utils
        most = utils.get_device_properties(device)["max_shared_mem"]
        if m.shared > most:
            raise OutOfResources(m.shared, most, "shared memory")
        _, function, _, _, threads = utils.load_binary(made.name, made.kernel, m.shared, device)
        if m.num_warps * 32 > threads:
            raise OutOfResources(m.num_warps * 32, threads, "threads")
        FUNCTIONS[made, device] = function
    return FUNCTIONS[made, device]


def plain(made: CompiledKernel) -> bool:
    """Whether a launch is nothing but a grid and parameters."""
    m = made.metadata
    scratch = m.global_scratch_size or m.profile_scratch_size
    return not (scratch or m.launch_cooperative_grid or m.launch_pdl or m.num_ctas != 1 or getattr(m, "tmem_size", 0))


def parameters(made: CompiledKernel, args: Sequence[Any]) -> tuple[Place | Map | bytes, ...]:
    """args: a Place, a number, or a Map of which only place, shape and strides are known, each in the kernel's order."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    metas, out = iter(made.metadata.tensordesc_meta or ()), list[Place | Map | bytes]()
    for x, kind in zip(args, made.src.signature.values()):
        if kind == "constexpr":
            continue
        if isinstance(x, Map):
            of = next(metas)
            block, kind = tuple(of["block_size"]), TMA_DTYPE_DEVICE_TO_HOST[of["elem_type"]]
            x = x._replace(block=block, swizzle=of["swizzle"], size=of["elem_size"], kind=kind)
            out += (x, *(struct.pack("i", n) for n in x.shape), *(struct.pack("q", n) for n in x.strides))
        else:
            out.append(x if isinstance(x, Place) else struct.pack(NUMBERS[kind], x))
    return (*out, bytes(8), bytes(8))  # no scratch memory


def fits(function: int, given: Sequence[Place | Map | bytes]) -> bool:
    """Whether the kernel has these parameters, of these sizes."""
    offset, size, ask = ctypes.c_size_t(), ctypes.c_size_t(), library().cuFuncGetParamInfo
    for i, x in enumerate(given):
        wanted = len(x) if isinstance(x, bytes) else MAP if isinstance(x, Map) else 8
        if ask(function, i, ctypes.byref(offset), ctypes.byref(size)) or size.value != wanted:
            return False
    return ask(function, len(given), ctypes.byref(offset), ctypes.byref(size)) != 0


@cache
def player() -> Any:
    """player.c, built and kept as Triton does its own launchers; None where there is no compiler, and nothing was kept."""
    from triton.runtime.build import compile_module_from_src

    try:
        return compile_module_from_src((Path(__file__).parent / "player.c").read_text(), "chunkwise_player")
    except (RuntimeError, OSError, subprocess.CalledProcessError):
        return None


def board(launches: Sequence[Ready], pieces: int, inputs: int) -> Any:
    """What player.c plays: parameters of launches in one piece of memory, what occurs twice once. A call's addresses go into a copy.

    pieces: of memory that a call has, of which the first, `inputs`, are the caller's. Raises ValueError where a call has no room for it.
    """
    every = list(dict.fromkeys(x for ready in launches for x in ready.parameters))
    maps = [x for x in every if isinstance(x, Map)]
    places = [x for x in every if isinstance(x, Place)]
    numbers = [x for x in every if isinstance(x, bytes)]
    words: list[Place | Map | bytes] = [*places, *numbers]
    where: dict[Place | Map | bytes, int] = {x: MAP * i for i, x in enumerate(maps)}
    where |= {x: MAP * len(maps) + 8 * i for i, x in enumerate(words)}
    memory = b"".join([*map(_encoded, maps), bytes(8 * len(places)), *(x.ljust(8, b"\0") for x in numbers)])
    addresses = [*((x, where[x]) for x in places), *((x.at, where[x]) for x in maps)]
    first = accumulate((len(r.parameters) for r in launches), initial=0)
    start, move = (ctypes.cast(getattr(library(), n), _Pointer).value for n in ("cuLaunchKernelEx", "cuTensorMapReplaceAddress"))
    return player().board(
        start, move, pieces, inputs, memory,
        b"".join(struct.pack("3q", x.base, x.offset, at) for x, at in addresses), len(maps),
        b"".join(struct.pack("4I3q", *r.grid, r.threads, r.shared, r.function, at, len(r.parameters)) for r, at in zip(launches, first)),
        b"".join(struct.pack("q", where[x]) for r in launches for x in r.parameters),
    )  # fmt: skip


def _encoded(m: Map) -> bytes:
    """Axes from the innermost on; strides in bytes, without that of neighbours. Rows beyond the tensor are zeros."""
    rank = len(m.shape)
    sizes = (ctypes.c_uint64 * rank)(*reversed(m.shape))
    strides = (ctypes.c_uint64 * rank)(*(m.size * n for n in reversed(m.strides[:-1])))
    block, steps = (ctypes.c_uint32 * rank)(*reversed(m.block)), (ctypes.c_uint32 * rank)(*[1] * rank)
    l2, zeros, interleave = 2, 0, 0  # fetches of 128 bytes into L2
    memory = ctypes.create_string_buffer(2 * MAP)
    where = -(-ctypes.addressof(memory) // LINE) * LINE
    result = library().cuTensorMapEncodeTiled(
        where, m.kind, rank, ANYWHERE, sizes, strides, block, steps, interleave, m.swizzle, l2, zeros
    )  # fmt: skip
    check(result, "cuTensorMapEncodeTiled")
    return ctypes.string_at(where, MAP)
