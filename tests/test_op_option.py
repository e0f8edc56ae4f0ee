"""The options that every function shares or that finish what a layer hands over raw, each against its formula."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from oracle import OPS, Case, ids, make, same, with_gradients

import chunkwise
from chunkwise.draw import RANGE
from chunkwise.spec import PlainOptions, all_ops, public_functions

every = pytest.mark.parametrize("op", OPS, ids=ids)
CASE = Case(B=2, T=21, H=2, n=2, K=6, V=5)


def taking(option):
    return pytest.mark.parametrize("op", [op for op in OPS if option in op.defaults], ids=ids)


def leaf(t):
    return t.detach().clone().requires_grad_()


def run(op, x, leaves, **options):
    """Outputs, and the gradients of `leaves`, of which x is made."""
    o, S = op(x, output_final_state=True, chunk_size=16, **options)
    return with_gradients(o, S, leaves)


@taking("use_qk_l2norm_in_kernel")
def test_normalised_keys_and_queries_are_divided_by_their_length(op):
    call = make(op, CASE)
    raw = {n: leaf(3 * t if n in ("q", "k", "p") else t) for n, t in call.x.items()}
    unit = {n: t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() if n in ("q", "k", "p") else t for n, t in raw.items()}
    same(run(op, raw, raw, use_qk_l2norm_in_kernel=True), run(op, unit, raw))


@taking("use_qk_l2norm_in_kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_zero_rows_are_normalised_to_zero(op, dtype):
    if op.name == "normalized_linear_attn" and dtype == torch.float16:
        pytest.skip("a query of zeros reads 0 / 1e-10, whose gradient is beyond float16")
    call = make(op, CASE, dtype)
    x = {n: t.detach().clone() for n, t in call.x.items()}
    for name in ("q", "k", "p"):
        if name in x:
            x[name][:, 3:7] = 0
            x[name][:, 10] *= 2.0**-14 if dtype == torch.float16 else 1e-30
    x = {n: t.requires_grad_() for n, t in x.items()}
    got = run(op, x, x, use_qk_l2norm_in_kernel=True)
    assert all(t.isfinite().all() for t in got.values()) and (got["o"][:, 3:7] == 0).all()


@taking("use_gate_in_kernel")
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("bias", [False, True])
def test_raw_gates_are_activated_by_their_formula(op, bound, bias):
    call = make(op, CASE)
    raw = {n: leaf(t) for n, t in call.x.items()}
    raw["g"] = leaf(torch.randn_like(raw["g"]))
    gate = dict(A_log=leaf(torch.rand(4).double()))
    if bias:
        gate["dt_bias"] = leaf(torch.randn(raw["g"].shape[2:].numel()).double())
    A = gate["A_log"].exp().view(-1, *[1] * (raw["g"].ndim - 3))
    z = raw["g"] + (gate["dt_bias"].view(raw["g"].shape[2:]) if bias else 0)
    g = -A * z.exp().log1p() if bound is None else bound / (1 + (-A * z).exp())
    leaves = {**raw, **gate}
    same(run(op, raw, leaves, use_gate_in_kernel=True, lower_bound=bound, **gate), run(op, {**raw, "g": g}, leaves))


@taking("use_beta_sigmoid_in_kernel")
@pytest.mark.parametrize("negative", [False, True])
def test_raw_strengths_are_squashed_by_their_formula(op, negative):
    call = make(op, CASE)
    raw = {n: leaf(t) for n, t in call.x.items()}
    raw["beta"] = leaf(torch.randn_like(raw["beta"]))
    beta = (2 if negative else 1) / (1 + (-raw["beta"]).exp())
    same(run(op, raw, raw, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=negative), run(op, {**raw, "beta": beta}, raw))


@taking("use_gate_in_kernel")
def test_raw_gates_of_half_types_are_activated_in_single_precision(op):
    call = make(op, CASE, torch.bfloat16)
    x = {n: t.detach() for n, t in call.x.items()}
    A_log, bias = torch.rand(4).bfloat16(), torch.randn(x["g"].shape[2:].numel()).bfloat16()
    z = x["g"].float() + bias.float().view(x["g"].shape[2:])
    g = -A_log.float().exp().view(-1, *[1] * (x["g"].ndim - 3)) * F.softplus(z)
    raw, _ = op(x, use_gate_in_kernel=True, A_log=A_log, dt_bias=bias)
    done, _ = op({**x, "g": g})
    assert torch.equal(raw, done)


NEUTRAL = {"log_decay": 0.0, "write_strength": 1.0, "centre": -0.2}  # what leaving an input out means, by what draws it; else 0


@pytest.mark.parametrize("op", [op for op in OPS if any(a.optional for a in op.args.values())], ids=ids)
def test_an_input_left_out_is_its_neutral_value(op):
    call = make(op, CASE)
    for name, arg in op.args.items():
        if arg.optional:
            rest = {n: leaf(t) for n, t in call.x.items() if n != name}
            given = torch.full_like(call.x[name], NEUTRAL.get(arg.draw.__name__, 0.0))
            same(run(op, {**rest, name: None}, rest), run(op, {**rest, name: given}, rest))


@pytest.mark.parametrize("op", [op for op in OPS if any(a.free_dtype for a in op.args.values())], ids=ids)
def test_gates_of_few_digits_cost_the_streams_none(op):
    x = {n: t.detach() for n, t in make(op, CASE, torch.float32).x.items()}
    short = {n: t.bfloat16() if op.args[n].free_dtype else t for n, t in x.items()}
    wide = {n: t.float() for n, t in short.items()}
    for form in op.forms:
        assert all(map(torch.equal, *(op(y, form=form, output_final_state=True) for y in (short, wide))))


@every
def test_scale_multiplies_what_is_read(op):
    call = make(op, CASE)
    x = {n: leaf(t) for n, t in call.x.items()}
    scaled = {**x, op.query: 3 * x[op.query]}
    got, want = run(op, x, x, scale=3 * 0.25), run(op, scaled, x, scale=0.25)
    same(got, want)


@pytest.mark.parametrize("name", public_functions())
def test_a_public_function_shows_what_it_takes_and_swallows_nothing(name):
    function = public_functions()[name]
    shown = inspect.signature(function).parameters.values()
    assert not [p for p in shown if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)], name
    assert inspect.getdoc(function), name
    needed = [i if p.annotation == "int" else torch.zeros(1) for i, p in enumerate(shown) if p.default is p.empty]
    with pytest.raises(TypeError, match="swallowed"):
        function(*needed, swallowed=True)


@every
def test_inputs_that_leave_their_range_are_pointed_at_and_not_refused(op):
    x = {n: t.detach() for n, t in make(op, CASE).x.items()}
    assert chunkwise.examine(op.name, **x) == []
    for name, arg in op.args.items():
        bad = {**x, name: x[name].clone()}
        bad[name].view(-1)[0] = float("nan")
        assert chunkwise.examine(op, **bad) == [f"{op.name}: {name} should be finite; 1 of {x[name].numel()} are not"]
        if arg.draw in RANGE and op.couple(x)[name] is x[name]:
            bad[name] = 3 - x[name] if arg.draw.__name__ != "unit" else 2 * x[name]
            if arg.draw.__name__ == "time_step":
                bad[name] = -x[name]
            (line,) = chunkwise.examine(op, **bad)
            assert line.startswith(f"{op.name}: {name} should be {RANGE[arg.draw][0]}; "), line
            op(bad)
    with pytest.raises(TypeError, match="takes no input 'z'"):
        chunkwise.examine(op, **x, z=x[op.query])


def test_every_shared_option_is_documented_on_one_page_and_taken_by_every_member():
    for op in all_ops().values():
        assert set(PlainOptions.__annotations__) <= set(op.defaults), op.name
