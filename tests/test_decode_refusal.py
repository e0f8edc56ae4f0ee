"""A step or a prompt that does not fit its pool is refused by name, before anything moves."""

import inspect
import re

import pytest
import torch
from oracle import OPS
from test_decode import BASIC, LANES, N, drawn

from chunkwise import decode, prefill

WRONG = {
    "no such member": (dict(op="gru"), "op must be a member, one of abc"),
    "a keyword of the form": (dict(initial_state=None), "unexpected keyword 'initial_state'"),
    "an unknown input": (dict(inputs=dict(z=torch.zeros(1))), "unexpected input 'z'"),
    "pool of whole numbers": (dict(pool=torch.zeros(6, 4, 5, 6, dtype=torch.int32)), "pool must be a floating tensor, got torch.int32"),
    "the other layout": (dict(state_v_first=True), r"pool must be [slots, HV, V, K] = [slots, 4, 6, 5], got [6, 4, 5, 6]"),
    "a turned pool": (dict(pool=torch.zeros(6, 4, 6, 5).mT), "pool must be dense inside a slot, got strides [120, 30, 1, 5]"),
    "no index": (dict(index=None), "pool must have a slot for each of 3 sequences without an index, got 6"),
    "index of floats": (dict(index=torch.zeros(3)), "index must be an int32 or int64 tensor, got torch.float32"),
    "index too short": (dict(index=torch.zeros(2, dtype=torch.int64)), "index must be [N] = [3], got [2]"),
    "index too high": (dict(index=torch.tensor([0, 6, 1])), "index must name slots below 6, got 6"),
    "a slot twice": (dict(index=torch.tensor([4, 1, 4])), "index must name every slot once, got 4 twice"),
    "a slot for two drafts": (dict(into=torch.tensor([[0], [-1], [0]])), "into must name every slot once, got 0 twice"),
    "slots that share memory": (dict(pool=torch.zeros(1, 4, 5, 6).expand(6, 4, 5, 6)), "pool's slots must not share memory"),
    "accepted of one column": (dict(accepted=torch.ones(3, dtype=torch.int64)), "index must be [N, columns] with N=3, got [3]"),
    "parents without into": (dict(parents=torch.zeros(3, 1, dtype=torch.int64)), "parents needs into"),
    "a parent of its own": (
        dict(into=torch.zeros(3, 1, dtype=torch.int64), parents=torch.zeros(3, 1, dtype=torch.int64)), "parents must name earlier tokens"
    ),
    "into too narrow": (dict(into=torch.zeros(3, 0, dtype=torch.int64)), "into must have a column for each of T=1 tokens, got 0"),
    "gate without its parameters": (dict(use_gate_in_kernel=True), "A_log must be [HV] with HV=4, got None"),
    "triton on a CPU": (dict(backend="triton"), "backend='triton' cannot serve this call: the tensors are on cpu"),
    "an unknown backend": (dict(backend="jax"), "backend must be 'auto', 'torch' or 'triton', got 'jax'"),
    "float64 states": (dict(pool=torch.zeros(6, 4, 5, 6).double()), "pool must be float64 where q is, and not elsewhere"),
    "accepted alone": (dict(accepted=torch.ones(3, dtype=torch.int64), index=None, pool=torch.zeros(3, 4, 5, 6)), "accepted needs index"),
    "accepted too many": (
        dict(accepted=torch.full((3,), 3), index=torch.zeros(3, 2, dtype=torch.int64)), "accepted must be at most index's 2 columns, got 3"
    ),
    "parents of another width": (
        dict(into=torch.zeros(3, 2).long(), parents=torch.zeros(3, 1).long()), "parents must have into's shape [3, 2], got [3, 1]"
    ),
    "qkv twice": (dict(inputs=dict(qkv=torch.zeros(3, 1, 48), q=torch.zeros(3, 1, 2, 5))), "give qkv, or q, k and v, not both"),
    "qkv without a pool": (dict(inputs=dict(qkv=torch.zeros(3, 1, 48)), pool=None), "qkv needs a pool [slots, HV, K, V], got []"),
    "qkv of no size": (dict(inputs=dict(qkv=torch.zeros(3, 1, 30))), "qkv must be [B, T, 2 H K + HV V] with K=5, HV=4, V=6 (from pool)"),
}  # fmt: skip


@pytest.mark.parametrize("changed, says", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_by_name(changed, says):
    x, pool = drawn(BASIC)
    call = dict(op=BASIC, inputs=x, pool=pool, index=LANES)
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        decode(**{**call, **changed})


SETTINGS = {
    "no logarithm": ("precond_gated_delta_rule", dict(x=0.0), "precond_gated_delta_rule: x must be above 0, got 0.0"),
    "no root": ("precond_kda", dict(eps=-1.0), "precond_kda: eps must be at least 0, got -1.0"),
    "a word": ("precond_kda", dict(x="2"), "precond_kda: x must be a number, got '2'"),
    "half a layer": ("lightning_attn", dict(layer_idx=torch.tensor(1.5)), "layer_idx must be a whole number, got tensor(1.5"),
    "a scale in words": ("gla", dict(scale="half"), "gla: scale must be a number, got 'half'"),
    "an order in words": ("gla", dict(state_v_first="no"), "gla: state_v_first must be True or False, got 'no'"),
    "no such layer": ("lightning_attn", dict(layer_idx=12), "lightning_attn: layer_idx must be in 0 .. num_layers - 1 = 11, got 12"),
}


@pytest.mark.parametrize("name, options, says", SETTINGS.values(), ids=SETTINGS)
def test_settings_are_refused_in_calls_steps_and_prompts(name, options, says):
    op = next(op for op in OPS if op.name == name)
    x, pool = drawn(op)
    for call in (lambda: op(x, **options), lambda: decode(op, x, pool, LANES, **options), lambda: prefill(op, x, pool, LANES, **options)):
        with pytest.raises((TypeError, ValueError), match=re.escape(says)):
            call()


PROMPT = {
    "a state": (dict(initial_state=None), "unexpected keyword 'initial_state': states come from and go to the pool"),
    "fresh of numbers": (dict(fresh=torch.zeros(3)), "fresh must be a bool tensor, got torch.float32"),
    "fresh for others": (dict(fresh=torch.ones(2, dtype=torch.bool)), "fresh must be [N] = [3], got [2]"),
    "snapshots of none": (dict(every=0, into=LANES[:, None]), "every must be at least 1, got 0"),
    "snapshots nowhere": (dict(every=1), "every and into go together, got every=1 and no into"),
    "snapshots too many": (dict(every=1, into=LANES.expand(2, 3).mT), "into must be [N, T // every] = [3, 1] on cpu, got [3, 2] on cpu"),
    "snapshots beyond the pool": (dict(every=1, into=LANES[:, None] + 2), "into must name slots below 6, got 6"),
}


@pytest.mark.parametrize("changed, says", PROMPT.values(), ids=PROMPT)
def test_a_prompt_that_does_not_fit_is_refused_by_name(changed, says):
    x, pool = drawn(BASIC)
    with pytest.raises((TypeError, ValueError), match=re.escape(f"prefill {BASIC.name}: {says}")):
        prefill(**{**dict(op=BASIC, inputs=x, pool=pool, index=LANES), **changed})


@pytest.mark.parametrize("call", [decode, prefill])
def test_a_tensor_on_another_device_is_refused_by_name(call):
    op = next(op for op in OPS if op.name == "kda")
    x, pool = op.draw(dict(B=2, T=2, H=2, HV=2, K=4, V=4)), torch.zeros(8, 2, 4, 4)
    table, row = torch.tensor([[0, 1], [2, 3]]), {n: t.flatten(0, 1)[None] for n, t in x.items()}
    raw = dict(use_gate_in_kernel=True, A_log=torch.zeros(2), dt_bias=torch.zeros(8))
    given = dict(pool={}, index=dict(index=table[:, 0]), into=dict(into=table, index=table[:, 0]), A_log=raw, dt_bias=raw)
    given["cu_seqlens"] = dict(inputs=row, index=table[:, 0], cu_seqlens=torch.tensor([0, 1, 4]))
    if call is decode:
        given["accepted"] = dict(index=table, accepted=torch.ones(2, dtype=torch.int32))
        given["parents"] = dict(into=table, index=table[:, 0], parents=torch.full((2, 2), -1))
    else:
        given["into"]["every"] = 1
        given["fresh"] = dict(fresh=torch.ones(2, dtype=torch.bool), index=table[:, 0])
    signature = inspect.signature(call).parameters.values()
    assert {p.name for p in signature if "Tensor" in str(p.annotation)} - {"inputs"} <= given.keys()
    for name, chosen in given.items():
        kept = {"op": op, "inputs": x, "pool": pool, "index": table[:, 0], **chosen}
        call(**{**kept, "pool": pool.clone()})
        for bad, error in ((kept[name].to("meta"), ValueError), ("no tensor", TypeError)):
            with pytest.raises(error, match=f"{op.name}: {name}.*" + ("meta" if error is ValueError else "str")):
                call(**{**kept, name: bad})


@pytest.mark.parametrize("call", [decode, prefill])
def test_no_tokens_leave_the_pool_alone(call):
    x, pool = drawn(BASIC)
    o = call(BASIC, {n: t[:, :0] for n, t in x.items()}, pool, LANES)
    assert list(o.shape) == [N, 0, 4, 6] and torch.equal(pool.nan_to_num(), drawn(BASIC)[1].nan_to_num())


def test_a_prompt_without_tokens_begins_a_sequence_all_the_same():
    x, pool = drawn(BASIC)
    before = pool.clone()
    fresh = torch.arange(N) % 2 == 0
    prefill(BASIC, {n: t[:, :0] for n, t in x.items()}, pool, LANES, fresh=fresh)
    begun = LANES[fresh & (LANES >= 0)]
    assert len(begun) and (pool[begun] == 0).all() and (before[begun] != 0).any()
    before[begun] = 0
    assert torch.equal(pool.nan_to_num(), before.nan_to_num())


def test_no_prompts_have_no_snapshots():
    x, pool = drawn(BASIC)
    before, none = pool.clone(), torch.empty(0, dtype=torch.int64)
    into = none.expand(4, 0).T  # [0, 4]
    prefill(BASIC, {n: t[:0, :1].expand(-1, 9, *t.shape[2:]) for n, t in x.items()}, pool, none, every=2, into=into)
    assert torch.equal(pool.nan_to_num(), before.nan_to_num())


def test_a_member_without_queries_takes_no_projection():
    op = next(op for op in OPS if not {"q", "k", "v"} <= op.args.keys())
    with pytest.raises(ValueError, match=f"decode {op.name}: takes no qkv: its inputs are {', '.join(op.args)}"):
        decode(op, dict(qkv=torch.zeros(1, 1, 12)), torch.zeros(1, 1, 1, 4))


def test_a_gradient_is_refused():
    x, pool = drawn(BASIC)
    x["v"].requires_grad_()
    with pytest.raises(ValueError, match="has no gradient, and v requires one"):
        decode(BASIC, x, pool, LANES)
