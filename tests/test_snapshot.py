"""The states on the way are those of shorter calls, whatever the member and the packing."""

import pytest
import torch
from oracle import OPS, Case, check, ids, make

import chunkwise

every_op = pytest.mark.parametrize("op", OPS, ids=ids)


def cut(op, x, a, b):
    return {n: t[:, a:b] if op.args[n].per_token else t for n, t in x.items()}


@every_op
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_snapshots_are_the_states_of_prefixes(op, packed):
    call = make(op, Case(B=1 if packed else 2, T=21, H=2, n=2, K=4, V=3, N=4 if packed else None))
    seen = chunkwise.snapshots(op, call.x, every=8, **call.options)
    o, last = op(call.x, output_final_state=True, **call.options)
    ends = [0, 21] if call.cu is None else call.cu.tolist()
    want = []
    for n, S in enumerate(call.S0.split(1)):
        a, b = ends[n : n + 2] if packed else ends
        rows = {m: t if packed or not op.args[m].per_token else t[n : n + 1] for m, t in call.x.items()}
        want += [op(cut(op, rows, a, t), initial_state=S, output_final_state=True)[1] for t in range(a, b, 8)]
    got = dict(o=seen.o, last=seen.final_state, states=seen.states)
    check(
        {n: t.detach() for n, t in got.items()},
        {"o": o.detach(), "last": last.detach(), "states": torch.cat(want).detach()},
        form="parallel",
    )
    weights = torch.randn_like(seen.states)
    d, truth = (
        torch.autograd.grad((z * weights).sum(), [*call.x.values(), call.S0], allow_unused=True) for z in (seen.states, torch.cat(want))
    )
    names = [f"d{n}" for n in (*call.x, "S0")]
    zero = [torch.zeros_like(t) for t in (*call.x.values(), call.S0)]
    filled = ({n: z if g is None else g for n, g, z in zip(names, grads, zero)} for grads in (d, truth))
    check(*filled)


def test_nothing_to_see_has_no_snapshots():
    op = chunkwise.all_ops()["gla"]
    call = make(op, Case(B=2, T=0, K=4, V=3))
    seen = chunkwise.snapshots("gla", call.x, initial_state=call.S0)
    assert list(seen.states.shape) == [0, 1, 4, 3] and torch.equal(seen.final_state, call.S0) and list(seen.o.shape) == [2, 0, 1, 3]


def test_states_may_be_value_first():
    op = chunkwise.all_ops()["gated_delta_rule"]
    call = make(op, Case(T=9, K=4, V=3))
    plain, turned = (chunkwise.snapshots(op, call.x, every=4, state_v_first=first).states for first in (False, True))
    assert torch.equal(plain, turned.mT)


def test_bad_requests_name_what_is_wrong():
    x = make(chunkwise.all_ops()["gla"], Case(T=8)).x
    for every in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match="gla: every must be"):
            chunkwise.snapshots("gla", x, every=every)
    with pytest.raises(TypeError, match="gla: .*output_final_state"):
        chunkwise.snapshots("gla", x, output_final_state=True)
    with pytest.raises(ValueError, match="gla: cu_seqlens must rise"):
        chunkwise.snapshots("gla", x, cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(TypeError, match="gla: unexpected keyword 'scal'"):
        chunkwise.snapshots("gla", x, scal=1.0)
