"""Every kernel of the Triton plan, as tune chooses it, builds for every card we serve, fits its shared memory and keeps its registers."""

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

pytest.importorskip("triton")

import sass  # noqa: E402
import torch  # noqa: E402
from cover import cover, sets  # noqa: E402
from crew_case import afresh  # noqa: E402

from chunkwise.engine import precompile as precompile_module  # noqa: E402
from chunkwise.engine.dispatch import DIGITS  # noqa: E402
from chunkwise.engine.explain import passes  # noqa: E402
from chunkwise.engine.measured import KEY, cards, load  # noqa: E402
from chunkwise.engine.precompile import LOADS, TARGETS, WAYS, Built, Launch, launches, precompile  # noqa: E402
from chunkwise.engine.precompile import build as precompiled  # noqa: E402
from chunkwise.spec import Gate, Rule, all_ops  # noqa: E402


def served() -> dict[tuple, str]:
    """The first member, plain ones before those of several passes, of everything that decides which kernels a pass on a GPU runs."""
    found: dict[tuple, str] = {}
    for op in sorted(all_ops().values(), key=lambda op: op.passes is not None):
        made = passes(op, T=256, device="cuda", dtype=torch.bfloat16, grad=True)
        if all(choice.backend == "triton" for _, choice in made):
            for cell, _ in made:
                found.setdefault((cell.gate, cell.rule, cell.bonus, cell.erase, cell.before), op.name)
    return found


SERVED_CELLS = served()
CELLS = tuple(dict.fromkeys(SERVED_CELLS.values()))
SERVED = ("sm_80", "sm_90", "sm_100", "gfx942")
FULL = ((64, 132, 1),)  # a load that gives every multiprocessor work, so the widest blocks
# Bytes a thread may keep in memory: (cards, kernel, switches: on, off or a number) -> (bytes, why). All else keeps its registers.
_GRADIENTS = "the gradients of all streams of a chunk live at once; narrower blocks keep their registers and are slower on an H200"
_FAR = "gates that forget more than 2^100 in a chunk: what pairs give on every level is added to everything else"
_ELSEWHERE = "not measured on such a card"
_SCAN = "states, operands and results of a chunk live at once, in packed rows their addresses too: the copy engine moves no others"
SPILLS: dict[tuple[tuple[str, ...], str, tuple[str, ...]], tuple[int, str]] = {
    (("sm_90",), "grad_key_kernel", ("DELTA",)): (512, _GRADIENTS),
    (("sm_90",), "grad_key_kernel", ("not DELTA",)): (24, "fp16, whose sums of gates' gradients have three parts"),
    (("sm_90",), "grad_key_kernel", ("not DELTA", "PACKED")): (168, "fp16, the same, and rows the copy engine cannot move"),
    (("sm_80", "sm_90", "sm_100", "gfx942"), "grad_key_blocks_kernel", ("NEAR",)): (1000, _ELSEWHERE),
    (("sm_80", "sm_90", "sm_100", "gfx942"), "grad_key_blocks_kernel", ("not NEAR",)): (1840, _FAR),
    (("sm_80", "sm_90", "sm_100", "gfx942"), "grad_key_blocks_kernel", ("not NEAR", "DELTA")): (2700, _FAR),
    (("sm_80", "sm_100"), "score_bounded_kernel", ()): (360, _ELSEWHERE),
    (("sm_90",), "grad_kernel", ("DELTA",)): (352, _GRADIENTS),
    (("sm_90",), "grad_kernel", ("LEARNS", "not DELTA")): (240, "64 keys, 128 tokens: 0.45 ms; 32 keys spill nothing and take 0.65 (H200)"),
    (("sm_100",), "grad_blocks_kernel", ("DELTA",)): (104, _GRADIENTS),
    (("sm_100",), "grad_blocks_kernel", ("DELTA", "BEFORE")): (120, _GRADIENTS),
    (("sm_80",), "grad_blocks_kernel", ("DELTA", "K=256")): (136, _GRADIENTS),
    (("sm_100",), "grad_pair_kernel", ("LOW_RANK",)): (16, _GRADIENTS),
    (("sm_80", "sm_100"), "state_pass_kernel", ("DELTA", "BK=256")): (456, _ELSEWHERE),
    (("sm_90",), "grad_blocks_kernel", ("DELTA",)): (2000, "few channels in blocks of 64: narrower ones are wrong; none from 64 on"),
    (("sm_100",), "inverse_kernel", ("IPT=tf32x3",)): (16, _ELSEWHERE),
    (("sm_100",), "score_kernel", ("DELTA", "IPT=bf16x1")): (8, _ELSEWHERE),
    (("sm_90",), "score_kernel", ("DELTA",)): (360, "64 channels a block: fewer spill less and took 1.93 ms where this takes 1.79 (H200)"),
    (SERVED, "affine_score_kernel", ("FAR",)): (296, _FAR),
    (SERVED, "affine_score_kernel", ("LOW_RANK", "not FAR")): (64, "four matrices of scores and a chunk's inverse at once"),
    (("sm_90",), "affine_score_kernel", ("LOW_RANK", "not FAR", "not TMA")): (232, "the same, and rows the copy engine cannot move"),
    (("sm_80", "sm_90"), "grad_pair_kernel", ("LOW_RANK",)): (400, _GRADIENTS),
    (SERVED, "grad_reader_kernel", ()): (88, _GRADIENTS),
    (SERVED, "grad_writer_kernel", ()): (336, _GRADIENTS),
    (SERVED, "state_pass_kernel", ("LOW_RANK",)): (840, "256 channels of a state, not measured; none to speak of at 128"),
    (SERVED, "grad_reader_far_kernel", ()): (560, _FAR),
    (("sm_90",), "score_bounded_kernel", ("PAIRS",)): (160, "168 registers took 0.355 ms, as many as wanted 0.384 (H200, KDA)"),
    (("sm_90",), "score_bounded_kernel", ("PACKED", "PAIRS")): (344, "the same, and rows the copy engine cannot move"),
    (("sm_90",), "score_bounded_kernel", ("not PAIRS",)): (760, "few channels and fp32 gates; not measured"),
    (("sm_100",), "value_output_kernel", ()): (32, _ELSEWHERE),
    (("sm_90",), "value_output_kernel", ()): (128, "rows out of reach meet level by level; 64 channels as of the gradients"),
    (("sm_90",), "state_pass_kernel", ("DELTA",)): (280, _SCAN),
    (("sm_90",), "state_pass_kernel", ("REVERSE", "OUTPUT")): (
        32, "a head's decays between all pairs stay in registers: f+b 0.61 ms, else 0.68 (H200)",
    ),
    (("sm_90",), "state_pass_kernel", ("BK=256", "not DELTA")): (512, "8 warps and 64 values spill nothing: 0.243 ms, else 0.201 (H200)"),
    (("sm_80", "sm_100"), "state_pass_kernel", ("BK=256", "not DELTA")): (544, _ELSEWHERE),
    (("sm_90",), "state_pass_kernel", ("BK=256", "DELTA")): (576, _SCAN),
    (("sm_90",), "state_pass_kernel", ("BK=256", "DELTA", "ERASE", "REVERSE")): (784, "four warps; eight spill 8 bytes, not measured"),
    (("sm_90",), "state_pass_kernel", ("DELTA", "BEFORE")): (336, _SCAN),
    (("sm_90",), "state_pass_kernel", ("DELTA", "BEFORE", "BK=256")): (784, _SCAN),
    (("sm_90",), "grad_blocks_kernel", ("not DELTA", "SPLIT")): (8, "float32, two warps: they do not make products over"),
    (("sm_90",), "state_pass_kernel", ("PACKED", "DELTA")): (480, _SCAN),
    (("sm_90",), "state_pass_kernel", ("PACKED", "not DELTA")): (104, _SCAN),
    (("sm_90",), "state_pass_kernel", ("LOW_RANK",)): (192, _SCAN),
    (("sm_90",), "grad_reader_kernel", ("LOW_RANK",)): (520, _GRADIENTS),
    (("sm_90",), "grad_writer_kernel", ("LOW_RANK",)): (664, _GRADIENTS),
    (("sm_90",), "score_bounded_kernel", ("DELTA", "PAIRS")): (128, "both scores of an erase key of its own; not measured"),
    (("sm_90",), "inverse_kernel", ("IPT=bf16x6",)): (144, "six products each; GDN's forward 0.356 ms, with three 0.308 (H200)"),
    (("sm_90",), "inverse_kernel", ()): (96, "twelve programs a multiprocessor: GDN 0.083 ms; two warps of theirs 0.119 (H200)"),
    (("sm_90",), "grad_kernel", ("DELTA", "BV=256")): (368, _GRADIENTS),
    (("sm_90",), "output_kernel", ("SPLIT",)): (8, "one channel in a block of 64; none from 8 on"),
    (("sm_90",), "parallel_kernel", ()): (136, "float32; 48 of 256 channels and of float16 in packed rows, where a gate learns"),
    (("sm_80", "sm_100"), "parallel_kernel", ()): (544, _ELSEWHERE),
    (("sm_90",), "small_strength_kernel", ("BV=256",)): (136, "256 values at once; as a rule it finds nothing to do"),
    (("sm_90",), "state_pass_kernel", ("PACKED", "DELTA", "BK=256")): (672, _SCAN),
    (("sm_80", "sm_90"), "recurrent_kernel", ("ERASE",)): (8, "in one or two of all its builds; not measured apart"),
    (("sm_90",), "recurrent_kernel", ("K=64", "ERASE", "RAW", "not V_FIRST")): (32, "a float32 step by one warp; not measured"),
    (("sm_90", "sm_100"), "recurrent_kernel", ("RAW", "not V_FIRST")): (8, "a token is held while its state comes; not measured"),
    (SERVED, "recurrent_kernel", ("TREE",)): (712, "the first state beside the one that a token goes on from; not measured"),
    (("sm_90",), "conv_kernel", ("GRAD", "PARTS")): (8, "four programs side by side: 0.236 ms of packed rows, else 0.254 (H200)"),
    (SERVED, "recurrent_kernel", ("COLUMN", "not V_FIRST")): (600, "256 keys: a thread has numbers of 16; at 128 next to none"),
    (("sm_100",), "state_pass_kernel", ("DELTA",)): (104, "not measured on such a card; the largest scan under gates per key"),
    (("sm_100",), "state_pass_kernel", ("REVERSE", "OUTPUT")): (64, _ELSEWHERE),
}


@pytest.fixture(scope="module", autouse=True)
def lasting_workers():
    """Workers that wait for the next calls when some are done: to begin one takes as long as to build a kernel or two."""
    begin, idle = precompile_module._workers, {}

    def close() -> None:
        for kept in idle.values():
            kept.end()
        idle.clear()

    def workers(*given):
        if given in idle:
            return idle.pop(given)
        close()  # another card's: each holds a PyTorch and a compiler
        pool = begin(*given)
        pool.end, submit = pool.shutdown, pool.submit
        pool.submit = lambda work, *item: submit(afresh, work, *item)

        def wait(**_) -> None:
            if pool._broken or given in idle:
                pool.end()
            else:
                idle[given] = pool

        pool.shutdown = wait
        return pool

    precompile_module._workers = workers
    yield
    precompile_module._workers = begin
    close()


def jobs() -> int:
    """This process's share of the machine, where pytest runs several side by side."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def build(arch: str, *ops: str, **options) -> list[Built]:
    return precompile(arch, ops or None, **{"loads": FULL, "ways": ("training",), "packed": (False,), "jobs": jobs(), **options})


def enough(arch: str, launches: list[Launch]) -> list[Launch]:
    """Of all launches those that are built: every pair of choices for the card that rules were measured on, every choice for the others."""
    return cover(launches, 2 if arch == "sm_90" else 1)


def built(arch: str, kinds: Iterable[tuple], ways: tuple[str, ...], loads: tuple, kernels: str = "", inverse: str = "auto") -> list[Built]:
    """Enough of what calls of these kinds (op, dtype, (K, V), value heads a key head, whether packed) launch; of some kernels alone."""
    calls = [(op, dtype, K, V, group, packed, 64, "ieee", inverse, ways, loads) for op, dtype, (K, V), group, packed in kinds]
    choose = lambda heard: enough(arch, [x for x in heard if not kernels or x.name.rpartition(".")[2] in kernels.split()])
    return precompiled(arch, launches, calls, jobs(), choose=choose)


def allowed(b: Built) -> int:
    def applies(cards: tuple[str, ...], kernel: str, on: tuple[str, ...]) -> bool:
        def fits(switch: str) -> bool:
            name, _, number = switch.removeprefix("not ").partition("=")
            has = b.switches.get(name)
            return (str(has) == number if number else bool(has)) != switch.startswith("not ")

        return b.arch in cards and b.kernel == kernel and all(map(fits, on))

    return max((n for row, (n, _) in SPILLS.items() if applies(*row)), default=0)


def check(made: list[Built]) -> None:
    faults = []
    for b in made:
        about = f"{b.kernel} on {b.arch}, {b.warps} warps, {b.switches}"
        if b.error is not None:
            faults.append(f"{about}: {b.error}")
        elif b.shared > b.limit:
            faults.append(f"{about}: {b.shared} bytes of shared memory, the card has {b.limit}")
        elif b.registers is None or b.spills is None:
            faults.append(f"{about}: registers unknown")
        elif b.spills > allowed(b):
            faults.append(f"{about}: {b.spills} bytes of spills a thread, at most {allowed(b)} are accounted for")
    assert made and not faults, "\n".join(faults)


def check_descriptors(made: list[Built]) -> None:
    """wgmma's, of what was built for sm_90; half a second a kernel."""
    from triton.runtime.cache import get_cache_manager

    def faults(b: Built) -> str:
        with open(get_cache_manager(b.key).get_file(f"{b.kernel}.cubin"), "rb") as file:
            unset = sass.unset_registers(sass.instructions(file.read()))
        return f"{b.kernel}, {b.warps} warps, {b.switches}: {unset}" if unset else ""

    with ThreadPoolExecutor() as pool:
        found = [f for f in pool.map(faults, (b for b in made if b.arch == "sm_90" and b.error is None)) if f]
    assert not found, "descriptors of registers that nobody has written:\n" + "\n".join(found)


def test_a_descriptor_of_unset_registers_is_found():
    """As ptxas 12.8 has made them: words of a descriptor, counted on from nothing."""
    code = [
        "ULDC.64 UR4, c[0x0][0x208]", "UMOV UR9, 0x40000040", "USHF.R.U32.HI UR8, URZ, 0x4, UR5",
        "UIADD3 UR10, UP0, UR12, 0x2, URZ", "@UP0 UIADD3.X UR11, UR9, -0x7fffffe0, URZ, UP0, !UPT",
        "HGMMA.64x32x16.F32.BF16 R56, gdesc[UR8].tnspB, R56, gsb0",
    ]  # fmt: skip
    assert sass.unset_registers(code) == {"UR12": code[3]}
    code[3] = code[3].replace("UR12", "UR4")
    assert not sass.unset_registers(code)
    code[5] = "HGMMA.64x32x16.F32.BF16 R24, R4, gdesc[UR12], R24"  # from registers: the first two words are not read
    assert sass.unset_registers(code).keys() == {"UR14", "UR15"}
    assert not sass.unset_registers(["UIADD3 UR4, UR5, UR6, URZ"])  # no products
    code[5] = "IADD3.X R21, R21, -0x7fffffe0, RZ, P0, !PT"  # on its way to a descriptor
    assert sass.unset_registers([*code, "HGMMA.64x32x16.F32.BF16 R24, R4, gdesc[UR8], R24"]) == {"R21": code[5]}


@pytest.mark.parametrize("op", CELLS)
def test_a_cell_builds_for_hopper_forward_and_backward(op):
    made = build("sm_90", op, sizes=((64, 64),))
    scans = [b for b in made if b.kernel == "state_pass_kernel"]
    assert any(not b.switches["REVERSE"] for b in scans) and any(b.switches["REVERSE"] for b in scans)
    check(made)
    if op == "abc":  # of few slots gradients were built from registers that nobody had written, and wrong on the card
        check_descriptors(made)


@pytest.mark.parametrize("arch", [a for a in SERVED if a != "sm_90"])
def test_other_cards_are_served_too(arch):
    check(build(arch, "gla", "gated_delta_rule", sizes=((64, 64),)))


def test_every_gate_on_the_key_side_has_its_kernels():
    for rule in (Rule.ADD, Rule.DELTA):
        gates = {gate for gate, r, *own in SERVED_CELLS if r is rule and not any(own)}
        assert gates >= {Gate.NONE, Gate.SCALAR, Gate.KEY}, rule


def test_packed_sequences_build_too():
    made = build("sm_90", "simple_gla", sizes=((64, 64),), packed=(True,))
    assert "index_kernel" in {b.kernel for b in made}
    check(made)


def test_few_channels_have_whole_descriptors():
    """Gradients in blocks of 16 keys to chunks of 64 were built from registers that nobody had written: an illegal access on the card."""
    made = built("sm_90", [("comba", "bfloat16", (6, 5), 2, False)], ("training",), FULL, "grad_blocks_kernel")
    assert made and {b.error for b in made} == {None}
    check_descriptors(made)


@pytest.mark.parametrize("op", ["rwkv7", "comba"])
def test_the_widest_blocks_fit_a_card_where_readers_are_of_their_own(op):
    """A full card and 128 channels: three stages of a dplr scan's operands were more than its shared memory."""
    made = build("sm_90", op, sizes=((128, 128),))
    assert made and all(b.fits for b in made)


@pytest.mark.parametrize("arch", [pytest.param(a, marks=() if a == "sm_90" else pytest.mark.compile) for a in SERVED])
def test_the_parallel_form_builds_for_every_card(arch):
    kinds = [("simple_gla", "bfloat16", (64, 64), 1, False)]
    made = built(arch, kinds, ("parallel training with states",), FULL, "factor_kernel parallel_kernel parallel_gate_kernel")
    assert {b.switches["REVERSE"] for b in made if b.kernel == "parallel_kernel"} == {False, True}
    check(made)
    check_descriptors(made)


@pytest.mark.parametrize("arch", SERVED)
def test_the_recurrent_form_builds_for_every_card(arch):
    made = build(arch, "kda", "rwkv7", "comba", sizes=((128, 128),), ways=("decoding",))
    assert {b.kernel for b in made} == {"recurrent_kernel"}
    assert {(b.switches["RAW"], b.switches["V_FIRST"]) for b in made} >= {("softplus", True), ("", False)}
    check(made)


@pytest.mark.compile
def test_drafts_and_trees_of_them_build():
    made = build("sm_90", "abc", sizes=((16, 16),), ways=("drafting",))
    found = {(b.kernel, b.switches["TURNED"], b.switches["EACH"], b.switches["ACCEPTED"], b.switches["TREE"]) for b in made}
    ways = ((False, False, False), (True, True, False), (True, False, True))
    assert found == {("slot_kernel", turned, *way) for turned in (False, True) for way in ways}
    check(made)


@pytest.mark.compile
def test_a_step_sums_over_keys_in_one_order_of_threads():
    """Where an output was stored in other vectors than the state's, trees of drafts were summed in both orders: the last bits differed."""
    from triton.runtime.cache import get_cache_manager

    ways = ("decoding", "drafting")
    for b in build("sm_90", "delta_rule", sizes=((5, 6), (5, 8)), ways=ways, dtypes=("bfloat16", "float32")):
        with open(get_cache_manager(b.key).get_file("recurrent_kernel.ttgir")) as file:
            assert file.read().count(':2 = "tt.reduce"') == 1, b.switches


@pytest.mark.compile
@pytest.mark.parametrize("arch", SERVED)
def test_every_member_s_recurrent_form_builds_for_every_card(arch):
    ways, sizes = ("one token", "first token", "decoding", "drafting"), ((64, 64), (128, 128), (256, 512))
    kinds = product(all_ops(), ("bfloat16", "float32"), sizes, (1, 4), (False, True))
    check(built(arch, kinds, ways, FULL, "recurrent_kernel slot_kernel"))


@pytest.mark.compile
@pytest.mark.parametrize("arch", SERVED)
def test_every_cell_builds_for_every_card(arch):
    shapes = [("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float16", 128), ("float32", 64)]
    kinds = [(op, dtype, (n, n), group, packed) for op, (dtype, n), group, packed in product(CELLS, shapes, (1, 4), (False, True))]
    made = built(arch, kinds, ("training", "parallel training"), FULL)
    check(made)
    check_descriptors(made)


@pytest.mark.compile
@pytest.mark.parametrize("arch", SERVED)
def test_every_precision_of_the_inverse_builds_for_every_card(arch):
    kernels = "inverse_kernel score_bounded_kernel score_kernel affine_score_kernel"
    kinds = [(op, dtype, (64, 64), 1, False) for op, dtype in product(("gated_delta_rule", "kda", "rwkv7"), ("bfloat16", "float32"))]
    made = [b for inverse in DIGITS for b in built(arch, kinds, ("prefill",), FULL, kernels, inverse)]
    assert {b.switches.get("IPT") for b in made} == {"bf16x6", "tf32x3", "bf16x3", "tf32", "bf16x1"}
    check(made)


@pytest.mark.parametrize("chunk", [16, 32])
@pytest.mark.parametrize("op", [pytest.param(op, marks=() if op == "kda" else pytest.mark.compile) for op in CELLS])
def test_short_chunks_have_whole_descriptors(op, chunk):
    """KDA's far gradients in chunks of 32 were built from registers that nobody had written, and wrong on the card."""
    made = build("sm_90", op, sizes=((128, 128),), chunk_size=chunk)
    assert {b.error for b in made} == {None}
    check_descriptors(made)


@pytest.mark.compile
def test_every_load_and_way_of_calling_builds_for_hopper():
    made = built("sm_90", product(CELLS, ("bfloat16",), ((128, 128),), (1,), (False, True)), tuple(WAYS), LOADS)
    check(made)
    check_descriptors(made)


@pytest.mark.compile
@pytest.mark.parametrize("card", cards())
def test_what_was_measured_on_a_card_builds_there_in_every_way_of_calling(card):
    """Where it is not what the rule says: a measurement runs calls with states and without, not all."""
    rows = [(dict(zip(KEY, key)), found) for (key, ruled), found in load(card).items() if found.config != ruled]
    kinds = {(found.case.split()[0], key["dtype"], (key["K"], key["V"]), (4096, key["heads"], 1)) for key, found in rows}
    ways = ("training", "training with states", "prefill", "continuation")
    for op, dtype, size, load_of in sorted(kinds):
        made = build("sm_90", op, dtypes=(dtype,), sizes=(size,), loads=(load_of,), groups=(1, 2), ways=ways, card=card)
        check(made)
        check_descriptors(made)


@pytest.mark.parametrize(("together", "least", "most"), [(1, 3, 3), (2, 9, 14)])
def test_a_cover_has_every_choice_or_pair_of_them(together, least, most):
    def launch(**switches):
        data = dict(constant_keys=[*switches], constant_vals=[*switches.values()], signature={"x": "*bf16", "K": "constexpr"})
        return Launch("a", "a.kernel", json.dumps({**data, "options": dict(num_warps=4, num_stages=1)}))

    every = [launch(K=K, V=V, PACKED=packed, GATE=gate) for K, V, packed, gate in product((1, 2, 3), (1, 2, 3), (0, 1), "abc")]
    some = cover(every, together)
    assert set().union(*(sets(x, together) for x in some)) == set().union(*(sets(x, together) for x in every))
    assert least <= len(some) <= most and set(some) < set(every)
    other = Launch("a", "a.other", every[0].data)
    assert set(cover([*every, other], together)) == {*some, other}  # of each kernel


def test_the_table_of_spills_names_what_there_is():
    for (archs, _, _), (n, why) in SPILLS.items():
        assert set(archs) <= set(TARGETS) and n > 0 and why
