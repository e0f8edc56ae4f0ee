"""Kernels launched through the CUDA driver itself: their parameters lie ready in memory, and a launch is one foreign call.

Triton's own launcher reads every argument of every launch anew, and is C code to be compiled for each kernel. What it hands to the driver
is little: the arguments that are no constants, each in its own size, a descriptor as its map, its shape and its strides, and two pointers
to scratch memory. That layout is held against what the driver knows of the kernel before anything is launched.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

MAP = 128  # bytes of a tensor map
LINE = 64  # which it is aligned to
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
    grid: int
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


class Shape(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        *((n, ctypes.c_uint) for n in ("grid", "grid_y", "grid_z", "threads", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


class Board:
    """The parameters of several launches in one piece of memory: tensor maps, addresses, numbers. What occurs twice is there once."""

    def __init__(self, launches: Sequence[Ready]):
        every = list(dict.fromkeys(x for ready in launches for x in ready.parameters))
        maps = [x for x in every if isinstance(x, Map)]
        rest = [x for x in every if not isinstance(x, Map)]
        self.places = [x for x in rest if isinstance(x, Place)]
        rest = self.places + [x for x in rest if not isinstance(x, Place)]
        self.memory = ctypes.create_string_buffer(LINE + MAP * len(maps) + 8 * len(rest))
        start = -(-ctypes.addressof(self.memory) // LINE) * LINE
        words = start + MAP * len(maps)
        where = {x: start + MAP * i for i, x in enumerate(maps)} | {x: words + 8 * i for i, x in enumerate(rest)}
        for x in rest:
            if isinstance(x, bytes):
                ctypes.memmove(where[x], x, len(x))
        self.words = (ctypes.c_uint64 * len(self.places)).from_address(words)
        self.maps = [(x, where[x]) for x in maps]
        self.held = [0] * len(maps)  # the address in each
        self.arrays = [(ctypes.c_void_p * len(ready.parameters))(*(where[x] for x in ready.parameters)) for ready in launches]
        self.shapes = [Shape(r.grid, 1, 1, r.threads, 1, 1, r.shared) for r in launches]
        self.calls = [
            (ctypes.addressof(shape), r.function, ctypes.addressof(a)) for r, shape, a in zip(launches, self.shapes, self.arrays)
        ]  # fmt: skip
        self.stream = 0

    def follow(self, stream: int) -> None:
        """Let the launches go to this stream."""
        if stream != self.stream:
            for shape in self.shapes:
                shape.stream = stream
            self.stream = stream

    def point(self, have: Sequence[Any]) -> None:
        """Let every address and every map lie in these tensors; None: one that comes later, or never."""
        bases = [0 if t is None else t.data_ptr() for t in have]
        self.words[:] = [bases[base] + offset for base, offset in self.places]
        for i, (map, where) in enumerate(self.maps):
            base, before = bases[map.at.base], self.held[i]
            address = base + map.at.offset
            if address != before and base:
                if before:
                    check(library().cuTensorMapReplaceAddress(where, address), "cuTensorMapReplaceAddress")
                else:
                    _encode(map, where, address)
                self.held[i] = address


def _encode(m: Map, where: int, address: int) -> None:
    """Axes from the innermost on; strides in bytes, without that of neighbours. Rows beyond the tensor are zeros."""
    rank = len(m.shape)
    sizes = (ctypes.c_uint64 * rank)(*reversed(m.shape))
    strides = (ctypes.c_uint64 * rank)(*(m.size * n for n in reversed(m.strides[:-1])))
    block, steps = (ctypes.c_uint32 * rank)(*reversed(m.block)), (ctypes.c_uint32 * rank)(*[1] * rank)
    l2, zeros, interleave = 2, 0, 0  # fetches of 128 bytes into L2
    result = library().cuTensorMapEncodeTiled(
        where, m.kind, rank, address, sizes, strides, block, steps, interleave, m.swizzle, l2, zeros
    )  # fmt: skip
    check(result, "cuTensorMapEncodeTiled")
