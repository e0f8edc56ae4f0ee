"""fla's layers by their names: its constructor arguments and parameter names, our layers behind them."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch

import chunkwise
from chunkwise.compat import install_as_fla
from chunkwise.compat.alias import parameters
from chunkwise.compat.fla_cache import Cache
from chunkwise.compat.fla_layer import LAYERS
from chunkwise.nn import mixer_class

HERE = Path(__file__).parent
SIGNATURES = dict(line.split("(", 1) for line in (HERE / "fla_layer_signature.txt").read_text().splitlines())  # fla 0.6.0's own
CHECKPOINTS = json.loads((HERE / "fla_checkpoint.json").read_text()).values()  # config.json, names and shapes as fla 0.6.0 makes them
by_name = pytest.mark.parametrize("alias", LAYERS, ids=lambda a: a.name)


def recorded(alias):
    """(constructor arguments, shapes of the tensors) of the first layer of fla's model that is made of these."""
    for made in CHECKPOINTS:
        shapes = {n.removeprefix("model.layers.0.attn."): s for n, s in made["tensors"].items() if ".layers.0.attn." in n}
        given = {n: made["config"][n] for n in parameters(alias.signature) if n in made["config"]}
        try:
            layer = alias.layer()(**given)
        except (ValueError, TypeError):
            continue
        if {n: list(t.shape) for n, t in layer.state_dict().items()} == shapes:
            return given, layer
    raise AssertionError(f"no recorded model has layers that {alias.name} could be")


@by_name
def test_constructors_are_those_of_fla(alias):
    assert list(parameters(alias.signature).items()) == list(parameters(f"{alias.name}({SIGNATURES[alias.name]}").items())


@by_name
def test_parameters_are_named_as_in_flas_checkpoints_and_the_layer_is_ours(alias):
    _, layer = recorded(alias)
    ours, x = mixer_class(alias.op), torch.randn(1, 12, 16)
    mask, cu = torch.ones(1, 12), torch.tensor([0, 5, 12], dtype=torch.int32)
    with torch.no_grad():
        o, *rest = layer(x, attention_mask=mask)
        assert isinstance(layer, ours) and rest == [None, None]
        assert torch.equal(o, ours.forward(layer, x)[0])
        packed, *_ = layer(x, cu_seqlens=cu)
        assert torch.equal(packed, ours.forward(layer, x, cu_seqlens=cu)[0]) and not torch.equal(packed, o)


@by_name
def test_what_a_layer_has_not_is_refused_by_name(alias):
    given, layer = recorded(alias)
    x = torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match=f"{alias.name}: output_attentions"):
        layer(x, output_attentions=True)
    with pytest.raises(TypeError, match=f"{alias.name}: past_key_values must be a fla.models.utils.Cache, got list"):
        layer(x, past_key_values=[])
    with pytest.raises(ValueError, match=f"{alias.name}: past_key_values needs a layer made with layer_idx"):
        layer(x, past_key_values=Cache())
    with pytest.raises(TypeError, match=f"{alias.name}: unexpected keyword 'other'"):
        alias.layer()(other=1)
    for name, allowed in alias.fixed.items():
        with pytest.raises(ValueError, match=f"{alias.name}: {name} must be {allowed[0]!r}"):
            alias.layer()(**{**given, name: "another"})


@by_name
def test_a_cache_carries_each_layers_state(alias):
    given, _ = recorded(alias)
    first, second = (alias.layer()(**{**given, "layer_idx": i}).eval() for i in (3, 5))
    cache, x, pieces = Cache(), torch.randn(2, 29, 16), []
    with torch.no_grad():
        for a, b in ((0, 18), (18, 19), (19, 29)):
            y, _, same = first(x[:, a:b], past_key_values=cache, use_cache=True)
            y, *_ = second(y, past_key_values=cache, use_cache=True)
            assert same is cache and cache.get_seq_length(3) == cache.get_seq_length(5) == b
            pieces.append(y)
        whole = second(first(x)[0])[0]
        torch.testing.assert_close(torch.cat(pieces, 1), whole)
        first(x, past_key_values=cache)  # reads it alone
        assert len(cache) == 2 and cache.get_seq_length(3) == 29
        cache.reset()
        assert len(cache) == 0 and torch.equal(first(x, past_key_values=cache)[0], first(x)[0])


def test_layers_are_imported_as_from_fla():
    with install_as_fla(replace=True):
        from fla import GatedDeltaNet as same
        from fla.layers import GatedDeltaNet
        from fla.layers.kda import KimiDeltaAttention

        assert same is GatedDeltaNet
        with pytest.raises(ImportError, match="RWKV7Attention"):
            from fla.layers import RWKV7Attention  # noqa: F401
    assert GatedDeltaNet.__module__ == "fla.layers.gated_deltanet" and KimiDeltaAttention(32, head_dim=8, num_heads=2).num_heads == 2


def test_linear_attention_has_flas_feature_maps():
    x = torch.randn(1, 9, 16)
    with install_as_fla(replace=True):
        from fla.layers import LinearAttention
    plain, means = (LinearAttention(hidden_size=16, num_heads=2, do_feature_map_norm=n) for n in (False, True))
    assert {n.split(".")[0] for n in plain.state_dict()} == {"feature_map_q", "feature_map_k", "norm", *(f"{n}_proj" for n in "qkvo")}
    assert isinstance(means, LinearAttention) and (plain.op, means.op) == ("linear_attn", "normalized_linear_attn")
    means.load_state_dict(plain.state_dict())
    ours = mixer_class("normalized_linear_attn")(16, 2, feature_map="elementwise_product", mode="chunk")
    ours.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(means(x)[0], ours(x)[0]) and torch.equal(copy.deepcopy(means)(x)[0], means(x)[0])
        assert not torch.equal(means(x)[0], plain(x)[0])
    tied = LinearAttention(hidden_size=16, num_heads=2, feature_map="t2r", tie_feature_map_qk=True)
    assert tied.feature_map_q is tied.feature_map_k and {f"feature_map_{n}.layer.weight" for n in "qk"} <= tied.state_dict().keys()


@pytest.mark.parametrize("means", [False, True])
def test_a_class_derived_from_linear_attention_is_that_class_and_is_saved(means):
    x = torch.randn(1, 9, 16)
    with install_as_fla(replace=True):
        from fla.layers import LinearAttention

        class Own(LinearAttention):
            def __init__(self, width, means):
                super().__init__(hidden_size=width, num_heads=2, do_feature_map_norm=means)

        own, layer = Own(width=16, means=means), LinearAttention(hidden_size=16, num_heads=2, do_feature_map_norm=means)
        layer.load_state_dict(own.state_dict())
        again = pickle.loads(pickle.dumps(layer))
    assert type(own) is Own and type(again) is LinearAttention
    with torch.no_grad():
        assert torch.equal(own(x)[0], layer(x)[0]) and torch.equal(again(x)[0], layer(x)[0])


@pytest.mark.parametrize("means", [False, True])
def test_linear_attention_without_an_output_norm_hands_on_what_was_read(means):
    x = torch.randn(1, 40, 16)
    with install_as_fla(replace=True):
        from fla.layers import LinearAttention
    layer = LinearAttention(hidden_size=16, num_heads=2, feature_map="relu", output_norm="identity", do_feature_map_norm=means)
    assert layer.state_dict().keys() == {f"{n}_proj.weight" for n in "qkvo"}
    with torch.no_grad():
        q, k, v = (getattr(layer, f"{n}_proj")(x).unflatten(-1, (2, 8)) for n in "qkv")
        read, _ = chunkwise.linear_attn(q.relu(), k.relu(), v, normalize=means)
        assert torch.equal(layer(x)[0], layer.o_proj(read.flatten(-2)))


def test_a_ratio_decides_of_heads_and_the_first_layer_has_no_bound():
    with install_as_fla(replace=True):
        from fla.layers import GatedLinearAttention, HGRN2Attention, MultiScaleRetention
    x, bound = torch.randn(1, 9, 16), torch.full((16,), 0.9)
    with torch.no_grad():
        for index, bounded in ((0, False), (1, True), (None, True)):
            layer = HGRN2Attention(hidden_size=16, num_heads=2, expand_ratio=None, layer_idx=index)
            assert torch.equal(layer(x)[0], layer(x, lower_bound=bound)[0]) is not bounded
    assert HGRN2Attention(hidden_size=16, num_heads=2, expand_ratio=4).num_heads == 4
    with pytest.raises(ValueError, match="multiple of expand_ratio"):
        HGRN2Attention(hidden_size=16)
    for cls in GatedLinearAttention, MultiScaleRetention:
        layer = cls(hidden_size=16, num_heads=2)
        with pytest.raises(ValueError, match=f"{cls.__name__}: lower_bound"):
            layer(x, lower_bound=bound)
        apart = cls(hidden_size=16, num_heads=2, fuse_norm=False)
        assert any("g_norm_swish_gate" in n for n in layer.state_dict()) and "g_norm.weight" in apart.state_dict()
