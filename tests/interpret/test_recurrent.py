"""The recurrent kernel against the torch recurrence, in Triton's interpreter: every gate and rule, every place a state can be in."""

import pytest
import torch
import torch.nn.functional as F

from chunkwise import decode as step
from chunkwise.engine import decode, plan_recurrent_triton, recurrent, stages_triton_recurrent
from chunkwise.engine.config import Config
from chunkwise.engine.dispatch import choose, run
from chunkwise.engine.problem import Problem, problem
from chunkwise.engine.prologue import activate_gate
from chunkwise.engine.raw import NOTHING, Raw, handed
from chunkwise.engine.stages_triton_recurrent import States
from chunkwise.engine.stages_triton_recurrent import recurrent as launch
from chunkwise.nn.norm import l2norm
from chunkwise.spec import EXTRA_SIZES, Gate, Op, Rule, Streams, all_ops

B, T, H, HV, K, V = 2, 5, 2, 6, 5, 18
CELLS = [(g, r, "") for g in Gate for r in Rule] + [
    (Gate.KEY, Rule.ADD, "bonus"), (Gate.KEY, Rule.DELTA, "erase key"), (Gate.SCALAR, Rule.DELTA, "erase key before it forgets"),
    (Gate.VALUE, Rule.DELTA, "erase key before it forgets"),
]  # fmt: skip
cells = pytest.mark.parametrize("gate, rule, reader", CELLS, ids=[f"{g} {r} {x}".strip() for g, r, x in CELLS])


def streams(gate: Gate, rule: Rule, reader: str = "", dtype: torch.dtype = torch.float32, rows=(B, T), strong: float = 1.0, K=K) -> Streams:
    """Unit keys, gates of about -0.8, write strengths in (0, 1); q, k and v are parts of one projection, padded with NaN."""
    r = torch.Generator().manual_seed(0)
    rand = lambda *s: torch.randn(*rows, *s, generator=r)
    unit = lambda heads: F.normalize(rand(heads, K), dim=-1)
    wide = torch.full((*rows, 2 * H * K + HV * V + 3), float("nan"))
    parts = [wide[..., a : a + h * d].unflatten(-1, (h, d)) for a, h, d in ((0, H, K), (H * K, H, K), (2 * H * K, HV, V))]
    for part, t in zip(parts, (unit(H), unit(H), rand(HV, V))):
        part.copy_(t)
    shapes = {Gate.SCALAR: (HV,), Gate.KEY: (HV, K), Gate.VALUE: (HV, V)}
    g = None if gate is Gate.NONE else F.logsigmoid(torch.randn(HV, generator=r) if gate is Gate.HEAD else rand(*shapes[gate])) * strong
    q, k, v = wide.to(dtype)[..., : 2 * H * K + HV * V].split((H * K, H * K, HV * V), -1)
    x = Streams(q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), g)
    if rule is Rule.DELTA:
        x = x._replace(beta=torch.rand(*rows, HV, generator=r).to(dtype))
    if rule is Rule.DPLR:
        a = unit(HV)
        x = x._replace(a=a.to(dtype), b=(-0.7 * a[:, :, :H]).to(dtype))
    own = {"bonus": ("u", torch.rand(HV, K, generator=r)), "erase key": ("e", unit(HV)), "erase key before it forgets": ("a", unit(H))}
    return x if not reader else x._replace(**{own[reader][0]: own[reader][1].to(torch.float32 if reader == "bonus" else dtype)})


def posed(x: Streams, gate: Gate, rule: Rule, cu=None) -> Problem:
    return problem(x, cu, cu, gate=gate, rule=rule, chunk=16, scale=K**-0.5, precision="ieee")


def double(x: Streams) -> Streams:
    return Streams(*(None if t is None else t.double() for t in x))


def check(got: torch.Tensor, same: torch.Tensor, true: torch.Tensor) -> None:
    """No worse than twice the torch recurrence in the same dtype, and a rounding."""
    error = lambda t: (t.double() - true).norm()
    assert got.shape == true.shape and got.isfinite().all()
    assert error(got) <= 2 * (error(same) + torch.finfo(got.dtype).eps * true.norm())


def check_form(x: Streams, gate: Gate, rule: Rule, S0=None, cu=None) -> None:
    p, p64, x64 = posed(x, gate, rule, cu), posed(double(x), gate, rule, cu), double(x)
    true = recurrent.forward(p64, x64, None if S0 is None else S0.double(), final=True, save=False)
    same = recurrent.forward(p, x, S0, final=True, save=False)
    got = plan_recurrent_triton.forward(p, x, S0, final=True, save=False)
    for mine, torchs, right in zip(got[:2], same, true):
        check(mine, torchs, right)


def states(n: int, v_first: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    S = torch.randn(n, HV, *((V, K) if v_first else (K, V)), generator=torch.Generator().manual_seed(1))
    return S.to(dtype)


@cells
def test_every_cell_is_the_torch_recurrence(gate, rule, reader):
    check_form(streams(gate, rule, reader), gate, rule, states(B))


@pytest.mark.parametrize("gate", list(Gate))
def test_a_token_of_several_rows_forgets_once(gate):
    R, S0 = 2, states(B)
    x = streams(gate, Rule.DELTA, rows=(B, T * R))
    first, last = torch.arange(0, T * R, R), torch.arange(R - 1, T * R, R)
    g, each = x.g, x.g
    if gate is Gate.HEAD:
        each = x.g.expand(B, T * R, HV).clone()
    if gate is not Gate.NONE:
        each = each.clone()
        each[:, torch.arange(T * R) % R > 0] = 0
        g = x.g if gate is Gate.HEAD else x.g[:, first].contiguous()
    apart = x._replace(g=each)  # every row a token
    own = Gate.SCALAR if gate is Gate.HEAD else gate
    true, S = recurrent.forward(posed(double(apart), own, Rule.DELTA), double(apart), S0.double(), final=True, save=False)[:2]
    same = recurrent.forward(posed(apart, own, Rule.DELTA), apart, S0, final=True, save=False)
    x, ST = x._replace(q=x.q[:, last], g=g), torch.empty_like(S0)
    o = launch(posed(x, gate, Rule.DELTA), x, States(S0, ST))
    check(o, same[0][:, last], true[:, last])
    check(ST, same[1], S)


def test_how_many_values_a_program_has_changes_no_bit(monkeypatch):
    x, pool = streams(Gate.KEY, Rule.DELTA), states(B)
    other = pool.clone()
    o = pooled(x, Gate.KEY, Rule.DELTA, pool)
    monkeypatch.setattr(stages_triton_recurrent, "config", lambda *_: Config(16, 16, 1, 1))  # 18 values: the second block is nearly empty
    assert torch.equal(o, pooled(x, Gate.KEY, Rule.DELTA, other)) and torch.equal(pool, other)


@pytest.mark.parametrize("V", [18, 20])
def test_whether_the_last_state_is_wanted_changes_no_block(monkeypatch, V):
    """Nor how many warps there are, whose sums meet in another order."""
    asked, rule = [], stages_triton_recurrent.config
    monkeypatch.setattr(stages_triton_recurrent, "config", lambda *args: asked.append(rule(*args)) or asked[-1])
    x = streams(Gate.SCALAR, Rule.DELTA)
    x = x._replace(v=x.v.repeat(1, 1, 1, 2)[..., :V])
    p = posed(x, Gate.SCALAR, Rule.DELTA)
    o = [plan_recurrent_triton.forward(p, x, None, final=final, save=False)[0] for final in (False, True)]
    assert asked[0] == asked[1] and torch.equal(*o)


def test_keys_lie_in_blocks(monkeypatch):
    """Of 16 where there are 40: in the last one half are none."""
    monkeypatch.setattr(stages_triton_recurrent, "config", lambda *_: Config(16, 32, 1, 1))
    x = streams(Gate.KEY, Rule.DELTA, K=40)
    check_form(x, Gate.KEY, Rule.DELTA, torch.randn(B, HV, 40, V, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_are_read_and_written(dtype):
    check_form(streams(Gate.KEY, Rule.DELTA, dtype=dtype), Gate.KEY, Rule.DELTA)


@pytest.mark.parametrize("strong", [0.0, 60.0, 1e4, float("inf")])
@pytest.mark.parametrize("gate", [Gate.SCALAR, Gate.KEY], ids=str)
def test_gates_of_any_size_are_exact(gate, strong):
    x = streams(gate, Rule.DELTA)
    check_form(x._replace(g=torch.full_like(x.g, -strong)), gate, Rule.DELTA, states(B))


def test_packed_sequences_are_separate_ones():
    cu = torch.tensor([0, 1, 1, 7, 10], dtype=torch.int32)
    check_form(streams(Gate.SCALAR, Rule.DELTA, rows=(1, 10)), Gate.SCALAR, Rule.DELTA, states(4), cu)


def pooled(x: Streams, gate: Gate, rule: Rule, pool: torch.Tensor, raw: Raw = NOTHING, cu=None, **where) -> torch.Tensor:
    """The kernel in a pool."""
    return launch(posed(x, gate, rule, cu), x, States(pool, pool, **where), raw)


def alone(x: Streams, gate: Gate, rule: Rule, S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel from states [N, HV, K, V], out of place."""
    o, ST, _ = plan_recurrent_triton.forward(posed(x, gate, rule), x, S, final=True, save=False)
    return o, ST


def at(x: Streams, t: slice, per_token=("q", "k", "v", "g", "beta", "a", "b", "e")) -> Streams:
    return x._replace(**{n: getattr(x, n)[:, t] for n in per_token if getattr(x, n) is not None})


@pytest.mark.parametrize("v_first", [False, True], ids=["keys first", "values first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pool_is_updated_in_its_slots_and_nowhere_else(v_first, dtype):
    x = streams(Gate.KEY, Rule.DELTA)
    whole = torch.full((5, HV + 1, K * V), float("nan"), dtype=dtype)  # slots lie further apart than they are long
    pool = whole[:, :HV].unflatten(-1, (V, K) if v_first else (K, V))
    pool[3] = states(5, v_first, dtype)[3]
    o = pooled(x, Gate.KEY, Rule.DELTA, pool, v_first=v_first, slots=torch.tensor([3, -1], dtype=torch.int32))
    S = states(5, v_first, dtype)[3:4].float()
    want, ST = alone(Streams(*(None if t is None else t[:1] for t in x)), Gate.KEY, Rule.DELTA, S.mT.contiguous() if v_first else S)
    assert torch.equal(o[:1], want)
    assert (o[1] == 0).all()
    rounded = (ST[0].mT if v_first else ST[0]).to(dtype)  # Triton's interpreter cuts bfloat16's digits off
    torch.testing.assert_close(pool[3], rounded, rtol=0.0 if dtype == torch.float32 else torch.finfo(dtype).eps, atol=0.0)
    assert whole[[0, 1, 2, 4]].isnan().all() and whole[3, HV].isnan().all()


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("gate", [Gate.SCALAR, Gate.KEY], ids=str)
def test_raw_streams_are_prepared_on_the_way(gate, bound):
    x = streams(gate, Rule.DELTA, strong=3.0, rows=(B, 1))
    signs = torch.tensor([1.0, -1.0, 9.0, -9.0, 0.1, 0.0]).view(HV, *[1] * (x.g.ndim - 3))
    x = x._replace(q=3 * x.q, k=x.k - 0.2, beta=x.beta - 0.5, g=x.g * signs)
    A_log, bias = torch.linspace(-2, 2, HV), torch.linspace(-3, 1, HV * (K if gate is Gate.KEY else 1))
    S, g = states(B), activate_gate(x.g, A_log, bias, bound)
    ready = x._replace(q=l2norm(x.q), k=l2norm(x.k), g=g, beta=2 * torch.sigmoid(x.beta))
    p64 = posed(double(x), gate, Rule.DELTA)
    true = recurrent.forward(p64, double(ready), S.double(), final=True, save=False)
    same = recurrent.forward(posed(x, gate, Rule.DELTA), ready, S, final=True, save=False)
    pool = S.clone()
    raw = Raw(True, False, A_log, bias, bound, True, 2.0)
    check(pooled(x, gate, Rule.DELTA, pool, raw), same[0], true[0])
    check(pool, same[1], true[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rejected_drafts_leave_no_trace(dtype):
    """The states after each token are kept; going on from that after the last accepted one is never having seen the others."""
    gate, rule = Gate.SCALAR, Rule.DELTA
    x, pool = streams(gate, rule), torch.full((12, HV, K, V), float("nan"), dtype=dtype)
    table = torch.arange(10, dtype=torch.int32).view(B, T) + 1
    pool[table[:, 0].long()] = states(B, dtype=dtype)
    plain = pool[table[:, 0].long()].clone()
    o = pooled(x, gate, rule, pool, slots=table, into=table, accepted=torch.tensor([1, 1]))
    want = [pooled(at(x, slice(t, t + 1)), gate, rule, plain) for t in range(2)]
    assert torch.equal(o[:, :2], torch.cat(want, 1))
    more = at(x, slice(3, 4))
    after = pooled(more, gate, rule, pool, slots=table, into=table, accepted=torch.tensor([2, 0]))
    assert torch.equal(after[:1], pooled(more, gate, rule, plain)[:1]) and (after[1] == 0).all()


def test_a_tree_of_drafts_follows_each_parent():
    gate, rule = Gate.KEY, Rule.DELTA
    x, pool = streams(gate, rule), torch.full((11, HV, K, V), float("nan"))
    pool[:2] = states(B)
    parents = torch.tensor([[-1, 0, 0, 2, 1], [-1, 0, 1, -1, 3]], dtype=torch.int32)
    into = torch.arange(10).view(B, T) + 1
    into[0] = torch.tensor([0, 2, 3, 4, 5])  # a sequence's own slot may be among them
    o = pooled(x, gate, rule, pool, slots=torch.tensor([0, 1]), into=into, parents=parents)
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    for t in range(T):
        S = torch.stack([states(B)[n] if parents[n, t] < 0 else made[parents[n, t]][1][n] for n in range(B)])
        made.append(alone(at(x, slice(t, t + 1)), gate, rule, S))
        assert torch.equal(o[:, t], made[-1][0][:, 0])
        assert all(torch.equal(pool[into[n, t]], made[-1][1][n]) for n in range(B) if into[n, t] not in into[n, t + 1 :])


def left_raw(op: Op, x: dict[str, torch.Tensor]) -> dict[str, object]:
    """Options that leave all they can to the kernel."""
    o: dict[str, object] = {n: True for n in op.defaults if n.startswith("use_") or n == "allow_neg_eigval"}
    if "use_gate_in_kernel" in o:
        o |= {"A_log": torch.linspace(-1, 1, HV), "dt_bias": torch.linspace(-1, 1, x["g"].shape[2:].numel()), "lower_bound": None}
    return o


RAW = [op for op in all_ops().values() if op.lower is not None and op.passes is None and "use_qk_l2norm_in_kernel" in op.defaults]


@pytest.mark.parametrize("op", RAW, ids=lambda op: op.name)
def test_the_form_and_the_step_leave_the_prologue_to_the_kernel(op: Op, monkeypatch):
    """As on a GPU: both give what the torch form gives, the step in place."""
    sizes = dict(B=B, T=2, H=H, HV=HV, K=K, V=V)
    x, S = op.draw(sizes), op.draw_state(sizes, B)
    o = left_raw(op, x)
    want = op(x, initial_state=S, output_final_state=True, form="recurrent", **o)
    true = op({n: t.double() for n, t in x.items()}, initial_state=S.double(), output_final_state=True, form="recurrent", **o)
    options = {**op.defaults, **o, "initial_state": S, "output_final_state": True, "form": "recurrent"}
    got = run(op, x, op.check(x), options, lambda *a, **k: choose(*a, **{**k, "device": "cuda"}))
    on_device(monkeypatch)
    for mine, torchs, right in zip((*got, step(op, x, S, **o), S), want * 2, true * 2):
        check(mine, torchs, right)


COMPUTED = pytest.mark.parametrize("op", [op for op in all_ops().values() if op.raw is not None], ids=lambda op: op.name)


def on_device(monkeypatch) -> None:
    monkeypatch.setattr(decode, "_no_kernel", lambda *_: None)


@COMPUTED
def test_what_a_member_computes_is_the_kernel_s(op: Op, monkeypatch):
    """A token may be several rows, a state two memories or a column more, something be added to what was read: not to an empty lane."""
    on_device(monkeypatch)
    sizes = dict(B=B, T=2, H=H, HV=HV, K=K, V=V)
    x, S = op.draw({**EXTRA_SIZES, **sizes}), op.draw_state(sizes, B)
    o = left_raw(op, x)
    want = op(x, initial_state=S, output_final_state=True, form="recurrent", **o)
    wide = {n: t.double() for n, t in x.items()}
    true = op(wide, initial_state=S.double(), output_final_state=True, form="recurrent", **o)
    pool, index = torch.full((B + 2, *S.shape[1:]), 7.0), torch.arange(B).flip(0) + 1
    pool[index] = S
    index[1] = -1
    out = step(op, x, pool, index, **o)
    assert not out[1].any() and (pool[[0, -1]] == 7).all() and torch.equal(pool[B - 1], S[1])
    live = [n for n in range(B) if n != 1]
    for mine, torchs, right in zip((out[live], pool[index[live]]), want, true):
        check(mine, torchs[live], right[live])


@pytest.mark.parametrize("op", all_ops().values(), ids=lambda op: op.name)
def test_whatever_an_op_may_be_left_to_do_is_the_kernel_s(op: Op):
    x = op.draw({**EXTRA_SIZES, **dict(B=B, T=2, H=H, HV=HV, K=K, V=V)})
    assert handed(op, {n: x.get(n) for n in op.args}, {**op.defaults, **left_raw(op, x)}) is not None


def test_keys_past_the_last_are_no_numbers_either_where_nothing_is_added_to_what_keys_have_seen(monkeypatch):
    op, sizes = all_ops()["precond_gated_delta_rule"], dict(B=B, T=1, H=1, HV=2, K=5, V=6)
    x, S = op.draw({**EXTRA_SIZES, **sizes}), op.draw_state(sizes, B)
    want = step(op, x, S.clone(), eps=0.0)
    on_device(monkeypatch)
    true = step(op, {n: t.double() for n, t in x.items()}, S.double(), eps=0.0, backend="torch")
    check(step(op, x, S, eps=0.0), want, true)


@COMPUTED
def test_its_drafts_are_steps_of_their_own(op: Op, monkeypatch):
    """A tree whose states are kept and a line whose states are not, values first, in half precision; bit by bit."""
    on_device(monkeypatch)
    sizes = dict(B=B, T=3, H=1, HV=2, K=5, V=6)
    x, S = op.draw({**EXTRA_SIZES, **sizes}), op.draw_state(sizes, B).mT.contiguous().bfloat16()
    parents, into = torch.tensor([[-1, 0, 0], [-1, 0, 1]]), torch.tensor([[2, 3, 4], [-1, -1, 5]])
    pool = torch.cat((S, torch.full((4, *S.shape[1:]), float("nan")).bfloat16()))
    o = step(op, x, pool, torch.arange(B), into=into, parents=parents, state_v_first=True)
    assert torch.equal(pool[:B], S)
    for n in range(B):
        made: list[torch.Tensor] = []
        for t in range(3):
            state = (S[n : n + 1] if parents[n, t] < 0 else made[parents[n, t]]).clone()
            token = {name: z[n : n + 1, t : t + 1] if op.args[name].per_token else z for name, z in x.items()}
            assert torch.equal(step(op, token, state, state_v_first=True), o[n : n + 1, t : t + 1])
            assert into[n, t] < 0 or torch.equal(pool[into[n, t]], state[0])
            made.append(state)


@COMPUTED
def test_branches_of_its_first_state_may_overwrite_it(op: Op, monkeypatch):
    """The slot a sequence goes on from is among those its tree of tokens fills, as it is where `into` is not given."""
    on_device(monkeypatch)
    sizes = dict(B=B, T=4, H=1, HV=2, K=5, V=6)
    x, S = op.draw({**EXTRA_SIZES, **sizes}), op.draw_state(sizes, B)
    where = dict(accepted=torch.tensor([1, 3]), parents=torch.tensor([[-1, -1, 0, 1], [-1, 0, -1, -1]]))
    pool, index = torch.full((8, *S.shape[1:]), float("nan")), torch.arange(8).view(B, 4)
    pool[[0, 6]] = S
    apart = torch.cat((pool, torch.full_like(pool, float("nan"))))
    o = step(op, x, pool, index, **where)
    assert torch.equal(o, step(op, x, apart, index, into=index + 8, **where)) and torch.equal(pool, apart[8:])


def test_states_that_are_not_kept_have_room_whatever_a_single_head_s_stride(monkeypatch):
    """Heads first in memory, and one of them: its stride says nothing about how long a state is."""
    on_device(monkeypatch)
    op, met = all_ops()["gsa"], []
    sizes = dict(B=B, T=2, H=1, HV=1, K=5, V=6)
    x, S = op.draw({**EXTRA_SIZES, **sizes}), op.draw_state(sizes, B)
    pool = S.transpose(0, 1).repeat(2, 1, 1, 1)[:1].transpose(0, 1)
    assert pool.stride(1) == S.numel()

    def spy(kernel, grid, *args, **switches):
        met.append((args[6].numel(), grid * switches["HEAD"]))  # of what is spare, and of what programs take for theirs

    monkeypatch.setattr(stages_triton_recurrent, "launch", spy)
    step(op, x, pool, torch.arange(B), into=torch.full((B, 2), -1))
    assert met == [(S.numel(), S.numel())]
