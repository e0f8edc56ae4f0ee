"""A decode step against the member's recurrent form: a step is the form from the slot's state, and nothing else changes."""

import doctest
from itertools import accumulate
from pathlib import Path

import oracle
import pytest
import torch
from oracle import OPS, Case, check, ids, make

from chunkwise import decode, prefill
from chunkwise.engine import decode as steps
from chunkwise.engine import recurrent
from chunkwise.engine.raw import NOTHING
from chunkwise.reference import reference
from chunkwise.spec import Op, Rule, Streams

every = pytest.mark.parametrize("op", OPS, ids=ids)
# (K, V): small for all; where a sum lies behind the values those that have blocks of their own too
COLUMNS = [op for op in OPS if op.state.endswith(" V+1") and op.rule is Rule.ADD]
wide = pytest.mark.parametrize("op, D", [*((op, (5, 6)) for op in OPS), *((op, (128, 128)) for op in COLUMNS)], ids=ids)
N, SLOTS = 3, 6
LANES = torch.tensor([4, -1, 1])  # slots of the three sequences; the second is a padded lane
BASIC = next(op for op in OPS if op.rule is Rule.DELTA and op.lower is Streams)
SEVERAL = next(op for op in OPS if op.lower is None)  # passes of the engine


def drawn(op: Op, T: int = 1, dtype: torch.dtype = torch.float32, K: int = 5, V: int = 6) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs of three sequences, the second of NaN; a pool of states, of which slots 4 and 1 are states and the others NaN."""
    call = make(op, Case(B=N, T=T, H=2, n=2, K=K, V=V), dtype)
    x = {n: t.detach() for n, t in call.x.items()}
    for n, t in x.items():
        if op.args[n].per_token:
            t[1] = float("nan")
    pool = torch.full((SLOTS, *call.S0.shape[1:]), float("nan"), device=oracle.DEVICE)
    pool[4], pool[1] = call.S0.detach()[0], call.S0.detach()[2]
    return x, pool


def lanes(op: Op, x: dict[str, torch.Tensor], n: int, t: slice = slice(None)) -> dict[str, torch.Tensor]:
    return {name: z[n : n + 1, t] if op.args[name].per_token else z for name, z in x.items()}


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within a few roundings: the same sums in another order."""
    assert got.shape == want.shape and (got.double() - want.double()).norm() <= 16 * torch.finfo(got.dtype).eps * want.double().norm()


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal on a CPU, where both are the same operations; on a GPU the step prepares its streams in float32, all in one kernel."""
    if got.device.type == "cpu":
        assert torch.equal(got, want)
    near(got, want)


@every
@pytest.mark.parametrize("v_first", [False, True], ids=["keys first", "values first"])
def test_a_step_is_the_recurrent_form_in_a_slot(op, v_first):
    x, pool = drawn(op, T=2)
    pool = pool.mT.contiguous() if v_first else pool
    before, index = pool.clone(), LANES.to(oracle.DEVICE)
    o = decode(op, x, pool, index, state_v_first=v_first)
    for n, slot in ((0, 4), (2, 1)):
        want, S = op(
            lanes(op, x, n), initial_state=before[slot : slot + 1], output_final_state=True, form="recurrent", state_v_first=v_first
        )
        same(o[n : n + 1], want)
        same(pool[slot], S[0])
    assert (o[1] == 0).all()
    assert pool[[0, 2, 3, 5]].isnan().all()


@wide
def test_rejected_drafts_leave_no_trace(op, D):
    """Four tokens at once, two accepted, then another: the bits of one by one. States in half precision round alike."""
    x, pool = drawn(op, 5, torch.float32, *D)
    pool = pool.to(torch.bfloat16)
    S, index = pool.clone(), LANES.to(oracle.DEVICE)
    table = torch.arange(N * 4, dtype=torch.int32, device=oracle.DEVICE).view(N, 4) + SLOTS
    table[1] = -1
    pool = torch.cat((pool, torch.full_like(pool[:1], float("nan")).expand(N * 4, -1, -1, -1)))
    pool[table[0, 0]], pool[table[2, 0]] = S[4], S[1]
    one = torch.ones(N, dtype=torch.int64, device=oracle.DEVICE)
    drafts = {n: z[:, :4] if op.args[n].per_token else z for n, z in x.items()}
    o = decode(op, drafts, pool, table, accepted=one)
    last = {n: z[:, 4:] if op.args[n].per_token else z for n, z in x.items()}
    after = decode(op, last, pool, table, accepted=2 * one)
    want = [decode(op, {n: z[:, t : t + 1] if op.args[n].per_token else z for n, z in x.items()}, S, index) for t in (0, 1, 4)]
    assert torch.equal(torch.cat((o[:, :2], after), 1), torch.cat(want, 1))


@wide
def test_a_tree_of_drafts_follows_each_parent(op, D):
    x, pool = drawn(op, 4, torch.float32, *D)
    parents = torch.tensor([[-1, 0, 0, 1], [-1, -1, -1, -1], [-1, -1, 1, 0]], device=oracle.DEVICE)
    into = torch.arange(N * 4, device=oracle.DEVICE).view(N, 4) + SLOTS
    pool = torch.cat((pool, torch.full_like(pool[:1], float("nan")).expand(N * 4, -1, -1, -1)))
    before = pool.clone()
    o = decode(op, x, pool, LANES.to(oracle.DEVICE), into=into, parents=parents)
    for n, slot in ((0, 4), (2, 1)):
        made = [before[slot : slot + 1]]
        for t in range(4):
            S = made[int(parents[n, t]) + 1].clone()
            assert torch.equal(decode(op, lanes(op, x, n, slice(t, t + 1)), S), o[n : n + 1, t : t + 1])
            assert torch.equal(pool[into[n, t]], S[0])
            made.append(S)
    assert pool[into[1]].isnan().all() and torch.equal(pool[[4, 1]], before[[4, 1]])


@every
def test_packed_sequences_are_separate_ones(op):
    call = make(op, Case(T=6, H=2, n=2, K=5, V=6), torch.float32)
    x = {n: t.detach() for n, t in call.x.items()}
    cu = torch.tensor([0, 1, 1, 4, 6], dtype=torch.int32, device=oracle.DEVICE)
    index = torch.tensor([2, 0, -1, 3], device=oracle.DEVICE)
    S = op.draw_state(call.case.sizes, 5).to(oracle.DEVICE)
    pool, wide = S.clone(), torch.cat((S, torch.full_like(S[:1], float("nan")).expand(12, -1, -1, -1)))
    o = decode(op, x, pool, index, cu_seqlens=cu)
    into = torch.arange(12, device=oracle.DEVICE).view(4, 3) + 5
    each = decode(op, x, wide, index, into=into, cu_seqlens=cu)
    near(each, o)
    for n, (a, b) in enumerate(((0, 1), (1, 1), (1, 4), (4, 6))):
        if b > a and index[n] >= 0:
            alone = S[index[n] : index[n] + 1].clone()
            want = decode(op, {m: z[:, a:b] if op.args[m].per_token else z for m, z in x.items()}, alone)
            near(o[:, a:b], want)
            near(pool[index[n]], alone[0])
            near(wide[into[n, b - a - 1]], alone[0])
    near(pool[0], S[0])  # no tokens: the state it was, however often the member takes it apart and puts it together
    assert (o[:, 1:4] == 0).all() and torch.equal(pool[[1, 4]], S[[1, 4]])
    assert wide[into[2]].isnan().all() and wide[into[0, 1:]].isnan().all() and torch.equal(wide[:5], S)


@every
@pytest.mark.parametrize("packed", [False, True])
def test_a_prompt_goes_from_slots_into_slots(op, packed):
    """Of three sequences one is a padded lane, one begins from nothing where junk was, one goes on."""
    x, pool = drawn(op, T=5)
    index, fresh = LANES.to(oracle.DEVICE), torch.tensor([False, False, True], device=oracle.DEVICE)
    pool[1], before = float("nan"), pool.clone()
    cu = None if not packed else torch.arange(0, 5 * N + 1, 5, dtype=torch.int32, device=oracle.DEVICE)
    rows = {n: z.flatten(0, 1)[None] if op.args[n].per_token and packed else z for n, z in x.items()}
    o = prefill(op, rows, pool, index, fresh=fresh, cu_seqlens=cu).view(N, 5, *pool.shape[1:2], -1)
    for n, slot in ((0, 4), (2, 1)):
        want, S = op(lanes(op, x, n), initial_state=None if fresh[n] else before[slot : slot + 1], output_final_state=True)
        near(o[n : n + 1], want)
        near(pool[slot], S[0])
    assert (o[1] == 0).all() and pool[[0, 2, 3, 5]].isnan().all()


@every
def test_snapshots_are_where_a_prefix_ends(op):
    x, pool = drawn(op, T=5)
    x = {n: z[[0, 2]] if op.args[n].per_token else z for n, z in x.items()}
    index, into = LANES[[0, 2]].to(oracle.DEVICE), torch.tensor([[0, 2], [-1, 3]], device=oracle.DEVICE)
    other = pool.clone()
    o = prefill(op, x, pool, index, every=2, into=into)
    near(o, prefill(op, x, other, index))
    near(pool[[4, 1]], other[[4, 1]])
    rest = {n: z[:, 4:] if op.args[n].per_token else z for n, z in x.items()}
    near(decode(op, rest, pool[[2, 3]]), o[:, 4:])
    assert not pool[0].isnan().any() and pool[5].isnan().all()


def raw(op: Op, x: dict[str, torch.Tensor]) -> dict[str, object]:
    """Options that leave everything to the step."""
    o: dict[str, object] = {n: True for n in op.defaults if n.startswith("use_") or n == "allow_neg_eigval"}
    if "use_gate_in_kernel" in o:
        heads = x["g"].shape[2:]
        o |= {"A_log": torch.linspace(-1, 1, heads[0]), "dt_bias": torch.linspace(-1, 1, heads.numel()), "lower_bound": -3.0}
    return {n: v.to(oracle.DEVICE) if isinstance(v, torch.Tensor) else v for n, v in o.items()}


@pytest.mark.parametrize("op", [op for op in OPS if "use_qk_l2norm_in_kernel" in op.defaults], ids=ids)
def test_raw_streams_are_prepared_on_the_way(op):
    x, pool = drawn(op)
    x, S = {n: z[:1] if op.args[n].per_token else z for n, z in x.items()}, pool[4:5].clone()
    call = {n: t.cpu() for n, t in x.items()}
    options = {n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in raw(op, x).items()}
    made = (reference(op, call, dtype=d, initial_state=S.cpu(), **options) for d in (torch.float64, None))
    truth, honest = (dict(zip(("o", "final state"), pair)) for pair in made)
    o, ST = op(x, initial_state=S, output_final_state=True, form="recurrent", **raw(op, x))
    check({"o": o, "final state": ST}, truth, honest)
    o = decode(op, x, S, **raw(op, x))
    check({"o": o, "final state": S}, truth, honest)


@pytest.mark.skipif("oracle.DEVICE.type != 'cpu'", reason="a GPU's kernel takes every state by itself")
@pytest.mark.parametrize("size", [1, 4 * 5 * 6, 3 * 4 * 5 * 6], ids=["a head", "a sequence", "several sequences"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_worked_on_in_blocks(monkeypatch, dtype, size):
    """Neighbours, strangers and padded lanes, sequences of several lengths: always the bits of all at once."""
    monkeypatch.setattr(recurrent, "BLOCK", size)
    lengths, slots = [2, 0, 3, 1, 1, 2, 4], [5, 3, -1, 7, 0, 1, 2]
    call = make(BASIC, Case(T=sum(lengths), H=2, n=2, K=5, V=6), torch.float32)
    x, cu = {n: t.detach() for n, t in call.x.items()}, torch.tensor([0, *accumulate(lengths)])
    pool = BASIC.draw_state(call.case.sizes, 9).to(dtype)
    before, index = pool.clone(), torch.tensor(slots)
    o = decode(BASIC, x, pool, index, cu_seqlens=cu)
    S0 = before[index.clamp(min=0)].float()
    got = BASIC(x, initial_state=S0, output_final_state=True, cu_seqlens=cu, form="recurrent")
    monkeypatch.setattr(recurrent, "BLOCK", 1 << 30)
    want, ST = BASIC(x, initial_state=S0, output_final_state=True, cu_seqlens=cu, form="recurrent")
    assert torch.equal(got[0], want) and torch.equal(got[1], ST)
    want[:, 2:5] = 0
    before[[s for s in slots if s >= 0]] = ST[index >= 0].to(dtype)
    assert torch.equal(o, want) and torch.equal(pool, before)


def test_one_projection_stands_for_q_k_and_v():
    x, pool = drawn(BASIC)
    other, index = pool.clone(), LANES.to(oracle.DEVICE)
    qkv = torch.cat([x[n].flatten(2) for n in "qkv"], 2)
    o = decode(BASIC.name, dict(qkv=qkv, g=x["g"], beta=x["beta"]), pool, index)
    assert torch.equal(o, decode(BASIC, x, other, index)) and torch.equal(pool[[1, 4]], other[[1, 4]])


def test_slots_may_lie_further_apart_than_they_are_long():
    x, pool = drawn(BASIC)
    wide = torch.full((SLOTS, 7, *pool.shape[2:]), float("nan"), device=oracle.DEVICE)
    wide[:, :4] = pool
    assert torch.equal(decode(BASIC, x, wide[:, :4], LANES.to(oracle.DEVICE)), decode(BASIC, x, pool, LANES.to(oracle.DEVICE)))
    assert torch.equal(wide[[1, 4], :4], pool[[1, 4]]) and wide[:, 4:].isnan().all()


@pytest.mark.parametrize("op", [BASIC, SEVERAL], ids=ids)
def test_a_step_compiles_whole(op):
    torch._dynamo.reset()
    step = torch.compile(lambda x, pool, index: decode(op, x, pool, index) * 2, fullgraph=True, backend="aot_eager")
    x, pool = drawn(op)
    other, index = pool.clone(), LANES.to(oracle.DEVICE)
    assert torch.equal(step(x, pool, index), decode(op, x, other, index) * 2) and torch.equal(pool[[1, 4]], other[[1, 4]])


on_gpu = pytest.mark.skipif("oracle.DEVICE.type != 'cuda'", reason="of kernels on a GPU")


@on_gpu
def test_a_slot_past_two_billion_numbers():
    x, pool = drawn(BASIC)
    large = torch.empty((1 << 31) // pool[0].numel() + 9, *pool.shape[1:], dtype=torch.bfloat16, device=oracle.DEVICE)
    small, index = pool.to(torch.bfloat16), LANES.to(oracle.DEVICE)
    high = torch.where(index < 0, -1, index + len(large) - SLOTS)
    large[-SLOTS:] = small
    assert torch.equal(decode(BASIC, x, large, high), decode(BASIC, x, small, index))
    assert torch.equal(large[-2], small[4]) and torch.equal(large[-5], small[1])


@on_gpu
def test_more_sequences_than_a_grid_s_second_axis_has():
    n = 65_600
    call = make(BASIC, Case(T=n, H=1, K=4, V=4), torch.float32)
    x, S = {name: t.detach() for name, t in call.x.items()}, torch.randn(n, 1, 4, 4, device=oracle.DEVICE)
    cu, before = torch.arange(n + 1, dtype=torch.int32, device=oracle.DEVICE), S.clone()
    o = decode(BASIC, x, S, cu_seqlens=cu)
    alone = before[-1:].clone()
    assert torch.equal(o[:, -1:], decode(BASIC, {name: t[:, -1:] for name, t in x.items()}, alone)) and torch.equal(S[-1:], alone)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_many_sequences_there_are_changes_no_bit(dtype):
    """Whether there are enough of them to fill a card or not."""
    call = make(BASIC, Case(B=600, T=1, H=2, K=40, V=136), torch.float32)
    x, S = {n: t.detach() for n, t in call.x.items()}, call.S0.detach().to(dtype)
    few = S[:2].clone()
    o = decode(BASIC, x, S, use_qk_l2norm_in_kernel=True)
    alone = decode(BASIC, {n: t[:2] for n, t in x.items()}, few, use_qk_l2norm_in_kernel=True)
    assert torch.equal(o[:2], alone) and torch.equal(S[:2], few)


@on_gpu
def test_fifty_steps_give_the_same_bits():
    x, pool = drawn(BASIC)
    made = []
    for _ in range(50):
        S = pool.clone()
        made.append((decode(BASIC, x, S, LANES.to(oracle.DEVICE)), S[[4, 1]]))
    assert all(torch.equal(o, made[0][0]) and torch.equal(S, made[0][1]) for o, S in made)


@on_gpu
@every
def test_a_step_can_be_captured(op):
    x, pool = drawn(op)
    index = LANES.to(oracle.DEVICE)
    decode(op, x, pool.clone(), index)
    first = pool.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode(op, x, pool, index)
    pool.copy_(first)
    for lanes in ([4, -1, 1], [1, -1, 4], [-1, -1, 4]):  # a server refills them; what is padded there moves no state
        index.copy_(torch.tensor(lanes))
        graph.replay()
        want = decode(op, x, first, index)
        assert torch.equal(o, want) and torch.equal(pool[[1, 4]], first[[1, 4]]) and pool[[0, 2, 3, 5]].isnan().all()


def test_the_examples_run():
    failed, tried = doctest.testfile(str(Path(__file__).parents[1] / "docs" / "decode.md"), module_relative=False)
    assert tried and not failed


def test_parameters_of_the_gate_leave_the_pool_plain():
    op = next(op for op in OPS if op.name == "gated_delta_rule")
    x = op.draw(dict(B=2, T=5, H=2, HV=2, K=4, V=4))
    pool, A_log = torch.zeros(4, 2, 4, 4), torch.nn.Parameter(torch.zeros(2))
    for step in prefill, decode:
        o = step(op, x, pool, torch.tensor([1, 2]), use_gate_in_kernel=True, A_log=A_log)
        assert not pool.requires_grad and not o.requires_grad


def test_autograd_hears_that_a_pool_has_changed():
    x, pool = drawn(BASIC)
    before = pool._version
    decode(BASIC, x, pool, LANES.to(oracle.DEVICE))
    assert pool._version > before


def test_autograd_hears_what_a_kernel_has_written(monkeypatch):
    recipe = pytest.importorskip("chunkwise.engine.recipe", exc_type=ImportError)
    monkeypatch.setattr(recipe, "replay", lambda what, tensors, hosts: (tensors[0],))
    q, pool = torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 4, 4)
    before = pool._version
    steps.step(q, q, q, *[None] * 6, pool, *[None] * 5, False, "none", "add", 1.0, *NOTHING)
    assert pool._version > before
