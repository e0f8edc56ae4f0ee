"""Recipes without a GPU: memory that is shared, addresses that follow a call, parameters as kernels have them. The interpreter's tests
(tests/interpret/test_recipe.py) show that recorded passes are the passes; those on a GPU, that launches go where they should."""

import ctypes
import random
import re
import struct
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch  # noqa: E402

from chunkwise.engine import cuda, plan_replay, plan_triton, precompile, recipe, record  # noqa: E402
from chunkwise.engine.launch import launch  # noqa: E402
from chunkwise.engine.precompile import _workers  # noqa: E402
from chunkwise.engine.problem import problem  # noqa: E402
from chunkwise.engine.program import ALIGNED, Program, pack  # noqa: E402
from chunkwise.engine.record import Described, Launch, Recorder, View  # noqa: E402
from chunkwise.spec import EXTRA_SIZES, Gate, Rule, Streams, all_ops  # noqa: E402


@pytest.mark.parametrize("seed", range(20))
def test_pieces_that_live_at_once_do_not_overlap(seed):
    r = random.Random(seed)
    pieces = [(r.randrange(1, 9000), *sorted((r.randrange(12), r.randrange(12)))) for _ in range(r.randrange(1, 25))]
    offsets, size = pack(pieces)
    spans = [(at, at + n, first, last) for at, (n, first, last) in zip(offsets, pieces)]
    for i, (a, b, first, last) in enumerate(spans):
        assert a % ALIGNED == 0 and b <= size
        assert all(b <= c or d <= a or last < f or g < first for c, d, f, g in spans[:i])
    most = max(sum(n for n, first, last in pieces if first <= t <= last) for t in range(12))
    assert most <= size <= sum(n + ALIGNED for n, _, _ in pieces)


def test_memory_is_used_again_by_what_lives_later():
    assert pack([(1000, 0, 1), (1000, 2, 3), (1000, 4, 4)]) == ([0, 0, 0], 1024)


class Driver:
    """Stands in for libcuda: reads what a launch is given, writes a map's address to where the map is."""

    def __init__(self, sizes):
        """sizes: of a kernel's parameters, by its handle."""
        self.sizes, self.encoded, self.launched, self.fault = sizes, [], [], 0
        pointer = ctypes.c_void_p
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 4)(self.launch)
        self.cuTensorMapReplaceAddress = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(self.move)

    def cuTensorMapEncodeTiled(self, where, kind, rank, address, sizes, strides, block, steps, *how):
        self.encoded.append((where % 64, kind, rank, list(sizes), list(strides)[: rank - 1], list(block), list(steps), how))
        ctypes.memmove(where, b"map" + bytes(125), 128)
        return 0

    def move(self, where, address):
        ctypes.c_uint64.from_address(where + 8).value = address
        return where % 64

    def launch(self, shape, function, parameters, extra):
        grid = struct.unpack("7IxxxxQQI", ctypes.string_at(shape, 52))
        given = [ctypes.string_at(ctypes.c_uint64.from_address(parameters + 8 * i).value, n) for i, n in enumerate(self.sizes[function])]
        self.launched.append((function, *grid, given))
        return self.fault


def test_addresses_and_maps_follow_the_call(monkeypatch):
    driver = Driver({11: (8, 128, 4, 8), 12: (8, 8, 128, 4)})
    monkeypatch.setattr(cuda, "library", lambda: driver)
    place, inner, late = cuda.Place(0, 0), cuda.Place(0, 48), cuda.Place(2, 0)
    map = cuda.Map(cuda.Place(1, 32), (2, 5, 64), (320, 64, 1), (1, 16, 64), swizzle=3, size=2, kind=9)
    number = struct.pack("i", 7)
    first = cuda.Ready(11, (3, 1), 128, 1000, (place, map, number, bytes(8)))
    second = cuda.Ready(12, (4, 2), 256, 0, (inner, late, map, number))
    board, play = cuda.board([first, second], 3, 2), cuda.player().play
    assert driver.encoded == [(0, 9, 3, [64, 5, 2], [128, 640], [64, 16, 1], [1, 1, 1], (0, 3, 2, 0))]  # one map for both

    def word(address):
        return struct.pack("Q", address)

    for _ in range(2):  # other addresses the second time
        tensors = [torch.empty(64), torch.empty(64), None]
        assert play(board, tensors, 77, 0, 1)
        a, b = tensors[0].data_ptr(), tensors[1].data_ptr()
        moved = b"map" + bytes(5) + word(b + 32) + bytes(112)
        shape = (3, 1, 1, 128, 1, 1, 1000, 77, 0, 0)
        assert driver.launched.pop() == (11, *shape, [word(a), moved, number, bytes(8)])
        for later, at in ((t := torch.empty(64), t.data_ptr()), (4096, 4096)):  # a tensor, an address
            tensors[2] = later
            assert play(board, tensors, 78, 1, 2)
            shape = (4, 2, 1, 256, 1, 1, 0, 78, 0, 0)
            assert driver.launched.pop() == (12, *shape, [word(a + 48), word(at), moved, number])
        assert not driver.launched
    many, tensors[2] = cuda.board([first] * 400, 3, 2), None  # 1,600 parameters
    assert play(many, tensors, 77, 398, 400) and [last[-1][0] for last in driver.launched] == [word(tensors[0].data_ptr())] * 2
    driver.launched.clear()
    askew = torch.empty(65)[1:]
    assert not play(board, [tensors[0], askew, None], 77, 0, 2) and not driver.launched
    driver.fault = 5
    with pytest.raises(RuntimeError, match="error 5"):
        play(board, tensors, 77, 0, 2)
    assert len(driver.launched) == 1
    with pytest.raises(ValueError, match="3 pieces"):
        play(board, tensors[:2], 77, 0, 2)
    for none in (-1, 1 << 64):
        with pytest.raises(ValueError, match=f"piece 2 of the memory must be an address, got {none}"):
            play(board, [*tensors[:2], none], 77, 0, 2)
    with pytest.raises(ValueError, match="too many"):
        cuda.board([first], 1000, 2)


def test_a_kernel_with_other_parameters_is_not_launched(monkeypatch):
    sizes = [8, 128, 4]

    def info(function, i, offset, size):
        if i < len(sizes):
            size._obj.value = sizes[i]
        return int(i >= len(sizes))

    monkeypatch.setattr(cuda, "library", lambda: SimpleNamespace(cuFuncGetParamInfo=info))
    map = cuda.Map(cuda.Place(1, 0), (4,), (1,))
    assert cuda.fits(0, (cuda.Place(0, 0), map, bytes(4)))
    assert not cuda.fits(0, (cuda.Place(0, 0), map, bytes(8)))
    assert not cuda.fits(0, (cuda.Place(0, 0), map))
    assert not cuda.fits(0, (cuda.Place(0, 0), map, bytes(4), bytes(8)))


def test_without_a_compiler_hosts_run(monkeypatch):
    from triton.runtime import build

    def fail(*args):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(build, "compile_module_from_src", fail)
    assert cuda.player.__wrapped__() is None
    monkeypatch.setattr(cuda, "player", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    assert recipe._bound(SimpleNamespace(steps=[]), torch.device("cuda", 0)) is None


def test_what_is_not_on_a_gpu_runs_its_hosts():
    x = torch.ones(3)
    out = recipe.replay(("nothing",), (x, None), lambda a, b: (a + 1, b))
    assert torch.equal(out[0], x + 1) and out[1] is None and not recipe.RECIPES


def test_shapes_without_contents_are_those_of_pytorch():
    x = torch.empty(2, 3, 4, dtype=torch.bfloat16, device="meta")
    calls = {
        torch.ops.aten.empty_like.default: [((), {}), ((), dict(dtype=torch.float32))],
        torch.ops.aten.sum.dim_IntList: [(([0, -1],), {}), (([1], True), dict(dtype=torch.float32)), (([],), {}), ((None, True), {})],
    }
    assert calls.keys() == record.SHAPES.keys()
    for op, ways in calls.items():
        for args, named in ways:
            made, own = record.SHAPES[op](x, *args, **named), op(x, *args, **named)
            assert (made.shape, made.stride(), made.dtype, made.device) == (own.shape, own.stride(), own.dtype, own.device)
    with Recorder((torch.empty(2, 3, dtype=torch.bool), torch.empty(()))) as recorder:
        counted, number = recorder.inputs[0].sum(1), recorder.inputs[1].sum(0)
    assert (counted.dtype, counted.shape, number.shape) == (torch.int64, (2,), ())  # what these do not know goes to PyTorch


def _sizes() -> list[tuple[str, list[int], list[int]]]:
    """Of the kernels of a pass built for sm_90: name, sizes of the parameters we give, those in its PTX."""
    torch.cuda.device = lambda device: nullcontext()
    x = Streams(*(torch.empty(1, 64, 1, 16, dtype=torch.bfloat16, device="meta") for _ in range(3)))
    p = problem(x, None, None, gate=Gate.NONE, rule=Rule.ADD, chunk=16, exact=True, scale=1.0, precision="ieee")
    with Recorder(x) as recorder:
        plan_triton.forward(p, Streams(*recorder.inputs), None, final=True, save=False)
    recorder.compile(torch.device("cuda", 0))
    widths = {"64": 8, "32": 4, "16": 2, "8": 1}
    found = []
    for step in recorder.launches:
        args = [
            cuda.Map(cuda.Place(0, 0), x.shape, x.strides) if isinstance(x, Described) else cuda.Place(0, 0) if isinstance(x, View) else x
            for x in step.args
        ]
        given = [len(x) if isinstance(x, bytes) else cuda.MAP if isinstance(x, cuda.Map) else 8 for x in cuda.parameters(step.made, args)]
        entry = re.search(r"\.visible \.entry.*?\)", step.made.asm["ptx"], re.S)[0]
        there = [int(n or widths[w]) for w, n in re.findall(r"\.param [^,\n]*?\.[a-z](\d+)\b[^,\n\[]*(?:\[(\d+)\])?", entry)]
        found.append((step.made.name, given, there))
    return found


def test_parameters_are_those_of_the_built_kernel():
    with _workers("sm_90", 1) as pool:
        found = pool.submit(_sizes).result()
    assert [name for name, _, _ in found] == ["state_pass_kernel"]
    for _, given, there in found:
        assert given == there and cuda.MAP in given


def _needs() -> dict[str, tuple[int, int, int]]:
    """Of every member the most that a pass of a training step hands the player: bytes, parameters, pieces of memory. Fails where a pass
    is recorded with what takes seconds to import."""
    most: dict[str, tuple[int, int, int]] = {}
    slow = "sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"

    def replay(what, tensors, hosts, ahead=None, seat=None):
        with pytest.MonkeyPatch.context() as patch, Recorder(tensors) as recorder:
            for name in slow:
                patch.setitem(sys.modules, name, None)
            made = hosts(*recorder.inputs)
        program = Program(recorder, made)
        args = [x for step in program.steps if isinstance(step, Launch) for x in (*step.args, bytes(8), bytes(8))]
        maps = [x for x in args if isinstance(x, Described)]
        size = cuda.MAP * len(set(maps)) + 8 * (len(args) - len(maps) + sum(2 * len(x.shape) for x in maps))
        need = size, len(args) + sum(2 * len(x.shape) for x in maps), program.pieces
        most[op.name] = tuple(map(max, need, most.get(op.name, need)))
        return made

    plan_replay.replay = replay
    for op in all_ops().values():
        for packed in (False, True):
            sizes = {**EXTRA_SIZES, "B": 1, "T": 8192, "H": 8, "HV": 16 if packed else 8, "K": 128, "V": 128}
            how = dict(chunk_size=64, precision="ieee", backend="auto")
            precompile._call_once(op, precompile.WAYS["training with states"], sizes, torch.bfloat16, packed, **how)
    return most


def test_the_player_has_room_for_every_member():
    """Without it a pass would run its hosts at every call, ten times slower, and nobody would see why. Nor does a first call wait for
    what PyTorch imports for tensors without contents."""
    with _workers("sm_90", 1) as pool:
        most = pool.submit(_needs).result()
    player, kernels = cuda.player(), {op.name for op in all_ops().values() if op.passes is None}
    assert kernels <= most.keys() and max(parameters for _, parameters, _ in most.values()) > 500
    for name, need in most.items():
        assert all(n <= room for n, room in zip(need, (player.SIZE, player.PARAMETERS, player.BASES))), (name, need)


def test_tritons_fingerprint_is_remembered(tmp_path, monkeypatch):
    from triton import knobs
    from triton.runtime import cache

    from chunkwise.engine import fingerprint

    asked = []
    monkeypatch.setattr(cache, "triton_key", lambda: asked.append(1) or "a fingerprint")
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        for _ in range(2):  # two processes
            monkeypatch.setattr(fingerprint, "KNOWN", [])
            fingerprint.remember()
            assert cache.triton_key() == "a fingerprint" and len(asked) == 1
        monkeypatch.setattr(fingerprint, "KNOWN", [])
        monkeypatch.setattr(fingerprint, "stamp", lambda root: "ab12")
        monkeypatch.setattr(cache, "triton_key", lambda: "another fingerprint")
        fingerprint.remember()
        assert cache.triton_key() == "another fingerprint"


def test_a_gate_that_nobody_asks_for_shares_no_backward_pass(monkeypatch):
    asked = []

    def replay(what, tensors, hosts, ahead=None, seat=None):
        asked.append(what if ahead is None else ahead(tensors, (tensors[0], None, None))[0])
        return (None,) * 10

    monkeypatch.setattr(plan_replay, "replay", replay)
    plan = plan_replay.replayed(SimpleNamespace(forward=None, backward=None, chunk=None, saved_entries=None))
    x = Streams(*(torch.zeros(1, 8, 1, 4) for _ in range(3)), torch.zeros(1, 8, 1))
    p = problem(x, None, None, gate=Gate.SCALAR, rule=Rule.ADD, chunk=16, scale=1.0, precision="ieee")
    for q in p, replace(p, fixed=True):
        plan.backward(q, x, None, None, x.v, None)
        plan.forward(q, x, None, final=False, save=True)
    assert asked[0] == asked[1] != asked[2] == asked[3]


def test_calls_alike_find_their_recipe_without_a_key(monkeypatch):
    """Unless rules have changed, or a tensor begins where kernels cannot read; backward passes by the strides of what comes in."""
    log = []

    class Played(recipe.Recipe):
        def __init__(self, n):
            self.n = n

        def __call__(self, *tensors):
            if recipe.askew(tensors):
                return None
            log.append("recipe")
            return (None,) * self.n

    def keyed(what, tensors, device):
        log.append("key")
        return what, tuple(None if t is None else t.stride() for t in tensors)

    def plan(n, name):
        return lambda *a, **k: log.append(name) or ((None,) * n if n == 3 else ((None,) * 9, None))

    monkeypatch.setattr(recipe, "served", lambda device: True)
    monkeypatch.setattr(recipe, "heard", lambda: False)
    monkeypatch.setattr(recipe, "record", lambda tensors, *a: len(tensors))
    monkeypatch.setattr(recipe, "_bound", lambda n, device: Played(3 if n == 11 else 10))
    monkeypatch.setattr(recipe, "_key", keyed)
    monkeypatch.setattr(recipe, "RECIPES", {})
    ways = plan_replay.replayed(SimpleNamespace(forward=plan(3, "hosts"), backward=plan(10, "hosts"), chunk=None, saved_entries=None))
    x = Streams(*(torch.zeros(1, 8, 1, 4) for _ in range(3)))
    p = problem(x, None, None, gate=Gate.NONE, rule=Rule.ADD, chunk=16, scale=1.0, precision="ieee")
    seats = ways.seats()

    def did(call, *args):
        log.clear()
        call(*args)
        return list(log)

    def forward(v=x.v):
        tensors = (*x._replace(v=v), None, None)
        if seats.forward(tensors) is None:
            ways.forward(p, Streams._make(tensors[:9]), None, final=False, save=True, seats=seats)

    def backward(do, q=x.q):
        y = x._replace(q=q)
        tensors = (*y, None, None, do, None, None)
        if seats.back(tensors)(tensors) is None:
            ways.backward(p, y, None, None, do, None, seats=seats)

    assert [did(forward) for _ in range(3)] == [["key", "recipe"], ["recipe"], ["recipe"]]
    assert did(forward, torch.zeros(33)[1:].view(1, 8, 1, 4)) == ["hosts"]
    monkeypatch.setitem(recipe.RULES, "grad", lambda p: None)
    assert [did(forward) for _ in range(2)] == [["key", "recipe"], ["recipe"]]
    dense, wide = torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1, 1).expand(1, 8, 1, 4)
    assert [did(backward, do) for do in (dense, dense, wide, wide, dense)] == [
        ["key", "recipe"], ["recipe"], ["key", "recipe"], ["recipe"], ["recipe"],
    ]  # fmt: skip
    apart = torch.zeros(1, 8, 1, 12)[..., :4]  # saved tensors that come back from the host are dense, whatever they were
    assert [did(backward, dense, q) for q in (apart, apart, x.q)] == [["key", "recipe"], ["recipe"], ["recipe"]]


def test_a_grid_of_two_axes_is_recorded_and_an_empty_one_is_not():
    """Neither is launched on tensors without contents."""
    launched = []
    with Recorder(()) as recorder:
        for grid in ((2, 3), 4, (2, 0), 0):
            launch({grid: launched.append}, grid, config=SimpleNamespace(launch={}))
    assert not launched and [step.grid for step in recorder.launches] == [(2, 3), (4, 1)]
