"""What all layers promise about state, packing, padding, modes and precision."""

import copy
import itertools

import pytest
import torch
from nn_agreement import agree
from nn_case import MEMBERS, D, agree_with_gradients, build, draw, keywords, with_gradients
from torch.nn import functional as F

from chunkwise.engine.prologue import prologue
from chunkwise.nn import Depth, all_mixers, mixer_class, parameters_without_decay, plan_packing
from chunkwise.nn.mixer import layer as core
from chunkwise.nn.mixer.layer import Window
from chunkwise.spec import PREFIX, Op, all_ops

MODES = [(name, PREFIX[form]) for name in MEMBERS for form in mixer_class(name).forms]


@pytest.mark.parametrize("name", MEMBERS)
def test_options_of_a_member_change_its_function(name):
    """Each keyword argument does something: the parameters or the output differ, or it is refused by name."""
    flips = dict(
        num_kv_heads=1, num_v_heads=4, head_dim=8, expand_k=2.0, expand_v=3.0, use_short_conv=False, conv_size=2, feature_map="relu",
        use_gate=not getattr(mixer_class(name), "use_gate", False), norm_eps=0.1, rope_theta=10.0, gate_low_rank_dim=3,
        gate_logit_normalizer=2.0, lower_bound=-1.0, num_slots=3, num_householder=3, correction_factor=0.5, state_size=6, num_groups=2,
        proj_low_rank_dim=3, decay_low_rank_dim=3, a_low_rank_dim=3, v_low_rank_dim=3, squash_x=1.2, squash_eps=0.1,
        **{n: not default for n, default in keywords(name).items() if isinstance(default, bool)},
    )  # fmt: skip
    form_only = {"mode", "chunk_size"}
    assert set(mixer_class(name).options()) <= flips.keys() | form_only
    start = {n: v for n, v in dict(use_short_conv=True, first=False, num_layers=2).items() if n in keywords(name)}
    x, depth = draw(1, 9, D), Depth(first=draw(1, 9, D, seed=3))
    for option in set(mixer_class(name).options()) - form_only:
        given = {**start, **({"feature_map": "hedgehog"} if option == "tie_feature_map" else {})}
        before, after = build(name, **given), build(name, **{**given, option: flips[option]})
        shapes = {n: p.shape for n, p in before.named_parameters()}
        if {n: p.shape for n, p in after.named_parameters()} == shapes:
            if option != "correction_factor":  # that is where a parameter begins
                after.load_state_dict(before.state_dict())
            assert not torch.equal(after(x, depth=depth)[0], before(x, depth=depth)[0]), option
    with pytest.raises(TypeError):
        mixer_class(name)(D, 2, no_such_option=1)


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_prefill_then_steps_is_one_pass(name, mode):
    """A prefill of any mode and length leaves the state that later calls continue from: 37 + 5 + 70 = 112, then single tokens."""
    layer, x = build(name, mode=mode).eval(), draw(2, 115, D)
    wide = copy.deepcopy(layer).double()
    with torch.no_grad():
        truth, _ = wide(x.double())
        honest, _ = layer(x)
        state, pieces = None, []
        for a, b in itertools.pairwise([0, 37, 42, 112, 113, 114, 115]):
            y, state = layer(x[:, a:b], state=state, output_state=True)
            pieces.append(y)
        _, whole = layer(x, output_state=True)
        _, whole_wide = wide(x.double(), output_state=True)
    assert state.seen.tolist() == [115, 115]
    got = {"o": torch.cat(pieces, 1), "state": state.recurrent}
    agree(got, {"o": truth, "state": whole_wide.recurrent}, {"o": honest, "state": whole.recurrent})


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("forget", [False, True])
def test_delta_product_of_any_number_of_steps_with_and_without_a_forget_gate(steps, forget):
    """One step is the (gated) delta rule; the gate may be missing in every form."""
    layer, x = build("gated_delta_product", num_householder=steps, use_forget_gate=forget).eval(), draw(2, 20, D)
    wide = copy.deepcopy(layer).double()
    with torch.no_grad():
        first, state = layer(x[:, :17], output_state=True)
        last, _ = layer(x[:, 17:], state=state)
        agree({"o": torch.cat([first, last], 1)}, {"o": wide(x.double())[0]}, {"o": layer(x)[0]})
        if steps == 1:
            rule = build("gated_delta_rule" if forget else "delta_rule", expand_v=2.0, use_gate=True, allow_neg_eigval=True).eval()
            rule.load_state_dict(layer.state_dict())
            assert torch.equal(rule(x)[0], layer(x)[0])


@pytest.mark.parametrize("name", MEMBERS)
def test_every_token_count_splits(name):
    """Prefills shorter than the convolution's window too."""
    layer, x = build(name).double().eval(), draw(1, 7, D).double()
    with torch.no_grad():
        whole, end = layer(x, output_state=True)
        for cut in range(8):
            first, state = layer(x[:, :cut], output_state=True)
            second, state = layer(x[:, cut:], state=state, output_state=True)
            single = {"o": layer.float()(x.float())[0]}
            layer.double()
            honest = {"o": whole + (single["o"] - whole) * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps}
            agree({"o": torch.cat([first, second], 1)}, {"o": whole}, honest)
            if end.conv is not None:
                agree({"conv": state.conv}, {"conv": end.conv})


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("sides", ["left", "right", "inner"])
def test_padded_is_alone(name, sides):
    layer, x = build(name).train(), draw(3, 80, D)
    mask = torch.ones(3, 80, dtype=torch.int64)
    for row, pads in enumerate((0, 1, 63)):
        mask[row, {"left": slice(0, pads), "right": slice(80 - pads, 80), "inner": slice(5, 5 + pads)}[sides]] = 0
    wide = copy.deepcopy(layer).double()

    def alone(layer, x):
        rows = [layer(x[i : i + 1, mask[i].bool()], output_state=True) for i in range(3)]
        states = torch.cat([s.recurrent for _, s in rows])
        gradient = torch.autograd.grad(sum(o.square().sum() for o, _ in rows), x)[0]
        return {"o": torch.cat([o[0] for o, _ in rows]).detach(), "state": states.flatten().detach(), "dx": gradient.flatten(0, 1)}

    def padded(layer, x):
        o, state = layer(x, attention_mask=mask, output_state=True)
        gradient = torch.autograd.grad(o.square().sum(), x)[0]
        assert not o[~mask.bool()].any() and not gradient[~mask.bool()].any()
        return {"o": o[mask.bool()].detach(), "state": state.recurrent.flatten().detach(), "dx": gradient.flatten(0, 1)}

    x = x.requires_grad_()
    wide_x = x.detach().double().requires_grad_()
    agree(padded(layer, x), alone(wide, wide_x), alone(layer, x))
    spoiled = x.detach().clone()
    spoiled[~mask.bool()] = float("nan")
    assert torch.equal(layer(spoiled, attention_mask=mask)[0], layer(x, attention_mask=mask)[0])


@pytest.mark.parametrize("name", MEMBERS)
def test_packed_is_separate(name):
    layer, x = build(name).train(), draw(1, 100, D)
    cu = torch.tensor([0, 30, 31, 31, 100])
    positions = torch.cat([torch.arange(n) for n in cu.diff().tolist()])[None]
    wide = copy.deepcopy(layer).double()

    def separate(layer, x):
        rows = [layer(x[:, a:b], output_state=True) for a, b in itertools.pairwise(cu.tolist())]
        return {"o": torch.cat([o for o, _ in rows], 1), "state": numbers(torch.cat([s.recurrent for _, s in rows]))}

    numbers = lambda state: state.masked_fill(state.isneginf(), -1.0)  # abc's slots that nothing was written to, of the empty document
    o, state = layer(x, cu_seqlens=cu, output_state=True)
    fresh = layer.member.empty(torch.zeros_like(state.recurrent[:1])) if name in all_ops() else state.recurrent.new_zeros(())
    assert state.recurrent.isneginf().sum() == fresh.isneginf().sum()
    agree({"o": o, "state": numbers(state.recurrent)}, separate(wide, x.double()), separate(layer, x))
    assert torch.equal(o, layer(x, cu_seqlens=cu.int(), attention_mask=torch.ones(1, 100), position_ids=positions)[0])
    assert torch.equal(o, layer(x, position_ids=positions)[0])  # an empty document leaves no trace in positions
    changed = x.clone()
    changed[:, :30] = draw(1, 30, D, seed=5)
    assert torch.equal(layer(changed, cu_seqlens=cu)[0][:, 30:], o[:, 30:])


@pytest.mark.parametrize("name", MEMBERS)
def test_gradient_flows_through_the_state(name):
    layer, x = build(name).train(), draw(1, 40, D)
    wide = copy.deepcopy(layer).double()

    def chained(layer, x):
        first, state = layer(x[:, :17], output_state=True)
        return torch.cat([first, layer(x[:, 17:], state=state)[0]], 1)

    truth, honest = with_gradients(wide, lambda m, x: m(x)[0], x.double()), with_gradients(layer, lambda m, x: m(x)[0], x)
    agree_with_gradients(with_gradients(layer, chained, x), truth, honest)


@pytest.mark.parametrize(("name", "mode"), MODES)
@pytest.mark.parametrize("T", [0, 1, 8, 64, 65])
def test_layers_train_at_any_length_in_every_mode(name, mode, T):
    layer = build(name, mode=mode).train()
    layer(draw(2, T, D))[0].square().sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all() and (T == 0 or parameter.grad.any() or T == 1), parameter_name


@pytest.mark.parametrize("name", MEMBERS)
def test_mode_without_a_form_is_refused_by_name(name):
    modes = [PREFIX[form] for form in mixer_class(name).forms]
    for mode in {*PREFIX.values(), "attention"} - set(modes):
        with pytest.raises(ValueError, match=f"{name}: mode must be one of .*{modes[0]}.*{mode}"):
            build(name, mode=mode)


def test_short_calls_outside_training_take_the_recurrent_form(monkeypatch):
    seen, call = [], Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda self, inputs, **options: seen.append(options["form"]) or call(self, inputs, **options))
    layer = build("gla")
    for training, T in ((True, 1), (False, 1), (False, core.SHORT), (False, core.SHORT + 1)):
        layer.train(training)(draw(1, T, D))
    assert seen == ["chunk", "recurrent", "recurrent", "chunk"]


GATED = [name for name in MEMBERS if mixer_class(name).keep_float32]


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_leaves_the_gate_exact(name, half):
    layer = build(name)
    before = {n: getattr(layer, n).detach().clone() for n in layer.keep_float32}
    for cast in (lambda m: m.to(half), lambda m: m.double().to(half).train()):
        layer = cast(layer)
        assert {p.dtype for n, p in layer.named_parameters() if n not in before} == {half}
        for n, value in before.items():
            assert getattr(layer, n).dtype == torch.float32 and torch.equal(getattr(layer, n), value)
    x = draw(1, 20, D).to(half)
    plan = plan_packing(1, 20)
    inputs, _ = layer.operands(x, Window(plan, None, False), plan.positions, Depth())
    inputs = prologue(name, inputs, {**layer.member.defaults, **layer.op_options, **layer.call_options()})
    exact = {n: t for n, t in inputs.items() if layer.member.args[n].free_dtype and n != "dt"}  # Mamba hands dt over as it is projected
    assert exact and all(t.dtype == torch.float32 for t in exact.values())
    if "g" in exact:
        raw = layer.f_proj(x).unflatten(-1, (len(layer.A_log), -1)) if hasattr(layer, "f_proj") else layer.a_proj(x)
        A, bias = before["A_log"].double().exp(), before["dt_bias"].double().view(raw.shape[2:])
        truth = -(A if raw.ndim == 3 else A[:, None]) * F.softplus(raw.double() + bias)
        agree({"g": inputs["g"].flatten()}, {"g": truth.flatten()})
    layer(x)[0].sum().backward()
    assert layer.A_log.grad.dtype == torch.float32


@pytest.mark.parametrize("name", GATED)
def test_gate_parameters_begin_in_range_on_every_road(name):
    plain = build(name)
    with torch.device("meta"):
        late = mixer_class(name)(D, 2)
    assert late.A_log.is_meta
    late = late.to_empty(device="cpu")
    late.reset_parameters()
    torch.set_default_dtype(torch.bfloat16)
    try:
        half = build(name)
    finally:
        torch.set_default_dtype(torch.float32)
    for layer in (plain, late, half):
        A, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
        assert layer.A_log.dtype == torch.float32 and layer.A_log._no_weight_decay and layer.dt_bias._no_weight_decay
        assert 1 <= A.min() and A.max() <= 16.001 and 0.00099 <= dt.min() and dt.max() <= 0.1001 and len(A.unique()) > 1


@pytest.mark.parametrize("name", MEMBERS)
def test_weight_decay_spares_gates_norms_and_biases(name):
    conv = {n: True for n in ("use_short_conv", "conv_bias") if n in keywords(name)}
    layer = build(name, **conv)
    spared = parameters_without_decay(layer)
    own = {n for n, _ in layer.named_parameters(recurse=False)}
    small = {n for n, _ in layer.named_parameters() if "norm" in n or n.endswith("bias")}
    assert set(layer.keep_float32) <= own and own | small == spared == parameters_without_decay(copy.deepcopy(layer))
    assert all("proj" in n or "lora" in n or "conv1d" in n for n in dict(layer.named_parameters()).keys() - spared)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(num_heads=5), "expand_k = .* of 24 must be a positive multiple of the 5 heads"),
        (dict(num_kv_heads=1, num_v_heads=4), "give num_kv_heads .* or num_v_heads"),
        (dict(num_heads=4, num_kv_heads=3), "num_kv_heads must divide num_heads = 4, got 3"),
        (dict(num_v_heads=3), "num_v_heads must be a multiple of num_heads = 2, got 3"),
        (dict(head_dim=8, expand_k=1.0), "head_dim and expand_k"),
        (dict(head_dim=0), "head_dim must be at least 1"),
        (dict(conv_size=0), "kernel_size must be at least 1"),
        (dict(feature_map="fourier"), "feature_map must be None or one of"),
    ],
)
def test_layer_refuses_by_name(options, says):
    with pytest.raises(ValueError, match=says):
        build("gated_delta_rule", **options)


def test_layer_refuses_inputs_and_states_that_do_not_fit():
    layer = build("gated_delta_rule")
    _, state = layer(draw(2, 3, D), output_state=True)
    with pytest.raises(ValueError, match="hidden_states must be"):
        layer(draw(2, 3, D + 1))
    with pytest.raises(ValueError, match="holds N = 2 sequences, the call has 1"):
        layer(draw(1, 3, D), state=state)
    with pytest.raises(ValueError, match="flatten the batch"):
        layer(draw(2, 4, D), cu_seqlens=torch.tensor([0, 4, 8]))
    with pytest.raises(ValueError, match="mixer must be one of"):
        mixer_class("mamba7")
    assert list(all_mixers()) == sorted(all_mixers())  # as errors list them


def test_layers_by_class_name():
    import chunkwise.nn

    assert {mixer.__name__ for mixer in all_mixers().values()} <= set(dir(chunkwise.nn))
    assert chunkwise.nn.GatedDeltaNet is mixer_class("gated_delta_rule")


def test_a_step_leaves_the_state_it_was_given_and_sees_hooks(monkeypatch):
    """The convolutions move a copy of their states on in place; one that somebody watches is called as a module. The bits are one way's."""
    layer, x = build("gated_delta_rule", use_short_conv=True).eval(), draw(2, 12, D)
    seen, made = [], []
    with torch.no_grad():
        _, state = layer(x[:, :7], output_state=True)
        before = [t.clone() for t in (state.conv, state.recurrent)]
        for way in ("in place", "one watched", "copied"):
            watch = layer.k_conv1d.register_forward_hook(lambda *_: seen.append(1)) if way == "one watched" else None
            if way == "copied":
                monkeypatch.setattr(Window, "_few", lambda *_: False)
            y, new = layer(x[:, 7:8], state=state, output_state=True)
            z, last = layer(x[:, 8:], state=new, output_state=True)
            made.append((y, z, new.conv, last.conv))
            assert all(torch.equal(a, b) for a, b in zip(before, (state.conv, state.recurrent)))
            if watch is not None:
                watch.remove()
    assert len(seen) == 2 and all(torch.equal(a, b) for other in made[1:] for a, b in zip(made[0], other))
