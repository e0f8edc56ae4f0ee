"""Layers and modules refuse by name what does not fit, before they compute."""

import inspect

import pytest
import torch

import chunkwise
from chunkwise import nn
from chunkwise.nn import (
    GatedRMSNorm,
    RMSNorm,
    all_mixers,
    causal_conv1d,
    causal_conv1d_update,
    cross_entropy,
    linear_cross_entropy,
    mixer_class,
    rms_norm,
    token_shift,
)
from chunkwise.nn.mlp import glu_halves

LAYERS = {
    "no slots": ("abc", dict(num_slots=0), "abc: num_slots must be at least 1, got 0"),
    "an odd key": ("abc", dict(hidden_size=20), "abc: the key size of a head must be even"),
    "no slots of gsa": ("gsa", dict(num_slots=0), "gsa: num_slots must be at least 1, got 0"),
    "no reflections": ("gated_delta_product", dict(num_householder=0), "gated_delta_product: num_householder must be at least 1, got 0"),
    "a bound that grows": ("kda", dict(lower_bound=1.0), "kda: lower_bound must be negative, got 1.0"),
    "a gate that divides by nothing": ("gla", dict(gate_logit_normalizer=0.0), "gla: gate_logit_normalizer must be positive, got 0.0"),
    "keys without end": ("gla", dict(expand_k=float("inf")), "expand_k = inf of 24 must be a positive multiple of the 2 heads, got inf"),
    "a layer too many": ("lightning_attn", dict(layer_idx=2, num_layers=2), "layer_idx must be in 0 .. num_layers - 1 = 1, got 2"),
    "no state": ("mamba2", dict(state_size=0), "mamba2: state_size must be at least 1, got 0"),
    "groups that do not divide": ("mamba2", dict(num_groups=3), "mamba2: num_groups must divide num_heads = 2, got 3"),
    "an odd key of retention": ("retention", dict(head_dim=5), "retention: the key size of a head must be even"),
    "an odd feature of retention": ("retention", dict(feature_map="taylor"), "even for rotary positions, got 157"),
    "a feature without a gate": ("kda", dict(feature_map="taylor"), "kda: feature_map must keep the channels .* 'taylor' makes 157 of 12"),
    "features without gates": ("gla", dict(feature_map="dpfp"), "gla: feature_map must keep the channels .* 'dpfp' makes 48 of 6"),
    "no heads": ("gla", dict(num_heads=0), "gla: hidden_size and num_heads must be at least 1, got 24 and 0"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_refuses_sizes_of_its_own(case):
    name, options, says = LAYERS[case]
    with pytest.raises(ValueError, match=says):
        mixer_class(name)(**{"hidden_size": 24, "num_heads": 2, **options})


@pytest.mark.parametrize("name", all_mixers())
def test_a_layer_takes_floating_tensors_alone(name):
    layer = mixer_class(name)(24, 2)
    for x in (torch.zeros(1, 3, 24, dtype=torch.int64), [[0.0] * 24]):
        with pytest.raises(TypeError, match="hidden_states must be a floating tensor, got (torch.int64|list)"):
            layer(x)


@pytest.mark.parametrize("name", ["gla", "mamba2"])
def test_a_layer_says_what_it_is(name):
    said = repr(mixer_class(name)(24, 2))
    assert f"{name}, mode=chunk, heads=2" in said and "K=" in said and "V=" in said


def test_tensors_on_another_device_are_refused():
    x, w, t = torch.randn(1, 6, 4), torch.randn(5, 4), torch.zeros(1, 6, dtype=torch.int64)
    calls = {
        "weight is on meta, x on cpu": lambda: rms_norm(x, torch.ones(4, device="meta")),
        "rms_norm: gate is on meta, x on cpu": lambda: rms_norm(x, torch.ones(4), gate=x.to("meta"), activation="silu"),
        "linear_cross_entropy: weight is on meta": lambda: linear_cross_entropy(x, w.to("meta"), t),
        "linear_cross_entropy: bias is on meta": lambda: linear_cross_entropy(x, w, t, torch.zeros(5, device="meta")),
        "cross_entropy: target is on meta, logits on cpu": lambda: cross_entropy(x, t.to("meta")),
        "weight is on meta": lambda: causal_conv1d(x, torch.randn(4, 3, device="meta")),
        "causal_conv1d: initial_state is on meta": lambda: causal_conv1d(x, torch.randn(4, 3), None, torch.zeros(1, 4, 2, device="meta")),
        "update: state is on meta": lambda: causal_conv1d_update(x[:, 0], torch.zeros(1, 4, 2, device="meta"), torch.randn(4, 3)),
        "token_shift: initial_state is on meta": lambda: token_shift(x, torch.zeros(1, 4, 1, device="meta")),
    }
    for says, call in calls.items():
        with pytest.raises(ValueError, match=says):
            call()


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"token_shift: x must be \[B, T, D\], got \[6, 4\]"):
        token_shift(torch.randn(6, 4))
    with pytest.raises(ValueError, match=r"token_shift: initial_state must be \[N, D, 1\] = \[1, 4, 1\], got \[1, 4\]"):
        token_shift(torch.randn(1, 6, 4), torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"glu_halves: ab must hold a and b side by side, got \[\]"):
        glu_halves(torch.tensor(1.0))
    with pytest.raises(ValueError, match="cross_entropy: there must be at least one class, got V = 0"):
        cross_entropy(torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64))


X, WEIGHT, TOKENS = torch.randn(1, 6, 4), torch.randn(4), torch.arange(6)[None]
CALLS = {  # each function of tensors with all of them
    "l2norm": dict(x=X),
    "rms_norm": dict(x=X, weight=WEIGHT, bias=WEIGHT, gate=X),
    "layer_norm": dict(x=X, weight=WEIGHT, bias=WEIGHT, gate=X),
    "add_rms_norm": dict(x=X, residual=X, weight=WEIGHT, bias=WEIGHT, gate=X),
    "add_layer_norm": dict(x=X, residual=X, weight=WEIGHT, bias=WEIGHT, gate=X),
    "causal_conv1d": dict(x=X, weight=torch.randn(4, 3), bias=WEIGHT, initial_state=torch.randn(1, 4, 2), cu_seqlens=torch.tensor([0, 6]),
                          residual=X),
    "causal_conv1d_update": dict(x=X, state=torch.randn(3, 4, 2), weight=torch.randn(4, 3), bias=WEIGHT, state_indices=torch.tensor([1])),
    "cross_entropy": dict(logits=X, target=torch.zeros(1, 6, dtype=torch.int64)),
    "linear_cross_entropy": dict(x=X, weight=torch.randn(5, 4), target=torch.zeros(1, 6, dtype=torch.int64), bias=torch.randn(5)),
    "glu": dict(a=X, b=X),
    "swiglu": dict(a=X, b=X),
    "rotary": dict(x=X[:, :, None], positions=TOKENS),
    "token_shift": dict(x=X, initial_state=torch.randn(1, 4, 1), cu_seqlens=torch.tensor([0, 6])),
    "plan_packing": dict(batch=1, length=6, position_ids=TOKENS, offset=torch.tensor([3]), cu_seqlens=torch.tensor([0, 6])),
}  # fmt: skip


def test_every_function_of_tensors_is_called_here():
    tensors = {n for n in nn.__all__ if inspect.isfunction(getattr(nn, n)) and "Tensor" in str(inspect.signature(getattr(nn, n)))}
    assert CALLS.keys() == tensors - {"activation", "feature_map"}  # these return functions


@pytest.mark.parametrize(("name", "argument"), [(n, a) for n, given in CALLS.items() for a, t in given.items() if torch.is_tensor(t)])
def test_numbers_of_another_kind_and_what_is_no_tensor_are_refused_by_name(name, argument):
    given, call = CALLS[name], getattr(nn, name)
    call(**given)
    t, whole = given[argument], not given[argument].is_floating_point()
    needed = "None" not in str(inspect.signature(call).parameters[argument].annotation)
    for other in (t.float() if whole else t.long(), t.cfloat(), t.bool(), t.tolist(), *[None] * needed):
        with pytest.raises(TypeError, match=f"{argument} must be (a tensor of integers|int64|a floating tensor), got"):
            call(**{**given, argument: other})


def test_a_mask_may_be_of_any_numbers_and_must_be_a_tensor():
    assert all(nn.plan_packing(1, 3, attention_mask=torch.ones(1, 3, dtype=d)).index is None for d in (torch.bool, torch.int64, torch.half))
    with pytest.raises(TypeError, match="attention_mask must be a tensor, got list"):
        nn.plan_packing(1, 3, attention_mask=[[1, 1, 1]])


@pytest.mark.parametrize("offsets", [[0, 7], [0, 5], [0, 4, 2, 6], [1, 6]])
def test_offsets_that_do_not_rise_from_0_to_T_are_refused_compiled_or_not(offsets):
    torch._dynamo.reset()
    cu, call = torch.tensor(offsets), torch.compile(nn.token_shift, fullgraph=True, backend="eager")
    assert torch.equal(call(X, cu_seqlens=torch.tensor([0, *[3] * (len(offsets) - 2), 6]))[0][:, 4:], nn.token_shift(X)[0][:, 4:])
    with pytest.raises(RuntimeError, match="cu_seqlens must rise from 0 to T"):
        call(X, cu_seqlens=cu)
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to T = 6, got \["):
        nn.token_shift(X, cu_seqlens=cu)


def test_a_layers_number_is_whole():
    x = torch.randn(1, 3, 2, 4)
    with pytest.raises(TypeError, match="lightning_attn: layer_idx must be a whole number, got 0.5"):
        chunkwise.lightning_attn(x, x, x, layer_idx=0.5, num_layers=2)
    with pytest.raises(TypeError, match="lightning_attn: num_layers must be a whole number, got 2.0"):
        mixer_class("lightning_attn")(24, 2, layer_idx=0, num_layers=2.0)


def test_convolutions_refuse_what_they_would_get_wrong():
    """Whole numbers, and slots that two sequences would write."""
    x, w, state = torch.randn(2, 4), torch.randn(4, 3), torch.zeros(3, 4, 2)
    with pytest.raises(TypeError, match="causal_conv1d: x must be a floating tensor, got torch.int64"):
        causal_conv1d(torch.ones(1, 6, 4, dtype=torch.int64), w)
    with pytest.raises(TypeError, match="causal_conv1d_update: state must be a floating tensor, got torch.int64"):
        causal_conv1d_update(x, state.long(), w)
    for slots, says in (([1, 1], "name every slot once, got 1 twice"), ([0, 3], "name slots below 3, got 3")):
        with pytest.raises(ValueError, match=f"causal_conv1d_update: state_indices must {says}"):
            causal_conv1d_update(x, state, w, state_indices=torch.tensor(slots))
    assert not causal_conv1d_update(x, state, w, state_indices=torch.tensor([-1, -1])).any()  # nobody's


def test_norms_say_what_they_are():
    assert repr(RMSNorm(4, 1e-5)) == "RMSNorm(4, eps=1e-05)" and repr(GatedRMSNorm(4)).endswith("activation='silu')")
