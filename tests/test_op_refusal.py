"""Bad input is refused by name, before anything runs: the op, the argument, what was wanted and what was given."""

import inspect
import typing

import pytest
import torch
from oracle import OPS, Case, ids, make, widen

import chunkwise
from chunkwise.reference import reference
from chunkwise.spec import public_functions

every = pytest.mark.parametrize("op", OPS, ids=ids)
CASE = Case(B=2, T=8, H=2, K=4, V=4)


def refused(op, error, names, x, **options):
    with pytest.raises(error) as raised:
        op(x, **options)
    text = str(raised.value)
    assert text.startswith(f"{op.name}: ") and "\n" not in text
    for name in names if isinstance(names, tuple) else (names,):
        assert name in text, text


def inputs(op, dtype=torch.float32):
    return {n: t.detach() for n, t in make(op, CASE, dtype).x.items()}


@every
def test_a_wrong_shape_names_its_argument(op):
    for name in list(op.args)[1:]:
        axes = op.args[name].axes.split()
        bound = {a for n in list(op.args)[: list(op.args).index(name)] for a in op.args[n].axes.split()}
        cuts = [lambda t, i=i: t.narrow(i, 0, 1) for i, a in enumerate(axes) if a in bound and a != "HV"]
        for bad in (lambda t: t.unsqueeze(0), lambda t: t[0], *cuts):
            x = inputs(op)
            x[name] = bad(x[name])
            refused(op, ValueError, (name, "must be ["), x)


@every
def test_what_is_not_a_floating_tensor_is_refused(op):
    for name in op.args:
        for bad in (None, 1.0, [1.0], inputs(op)[name].long()):
            if bad is None and op.args[name].optional:
                continue
            x = inputs(op)
            x[name] = bad
            refused(op, TypeError, name, x)


@every
def test_streams_of_two_dtypes_are_refused(op):
    streams = [n for n, a in op.args.items() if not a.free_dtype]
    for name in streams[1:]:
        x = inputs(op)
        x[name] = x[name].bfloat16()
        refused(op, TypeError, (name, "torch.float32", "torch.bfloat16"), x)


@every
def test_gates_have_a_dtype_of_their_own(op):
    x, low = inputs(op, torch.bfloat16), inputs(op, torch.bfloat16)
    for name, arg in op.args.items():
        if arg.free_dtype:
            x[name] = x[name].float()
    o, _ = op(x)
    assert o.dtype == torch.bfloat16 and torch.equal(o, op(low)[0])


@every
def test_another_device_is_refused(op):
    x, row = inputs(op), {n: t.detach() for n, t in make(op, Case(T=8, H=2)).x.items()}
    for name in list(op.args)[1:]:
        refused(op, ValueError, (name, "meta"), {**x, name: x[name].to("meta")})
    raw, cu = op.draw(dict(B=2, T=8, H=2, HV=2, K=4, V=4)), torch.tensor([0, 8])
    bias = torch.zeros(raw["g"][0, 0].numel()) if "A_log" in op.defaults else None
    options = {
        "initial_state": (x, dict(initial_state=op.draw_state(CASE.sizes, 2))),
        "cu_seqlens": (row, dict(cu_seqlens=cu)),
        "cu_seqlens_cpu": (row, dict(cu_seqlens=cu, cu_seqlens_cpu=cu)),
        "A_log": (raw, dict(use_gate_in_kernel=True, A_log=torch.zeros(2))),
        "dt_bias": (raw, dict(use_gate_in_kernel=True, A_log=torch.zeros(2), dt_bias=bias)),
    }
    taken = {n for n, hint in op.options.__annotations__.items() if "Tensor" in str(hint)}
    assert taken <= options.keys(), "a tensor among the options that this test does not know"
    for name in taken:
        given, chosen = options[name]
        refused(op, ValueError, (name, "meta"), given, **{**chosen, name: chosen[name].to("meta")})
        refused(op, TypeError, name, given, **{**chosen, name: "no tensor"})


@every
def test_heads_must_divide(op):
    x = make(op, Case(T=8, H=1, n=3)).x
    refused(
        op,
        ValueError,
        ("HV=3", "H=2"),
        {n: widen(op, n, t.detach(), 2) for n, t in x.items()},
    )


@every
def test_heads_without_channels_are_refused(op):
    for sizes, letter in ((dict(K=0), "K"), (dict(V=0), "V"), (dict(H=0), "H")):
        if any(letter in a.axes.split() for a in op.args.values()):
            refused(op, ValueError, f"must have {letter}", {n: t.detach() for n, t in make(op, Case(T=8, **sizes)).x.items()})


@every
def test_unknown_keywords_are_refused(op):
    for name in ("scal", "head_first", "cu_seqlen", "use_l2norm"):
        refused(op, TypeError, name, inputs(op), **{name: None})
        for other in (lambda **o: reference(op, inputs(op), **o), lambda **o: chunkwise.explain(op, T=8, **o)):
            with pytest.raises(TypeError, match=f"{op.name}: unexpected keyword '{name}'; it takes "):
                other(**{name: None})


@every
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("form", "chunky"), ("backend", "cuda"), ("chunk_size", 48), ("chunk_size", 64.0), ("precision", "fp8"), ("form", "parallel"),
        ("backend", "triton"), ("inverse_precision", "fp8"),
    ],
)  # fmt: skip
def test_options_take_listed_values(op, option, value):
    if value == "parallel" and op.parallel or option not in op.defaults:
        return
    refused(op, ValueError, (value if isinstance(value, str) else str(value),), inputs(op), **{option: value})


@every
@pytest.mark.parametrize("scale", ["half", True, [0.5], torch.ones(2), torch.ones((), requires_grad=True)], ids=str)
def test_a_scale_is_a_number(op, scale):
    """Alone, and one without a gradient, which it would not get."""
    refused(op, TypeError, "scale must be a number", inputs(op), scale=scale)


@every
@pytest.mark.parametrize(("option", "right", "wrong"), [("scale", 1.0, True), ("chunk_size", 64, 64.0)])
def test_what_equals_an_option_is_refused_after_it_too(op, option, right, wrong):
    x = inputs(op)
    for _ in range(2):
        op(x, **{option: right})
        with pytest.raises((TypeError, ValueError), match=f"{op.name}: {option} must be"):
            op(x, **{option: wrong})


@every
def test_yes_or_no_is_no_string(op):
    for name in (n for n, default in op.defaults.items() if isinstance(default, bool)):
        for wrong in ("False", torch.tensor([True, False])):
            refused(op, TypeError, f"{name} must be True or False, got {wrong!r}", inputs(op), **{name: wrong})


@every
@pytest.mark.parametrize(
    ("cu", "error"),
    [
        ([0, 5, 4, 8], ValueError), ([1, 8], ValueError), ([0, 7], ValueError), ([0, 9], ValueError),
        ([[0, 8]], ValueError), ([], ValueError),
        ([0.0, 8.0], TypeError), ("0,8", TypeError),
    ],
    ids=str,
)  # fmt: skip
def test_offsets_must_rise_from_zero_to_the_end(op, cu, error):
    x = {n: t.detach() for n, t in make(op, Case(T=8, H=2)).x.items()}
    cu = cu if isinstance(cu, str) else torch.tensor(cu, dtype=None if cu else torch.int32)
    refused(op, error, "cu_seqlens", x, cu_seqlens=cu)


@every
def test_packing_wants_one_row(op):
    refused(op, ValueError, ("cu_seqlens", "B=2"), inputs(op), cu_seqlens=torch.tensor([0, 8]))
    refused(op, ValueError, "cu_seqlens_cpu", inputs(op), cu_seqlens_cpu=torch.tensor([0, 8]))


@every
def test_states_of_another_shape_are_refused(op):
    N, HV, K, V = op.state.split()
    n, hv, k, v = op.state_shape(CASE.sizes, 2)
    for shape in ((n, hv, k, v + 1), (1, hv, k, v), (n, hv, k * v), (n, 1, k, v)):
        refused(op, ValueError, ("initial_state", f"[{N}, {HV}, {K}, {V}]"), inputs(op), initial_state=torch.zeros(shape))
    x = {n: t.detach() for n, t in make(op, Case(T=8, K=4, V=6)).x.items()}
    S = torch.zeros(op.state_shape(Case(T=8, K=4, V=6).sizes, 1))
    refused(op, ValueError, ("initial_state", f"[{N}, {HV}, {V}, {K}]"), x, initial_state=S, state_v_first=True)
    refused(op, TypeError, "initial_state", inputs(op), initial_state=torch.zeros(2, 2, 4, 4, dtype=torch.long))


def test_raw_gates_need_their_parameters():
    for op in OPS:
        if "A_log" not in op.defaults:
            continue
        x = inputs(op)
        refused(op, ValueError, "A_log", x, use_gate_in_kernel=True)
        refused(op, ValueError, "A_log", x, use_gate_in_kernel=True, A_log=torch.zeros(3))
        refused(op, ValueError, "dt_bias", x, use_gate_in_kernel=True, A_log=torch.zeros(2), dt_bias=torch.zeros(3))
        refused(op, ValueError, "lower_bound", x, use_gate_in_kernel=True, A_log=torch.zeros(2), lower_bound=5.0)
        refused(op, TypeError, "lower_bound must be a number", x, use_gate_in_kernel=True, A_log=torch.zeros(2), lower_bound="-5")
        refused(op, ValueError, "use_gate_in_kernel", x, A_log=torch.zeros(2))
        for name, option in (("g", "use_gate_in_kernel"), ("beta", "use_beta_sigmoid_in_kernel")):
            if name in op.args and op.args[name].optional:
                refused(op, ValueError, f"{option} needs {name}", {**x, name: None}, **{option: True})
        if "allow_neg_eigval" in op.defaults:
            refused(op, ValueError, "use_beta_sigmoid_in_kernel", x, allow_neg_eigval=True)


def test_a_form_s_function_takes_no_form():
    for name, function in public_functions().items():
        if name.startswith("chunk_"):
            with pytest.raises(TypeError, match=name):
                function(form="chunk")


@pytest.mark.parametrize("name", ["explain", "examine", "snapshots", "prefill", "decode"])
def test_who_takes_a_member_names_those_there_are(name):
    given = {"explain": dict(T=1), "examine": {}, "snapshots": dict(inputs={}, every=1)}.get(name, dict(inputs={}, pool=torch.zeros(1)))
    with pytest.raises(ValueError, match=f"{name}: op must be a member, one of abc, .* got 'glaa'"):
        getattr(chunkwise, name)("glaa", **given)


def test_signatures_are_types_not_words():
    for name, function in public_functions().items():
        options = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert not any(isinstance(p.annotation, (str, typing.ForwardRef)) for p in options), name


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'glaa'"):
        chunkwise.glaa  # noqa: B018
