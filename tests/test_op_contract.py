"""What every member promises besides being right: states, packing, batches, causality, bits, strides, emptiness."""

import dataclasses

import pytest
import torch
from oracle import DEVICE, OPS, Case, check, definition, engine, head, honest, ids, make, widen, with_gradients

from chunkwise.reference import reference

every = pytest.mark.parametrize("op", OPS, ids=ids)
PLAIN = Case(B=3, T=41, H=2, n=2, K=6, V=5)


def detached(call):
    return {n: t.detach() for n, t in call.x.items()}


def tokens(op, x, at):
    """The inputs of some tokens: `at` indexes the token axis."""
    return {n: t[:, at] if op.args[n].per_token else t for n, t in x.items()}


def samples(op, x, at):
    """The inputs of some samples."""
    return {n: t[at] if op.args[n].axes.startswith("B") else t for n, t in x.items()}


@every
@pytest.mark.parametrize(
    "cuts", [(19,), (1,), (16, 17), tuple(range(3, 41, 7))], ids=["two parts", "one, then all", "a chunk, one, the rest", "many"]
)
def test_segments_carry_state(op, cuts):
    call = make(op, PLAIN)
    S, out = call.S0, []
    for a, b in zip((0, *cuts), (*cuts, PLAIN.T)):
        o, S = op(tokens(op, call.x, slice(a, b)), initial_state=S, output_final_state=True, chunk_size=16)
        out.append(o)
    truth = definition(call)
    check(with_gradients(torch.cat(out, 1), S, call.leaves()), truth, honest(call, truth))


@every
def test_no_state_is_the_empty_state(op):
    call = make(op, PLAIN)
    empty = op.empty_state(PLAIN.sizes, PLAIN.B, dtype=torch.float64, device=DEVICE)
    a, b = (op(detached(call), initial_state=S, output_final_state=True) for S in (None, empty))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@every
def test_states_come_in_any_dtype_and_either_layout(op):
    call = make(op, PLAIN, torch.float32)
    want = engine(call)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        S = call.S0.detach().bfloat16().to(dtype).mT.contiguous().requires_grad_()
        o, ST = op(call.x, initial_state=S, output_final_state=True, state_v_first=True, chunk_size=16)
        (dS,) = torch.autograd.grad(o.sum() + ST.sum(), S)
        assert ST.dtype == torch.float32 and dS.dtype == dtype and dS.shape == S.shape and ST.shape == S.shape
        again, again_S = op(call.x, initial_state=call.S0.detach().bfloat16().float(), output_final_state=True, chunk_size=16)
        assert torch.equal(o, again) and torch.equal(ST.mT, again_S)
    assert want["final state"].shape == call.S0.shape
    (_, a), (_, b) = (reference(op, call.x, initial_state=S, state_v_first=v) for S, v in ((call.S0, False), (call.S0.mT, True)))
    assert torch.equal(a.mT, b)


@every
def test_packed_is_separate(op):
    case = Case(T=60, H=2, n=2, K=6, V=5, N=5)
    call = make(op, case, torch.float32)
    ends = call.cu.tolist()
    parts = [
        op(tokens(op, call.x, slice(a, b)), initial_state=call.S0[i : i + 1], output_final_state=True, chunk_size=16)
        for i, (a, b) in enumerate(zip(ends, ends[1:]))
    ]
    apart = with_gradients(torch.cat([o for o, _ in parts], 1), torch.cat([S for _, S in parts]), call.leaves())
    truth = definition(call)
    both = {"packed": engine(call), "apart": apart}
    for got in both.values():
        check(got, truth, honest(call, truth))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packing_changes_no_bit(op, dtype):
    """Each sequence in the form and the chunks it would have alone. On a GPU nobody knows lengths: there the chunk form is asked for."""
    case = Case(T=170, H=2, n=2, K=16, V=8, chunk=64)
    call, cu = make(op, case, dtype), [0, 3, 3, 70, 71, 150, 151, 170]
    x, S0 = detached(call), op.draw_state(case.sizes, 7, device=DEVICE)
    whole, last = op(x, initial_state=S0, output_final_state=True, cu_seqlens=torch.tensor(cu, device=DEVICE))
    form = "auto" if DEVICE.type == "cpu" else "chunk"
    for n, (a, b) in enumerate(zip(cu, cu[1:])):
        o, S = op(tokens(op, x, slice(a, b)), initial_state=S0[n : n + 1], output_final_state=True, form=form)
        assert torch.equal(o, whole[:, a:b]) and torch.equal(S, last[n : n + 1])


@every
def test_packing_changes_no_bit_of_a_gradient(op):
    case = Case(T=40, H=2, n=2, K=16, V=8, chunk=64)
    call, cu = make(op, case, torch.float32), [0, 1, 2, 2, 20, 21, 40]
    whole, _ = op(call.x, initial_state=call.S0.expand(6, -1, -1, -1), output_final_state=True, cu_seqlens=torch.tensor(cu, device=DEVICE))
    each = [n for n in call.x if op.args[n].per_token]
    together = torch.autograd.grad(whole.square().sum(), [call.x[n] for n in each], allow_unused=True)
    for a, b in zip(cu, cu[1:]):
        part = tokens(op, call.x, slice(a, b))
        o, _ = op(part, initial_state=call.S0, output_final_state=True)
        alone = torch.autograd.grad(o.square().sum(), [part[n] for n in each], allow_unused=True)
        for name, d, all_of_them in zip(each, alone, together):
            assert torch.equal(d, all_of_them[:, a:b]), name


@every
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_documents_do_not_leak(op, dtype):
    cu = torch.tensor([0, 7, 7, 30, 31, 60], dtype=dtype, device=DEVICE)
    call = make(op, Case(T=60, H=2, n=2, K=6, V=5), torch.float32)
    x = detached(call)
    before, S = op(x, cu_seqlens=cu, output_final_state=True)
    with torch.no_grad():
        for name, t in x.items():
            if op.args[name].per_token:
                t[:, :7] = float("nan")
    after, S2 = op(x, cu_seqlens=cu, output_final_state=True)
    assert torch.equal(before[:, 7:], after[:, 7:]) and torch.equal(S[1:], S2[1:])
    assert after[:, :7].isnan().any() and torch.equal(S[1:2], op.empty_state(call.case.sizes, 1, device=DEVICE))


@every
def test_offsets_may_be_refilled_in_place(op):
    call = make(op, Case(T=40, H=2, n=2, K=6, V=5), torch.float32)
    cu = torch.tensor([0, 10, 40], device=DEVICE)
    first, _ = op(detached(call), cu_seqlens=cu)
    cu[1] = 25
    moved, _ = op(detached(call), cu_seqlens=cu)
    fresh, _ = op(detached(call), cu_seqlens=torch.tensor([0, 25, 40], device=DEVICE))
    assert torch.equal(moved, fresh) and not torch.equal(first, moved)


@every
def test_only_the_engine_may_read_offsets_on_the_host(op):
    """Members around it never do: on tensors without values, where the engine gives shapes alone, a call goes through."""
    case = Case(T=40, H=1, K=4, V=4)
    x = {n: t.detach().to("meta").requires_grad_() for n, t in make(op, case, torch.float32).x.items()}
    S0 = op.draw_state(case.sizes, 3).to("meta").requires_grad_()
    o, S = op(x, initial_state=S0, output_final_state=True, cu_seqlens=torch.empty(4, dtype=torch.int32, device="meta"))
    d = torch.autograd.grad(o.sum() + S.sum(), [*x.values(), S0])
    assert o.shape == (1, 40, 1, 4) and S.shape == S0.shape and all(g.shape == t.shape for g, t in zip(d, (*x.values(), S0)))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sample_does_not_depend_on_its_batch(op, dtype):
    case = Case(B=4, T=83, H=2, n=2, K=16, V=8, chunk=64)
    call = make(op, case, dtype)
    whole = engine(call)
    for i in (0, 3):
        at = slice(i, i + 1)
        alone = {n: t.detach().requires_grad_() for n, t in samples(op, call.x, at).items()}
        S0 = call.S0[at].detach().requires_grad_()
        o, S = op(alone, initial_state=S0, output_final_state=True)
        gen = torch.Generator().manual_seed(1)
        weights = [torch.randn(whole[n].shape, generator=gen, dtype=torch.float64).to(whole[n])[at] for n in ("o", "final state")]
        d = torch.autograd.grad([o, S], [*alone.values(), S0], weights)
        assert torch.equal(o, whole["o"][at]) and torch.equal(S, whole["final state"][at])
        for name, g in zip([*alone, "S0"], d):
            if name == "S0" or op.args[name].axes.startswith("B"):
                assert torch.equal(g, whole[f"d{name}"][at]), name


@every
def test_the_same_input_gives_the_same_bits(op):
    call = make(op, Case(B=2, T=70, H=2, n=2, K=16, V=8, chunk=64), torch.float32)
    first, second = engine(call), engine(call)
    for name, t in first.items():
        assert torch.equal(t, second[name]), name


@every
def test_the_fused_form_gives_the_bits_of_the_chunk_form(op):
    call = make(op, Case(B=2, T=70, H=2, n=2, K=16, V=8, chunk=64), torch.float32)
    fused = engine(call, form="fused_chunk")
    for name, t in engine(call, form="chunk").items():
        assert torch.equal(t, fused[name]), name


@every
@torch.no_grad()
def test_many_large_states_are_computed_as_one_is(op):
    """Also where their sizes choose the way."""
    call = make(op, Case(B=2, T=70, H=24, K=64, V=48, chunk=64), torch.float32)
    whole, alone = (op(x, output_final_state=True) for x in (call.x, samples(op, call.x, slice(1, 2))))
    assert all(torch.equal(a[1:], b) for a, b in zip(whole, alone))


@every
@pytest.mark.parametrize("at", [1, 20, 64, 69])
def test_causality_is_bitwise(op, at):
    call = make(op, Case(T=70, H=2, n=2, K=16, V=8), torch.float32)
    x = detached(call)
    before, _ = op(x)
    other = {n: t.to(DEVICE) for n, t in op.draw(call.case.sizes, seed=7, dtype=torch.float32).items()}
    changed = {n: torch.cat((t[:, :at], other[n][:, at:]), 1) if op.args[n].per_token else t for n, t in x.items()}
    after, _ = op(changed)
    assert torch.equal(before[:, :at], after[:, :at]) and not torch.equal(before[:, at:], after[:, at:])


@every
def test_gradients_are_causal(op):
    call = make(op, Case(T=70, H=2, n=2, K=16, V=8), torch.float32)
    o, _ = op(call.x)
    d = torch.autograd.grad(o[:, :37].square().sum(), list(call.x.values()))
    for name, g in zip(call.x, d):
        if op.args[name].per_token:
            assert (g[:, 37:] == 0).all(), name


@every
def test_nan_stays_in_its_sample(op):
    call = make(op, PLAIN, torch.float32)
    x = {n: t.detach().clone() for n, t in call.x.items()}
    clean = engine(call)
    for name, t in x.items():
        if op.args[name].per_token:
            t[1] = float("nan")
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    o, S = op(leaves, initial_state=call.S0, output_final_state=True, chunk_size=16)
    got = with_gradients(o, S, {**leaves, "S0": call.S0})
    for name, t in got.items():
        if name in ("o", "final state", "dS0") or op.args[name[1:]].axes.startswith("B"):
            for i in (0, 2):
                assert torch.equal(t[i], clean[name][i]), name


@every
def test_strides_do_not_matter(op):
    call = make(op, PLAIN)
    want = engine(call)

    def scattered(t):
        """The same values, as every second entry of a larger buffer of NaN, axes reversed in memory."""
        wide = torch.full((*t.shape[::-1][:-1], 2 * t.shape[0]), float("nan"), dtype=t.dtype, device=DEVICE)[..., ::2].permute(
            *reversed(range(t.ndim))
        )
        wide.copy_(t.detach())
        return wide.requires_grad_()

    x, S0 = {n: scattered(t) for n, t in call.x.items()}, scattered(call.S0)
    o, S = op(x, initial_state=S0, output_final_state=True, chunk_size=16)
    got = with_gradients(o, S, {**x, "S0": S0})
    for name, t in want.items():
        assert torch.equal(got[name], t), name


@every
def test_broadcast_gradients_are_taken(op):
    call = make(op, PLAIN)
    o, S = op(call.x, initial_state=call.S0, output_final_state=True, chunk_size=16)
    spread = torch.autograd.grad(o.sum() + S.sum(), list(call.leaves().values()), retain_graph=True)
    dense = torch.autograd.grad([o, S], list(call.leaves().values()), [torch.ones_like(o), torch.ones_like(S)])
    for a, b in zip(spread, dense):
        assert torch.equal(a, b)


@every
@pytest.mark.parametrize("sizes", [dict(T=0), dict(B=0, T=20), dict(B=0, T=0), dict(T=0, N=3), dict(T=0, N=0)], ids=str)
def test_nothing_in_nothing_out(op, sizes):
    case = dataclasses.replace(Case(H=2, n=2, K=4, V=3), **sizes)
    call = make(op, dataclasses.replace(case, N=None), torch.float32)
    N = case.B if case.N is None else case.N
    cu = None if case.N is None else torch.zeros(N + 1, dtype=torch.int32, device=DEVICE)
    S0 = op.draw_state(case.sizes, N, device=DEVICE).requires_grad_()
    for form in op.forms:
        o, S = op(call.x, initial_state=S0, output_final_state=True, cu_seqlens=cu, form=form)
        d = torch.autograd.grad(o.sum() + (S * 2).sum(), [*call.x.values(), S0], allow_unused=True)
        assert o.shape == (case.B, case.T, 4, 3) and torch.equal(S, S0)
        assert op({n: t.detach() for n, t in call.x.items()}, cu_seqlens=cu, form=form)[0].shape == o.shape
        assert all((g == 0).all() for g in d[:-1] if g is not None) and (d[-1] == 2).all()


@every
def test_inputs_are_left_alone(op):
    call = make(op, PLAIN, torch.float32)
    kept = {n: t.detach().clone() for n, t in call.leaves().items()}
    for form in op.forms:
        engine(call, form=form)
    for name, t in call.leaves().items():
        assert torch.equal(t, kept[name]), name


@every
def test_value_heads_share_key_heads(op):
    call = make(op, Case(T=37, H=2, n=3, K=6, V=5))
    wide = {n: widen(op, n, t.detach(), 3) for n, t in call.x.items()}
    if not any("HV" in a.axes.split() for a in op.args.values()):
        pytest.skip("has as many value heads as key heads")
    shared, _ = op(call.x, initial_state=call.S0, chunk_size=16)
    repeated, _ = op(wide, initial_state=call.S0, chunk_size=16)
    check({"o": shared.detach()}, {"o": repeated.detach()})


@every
def test_every_head_has_its_own_gate(op):
    call = make(op, Case(T=20, H=3, K=5, V=4))
    x = detached(call)
    for name, arg in op.args.items():
        if arg.draw.__name__ == "log_decay" and arg.axes.startswith("B T HV"):
            x[name][:] = torch.tensor([-0.1, -0.3, -5.0], dtype=torch.float64, device=DEVICE).view(1, 1, 3, *[1] * (x[name].ndim - 3))
    if op.gate.value == "head":
        pytest.skip("heads differ by more than their inputs: the member numbers them")
    whole, _ = op(x)
    alone = torch.cat([op({n: head(op, n, t, i) for n, t in x.items()})[0] for i in range(3)], 2)
    check({"o": whole}, {"o": alone})


@every
def test_the_token_form_of_many_short_sequences_is_a_loop(op):
    case = Case(T=300, H=2, n=2, K=6, V=5)
    call = make(op, case, torch.float32)
    lengths = torch.randint(1, 4, (200,), generator=torch.Generator().manual_seed(0)).cumsum(0)
    cu = torch.cat((torch.zeros(1, dtype=torch.int64), lengths[lengths < 300], torch.tensor([300])))
    call.cu, call.S0 = cu.to(DEVICE), op.draw_state(case.sizes, len(cu) - 1, device=DEVICE).requires_grad_()
    truth = definition(call)
    check(engine(call), truth, honest(call, truth))
    check(engine(call, form="recurrent"), truth, honest(call, truth))
