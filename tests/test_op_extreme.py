"""Every member where numbers are unkind: gates that forget everything or nothing, keys all alike, half types near their limits."""

import pytest
import torch
from oracle import DEVICE, OP_FORMS, OPS, Call, Case, check, definition, engine, honest, ids, make, with_gradients

from chunkwise.reference import reference
from chunkwise.spec import Rule


def drawn(op, kind):
    """The inputs of a member that a function of chunkwise.draw drew."""
    return [n for n, a in op.args.items() if a.draw.__name__ == kind]


every = pytest.mark.parametrize("op", OPS, ids=ids)
gated = pytest.mark.parametrize("op", [op for op in OPS if drawn(op, "log_decay")], ids=ids)
erasing = pytest.mark.parametrize("op", [op for op in OPS if drawn(op, "unit")], ids=ids)
RAGGED = Case(T=37, H=2, n=2, K=6, V=5)


def judged(call: Call, **options) -> dict[str, torch.Tensor]:
    truth, got = definition(call), engine(call, **options)
    check(got, truth, honest(call, truth))
    return got


@gated
@pytest.mark.parametrize("g", [0.0, -5.0, -8.0, -20.0, -100.0, -1e4, -torch.inf])
def test_gates_of_any_size_are_exact(op, g):
    judged(make(op, RAGGED, torch.float32, log_decay=lambda t: torch.full_like(t, g)))


def resets(g: torch.Tensor) -> torch.Tensor:
    """Nearly nothing forgotten, but for single tokens at which everything, or nearly everything, is."""
    g = 1e-3 * g
    for t, size in ((3, -1e4), (9, -torch.inf), (10, -torch.inf), (17, -60.0), (30, -1e4)):
        g[:, t] = size
    return g


@gated
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_resets_inside_a_row_lose_no_small_decay_around_them(op, dtype):
    judged(make(op, RAGGED, dtype, log_decay=resets))


@gated
def test_gates_that_are_sometimes_open_are_exact(op):
    torch.manual_seed(3)
    judged(make(op, RAGGED, torch.float32, log_decay=lambda g: g * (torch.rand_like(g) < 0.5)))


@pytest.mark.parametrize(("op", "form"), [(op, form) for op, form in OP_FORMS if drawn(op, "log_decay")], ids=ids)
def test_gates_above_zero_make_a_state_grow_in_every_form(op, form):
    torch.manual_seed(4)
    call = make(op, RAGGED, torch.float32, log_decay=lambda g: 0.1 * torch.randn_like(g))
    truth = definition(call)
    check(engine(call, form=form), truth, honest(call, truth), form)


@gated
def test_nothing_of_what_stood_before_a_reset_is_left(op):
    """Only the tokens change, not the gates before it: their sums are rounded alike."""
    if op.rule is Rule.DPLR or op.name == "comba" or any(n.startswith("g_") for n in op.args) or "M" in op.state.split():
        pytest.skip("keeps, or reads before it forgets, more than what the gate resets")
    call, gates = make(op, RAGGED, torch.float32, log_decay=resets), drawn(op, "log_decay")
    x, past = ({n: t.detach() for n, t in make(op, RAGGED, torch.float32, seed, log_decay=resets).x.items()} for seed in (0, 1))
    other = {n: torch.cat((past[n][:, :9], t[:, 9:]), 1) if op.args[n].per_token and n not in gates else t for n, t in x.items()}
    (a, S), (b, R) = (op(z, initial_state=call.S0.detach(), output_final_state=True, chunk_size=16) for z in (x, other))
    assert torch.equal(a[:, 10:], b[:, 10:]) and torch.equal(S, R) and not torch.equal(a[:, :9], b[:, :9])


@erasing
def test_one_key_for_every_token_is_overwritten_each_time(op):
    case = Case(T=130, H=2, n=2, K=16, V=8, chunk=64)
    alike = dict(unit=lambda k: k[:, :1].expand_as(k).clone(), write_strength=lambda b: torch.sigmoid(8 + 0 * b))
    for dtype in (torch.float32, torch.bfloat16):
        got = judged(make(op, case, dtype, log_decay=lambda g: 4e-5 * g, **alike))
        assert got["o"].abs().max() < 40 * case.V


def test_one_key_for_every_token_reads_back_its_value():
    op = next(o for o in OPS if o.name == "kda")
    case = Case(T=1024, H=1, K=128, V=128, chunk=64)
    alike = dict(unit=lambda k: k[:, :1].expand_as(k).clone(), write_strength=lambda b: torch.sigmoid(8 + 0 * b))
    x = {n: t.detach() for n, t in make(op, case, torch.float32, log_decay=lambda g: 4e-5 * g, **alike).x.items()}
    x["q"], x["v"] = x["k"], x["v"][:, :16].repeat(1, 64, 1, 1)
    o, S = op(x, output_final_state=True)
    stale = torch.sigmoid(torch.tensor(-8.0)).item()  # what of the value before is left: 1 - beta
    assert (o - 128**-0.5 * x["v"]).abs().max() < 128**-0.5 * (stale * 10 + 1e-5) and S.abs().max() < 4


@every
def test_half_types_with_strong_gates_and_a_ragged_end(op):
    judged(make(op, Case(B=2, T=75, H=2, n=2, K=16, V=8, chunk=64, strength=100.0), torch.float16))


@every
def test_half_types_do_not_overflow_on_the_way(op):
    """Large values: states and sums leave the range of float16, the scaled output does not."""
    values = next(n for n in ("v", "x") if n in op.args)
    call = make(op, Case(T=70, H=2, n=2, K=16, V=8, chunk=64), torch.float32)
    x = {n: t.detach() for n, t in call.x.items()}
    x[values] = x[values] * 4e3
    x = {n: t if op.args[n].free_dtype else t.half() for n, t in x.items()}
    o, S = op(x, scale=0.02, output_final_state=True)
    truth, state = reference(op, x, scale=0.02)
    assert o.dtype == torch.float16 and truth.abs().max() < 6e4 and (state.abs().max() > 65504 or op.name != "linear_attn")
    check({"o": o, "final state": S.half() if state.abs().max() < 6e4 else S.bfloat16()}, {"o": truth, "final state": state})


@erasing
def test_correlated_keys_lose_no_digit_in_single_precision(op):
    case = Case(T=256, H=1, n=2, K=16, V=8, chunk=64, correlated=True)
    call = make(op, case, torch.float32)
    truth, got = definition(call), engine(call)
    for name in ("o", "final state"):
        assert (got[name].cpu() - truth[name]).norm() < 1e-5 * truth[name].norm(), name


@pytest.mark.parametrize("op", [op for op in OPS if "use_gate_in_kernel" in op.defaults], ids=ids)
def test_the_gate_s_gradient_keeps_its_digits_in_half_types(op):
    """Decays as layers of Mamba's kind make them, from hardly any to exp(-16) a token."""
    case = Case(T=256, H=2, n=2, K=16, V=8, chunk=64)
    raw = lambda g: -torch.linspace(0.01, 16, g.shape[2]).view(-1, *[1] * (g.ndim - 3)) * torch.nn.functional.softplus(torch.randn_like(g))
    got = judged(make(op, case, torch.bfloat16, log_decay=raw))
    want = definition(make(op, case, torch.bfloat16, log_decay=raw))["dg"]
    assert (got["dg"].cpu().double() - want).norm() < 1e-2 * want.norm()


@gated
def test_without_a_state_the_first_gate_has_nothing_to_forget(op):
    call = make(op, RAGGED, torch.float32)
    gates = [n for n in drawn(op, "log_decay") if op.args[n].per_token]
    felt = definition(Call(op, call.case, call.x, call.S0.detach().mul(0).requires_grad_(), None))
    empty = op.empty_state(call.case.sizes, 1, device=DEVICE)
    d = [engine(Call(op, call.case, call.x, S0.requires_grad_(), None)) for S0 in (empty,)]
    o, S = op(call.x, output_final_state=True, chunk_size=16)
    d.append(with_gradients(o, S, call.x))
    for name in gates:
        for got in d:
            first, all_ = got[f"d{name}"][:, 0], got[f"d{name}"]
            if (felt[f"d{name}"][:, 0] == 0).all():
                assert first.abs().max() <= 8 * torch.finfo(torch.float32).eps * all_.abs().max(), name
        assert torch.equal(d[0][f"d{name}"], d[1][f"d{name}"]), name


@every
def test_sequences_of_one_token_among_longer_ones(op):
    case = Case(T=68, H=2, n=2, K=6, V=5, chunk=64)
    call = make(op, case, torch.float32)
    call.cu = torch.tensor([0, 1, 2, 3, 67, 68], device=DEVICE)
    call.S0 = op.draw_state(case.sizes, 5, device=DEVICE).requires_grad_()
    judged(call)
    judged(call, form="recurrent")
