"""Every member at sizes that are unkind: lengths around a chunk, odd and unequal heads, thousands of sequences, foreign memory."""

import pytest
import torch
from oracle import DEVICE, OPS, Case, check, definition, engine, honest, ids, make, same, widen, with_gradients

every = pytest.mark.parametrize("op", OPS, ids=ids)
grouped = pytest.mark.parametrize("op", [op for op in OPS if any("HV" in a.axes.split() for a in op.args.values())], ids=ids)


def judged(call, **options):
    truth, got = definition(call), engine(call, **options)
    check(got, truth, honest(call, truth))


@every
@pytest.mark.parametrize("T", [2, 31, 63, 65, 129])
def test_any_length_is_right(op, T):
    judged(make(op, Case(B=2, T=T, H=2, n=2, K=16, V=8, chunk=64), torch.float32))


@every
@pytest.mark.parametrize(("K", "V"), [(48, 60), (100, 36), (4, 512), (512, 4)])
def test_heads_of_any_size_are_right(op, K, V):
    judged(make(op, Case(T=18, H=2, K=K, V=V, strength=0.1), torch.float32))


@every
def test_the_chunk_changes_no_result(op):
    for chunk in (16, 32, 64):
        judged(make(op, Case(T=70, H=2, n=2, K=6, V=5, chunk=chunk), torch.bfloat16))


@grouped
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_value_heads_share_key_heads_and_add_their_gradients(op, n):
    call = make(op, Case(T=21, H=2, n=n, K=6, V=5))
    repeated = {m: widen(op, m, t, n) for m, t in call.x.items()}
    shared = engine(call)
    o, S = op(repeated, initial_state=call.S0, output_final_state=True, chunk_size=16)
    same(shared, with_gradients(o, S, call.leaves()))


def at_the_front(t, beyond):
    """The same values, as the front of a larger buffer filled with `beyond`."""
    buffer = torch.full((t.numel() + 4096,), beyond, dtype=t.dtype, device=t.device)
    buffer[: t.numel()] = t.detach().flatten()
    return buffer[: t.numel()].view(t.shape).requires_grad_()


@pytest.fixture
def poisoned_memory():
    """Memory that was asked for and not yet written holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@every
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_nothing_beyond_the_inputs_and_nothing_unwritten_is_read(op, packed, request):
    call = make(op, Case(T=75, H=2, n=2, K=6, V=5, N=4 if packed else None, chunk=64), torch.float32)
    forms = [f.value for f in op.forms]
    clean = {form: engine(call, form=form) for form in forms}
    request.getfixturevalue("poisoned_memory")
    for beyond in (float("nan"), 1e30):
        call.x, call.S0 = {n: at_the_front(t, beyond) for n, t in call.x.items()}, at_the_front(call.S0, beyond)
        for form in forms:
            for name, t in engine(call, form=form).items():
                assert torch.equal(t, clean[form][name]), (form, name)


@every
def test_tens_of_thousands_of_sequences_are_as_many_calls(op):
    """More sequences than a grid of 65,535 blocks has, each of one token."""
    case = Case(T=65_600, H=1, K=6, V=5)
    x = {n: t.detach() for n, t in make(op, case, torch.float32).x.items()}
    some = slice(65_000, 65_600)
    alone = {n: t[:, some].transpose(0, 1) if op.args[n].per_token else t for n, t in x.items()}
    for form in ("chunk", "recurrent") if DEVICE.type == "cuda" else ("recurrent",):
        o, _ = op(x, cu_seqlens=torch.arange(case.T + 1, device=DEVICE), form=form)
        assert torch.equal(o[:, some], op(alone, form=form)[0].transpose(0, 1))


@every
def test_offsets_of_either_width_give_the_same_bits(op):
    call = make(op, Case(T=60, H=2, n=2, K=6, V=5, N=5), torch.float32)
    narrow = engine(call)
    call.cu = call.cu.long()
    for name, t in engine(call).items():
        assert torch.equal(t, narrow[name]), name
