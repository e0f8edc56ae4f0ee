"""Saving, loading, initialising and configuring the model."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from model_case import ATTENTION, build, cache_of, config, flat, ids, kinds, recurrent_kinds, wide
from nn_agreement import agree
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from chunkwise.models import ChunkwiseConfig, ChunkwiseForCausalLM, ChunkwiseModel
from chunkwise.models.configuration import fields_of
from chunkwise.nn import Mixer, all_mixers, mixer_class
from chunkwise.spec import PREFIX


@kinds
@pytest.mark.parametrize("tied", [False, True])
def test_saved_model_loads_to_the_bit(kind, tied, tmp_path):
    model, x = build(**kind, tie_word_embeddings=tied), ids(1, 9)
    with torch.no_grad():
        for p in model.parameters():  # nothing keeps its initial value, so nothing can be silently initialised again
            p.add_(torch.randn_like(p) / 8)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, ChunkwiseForCausalLM) and (tmp_path / "model.safetensors").exists()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in loaded.state_dict().items())
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert torch.equal(loaded.generate(x, max_new_tokens=8, do_sample=False), model.generate(x, max_new_tokens=8, do_sample=False))
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(x).last_hidden_state, model.model(x).last_hidden_state)
    assert (loaded.lm_head.weight is loaded.model.embeddings.weight) == tied


def test_checkpoint_keys_are_those_of_released_checkpoints():
    keys = set(build(mixer="gated_delta_rule", num_hidden_layers=1).state_dict())
    attn = {"A_log", "dt_bias", "o_norm.weight", *(f"{n}_proj.weight" for n in "qkvabgo"), *(f"{n}_conv1d.weight" for n in "qkv")}
    layer = {"attn_norm.weight", "mlp_norm.weight", *(f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")), *(f"attn.{n}" for n in attn)}
    assert keys == {"model.embeddings.weight", "model.norm.weight", "lm_head.weight", *(f"model.layers.0.{n}" for n in layer)}


@pytest.mark.parametrize("name", [n for n in all_mixers() if mixer_class(n).keep_float32])
def test_loading_in_half_precision_keeps_gate_parameters(name, tmp_path):
    model = build(mixer=name)
    model.save_pretrained(tmp_path)
    for half in (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), copy.deepcopy(model).to(torch.bfloat16)):
        for n, p in half.named_parameters():
            exact = n.endswith(mixer_class(name).keep_float32)
            assert p.dtype == (torch.float32 if exact else torch.bfloat16)
            assert not exact or torch.equal(p, model.state_dict()[n]) and p._no_weight_decay
        assert half(ids(1, 70)).logits.dtype == torch.bfloat16


@recurrent_kinds
def test_half_precision_is_near_the_truth(kind):
    """As near as the rounded weights and activations of the same model allow: the recurrent form is the yardstick."""
    model = build(**kind)
    half, x = copy.deepcopy(model).to(torch.bfloat16).train(), ids(1, 70)
    tokens = copy.deepcopy(half)
    for m in tokens.modules():
        if isinstance(m, Mixer):
            m.mode = "fused_recurrent"
    with torch.no_grad():
        agree(flat(half(x).logits), flat(copy.deepcopy(half).double()(x).logits), flat(tokens(x).logits))


@kinds
def test_model_built_on_meta_initialises_like_any_other(kind):
    with torch.device("meta"):
        model = ChunkwiseForCausalLM(config(**kind))
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    for m in model.modules():
        m._is_hf_initialized = False
    torch.manual_seed(0)
    model.init_weights()
    plain = build(**kind)
    for (n, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert a.isfinite().all() and a.dtype == b.dtype and a.requires_grad, n
        assert abs(a.std() - b.std()) <= 0.5 * b.std() + 1e-12 if b.numel() > 200 else True, n
        if n.endswith(("A_log", "dt_bias", "norm.weight")):
            assert a.mean() * b.mean() > 0, n
    assert isinstance(model, PreTrainedModel) and model(ids(1, 5)).logits.isfinite().all()


def test_initial_convolutions_carry_the_signal():
    """transformers' own initialisation would make them 50 times smaller than their inputs."""
    model = build(initializer_range=0.02)
    weight = model.model.layers[0].attn.q_conv1d.weight
    assert 0.4 < weight.abs().max() <= 0.5


def test_importing_layers_needs_no_transformers():
    code = "import sys, chunkwise.nn; chunkwise.nn.GatedDeltaNet; sys.exit('transformers' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_configuration_key_changes_something():
    """Flip each key: the parameters or the function change, or the key is refused where no layer uses it."""
    flips = dict(
        vocab_size=41, hidden_size=32, num_hidden_layers=3, mixer="delta_rule", layer_types=["gla", "kda"], num_heads=4, num_kv_heads=1,
        num_v_heads=4, head_dim=4, expand_k=2, expand_v=3.0, use_short_conv=True, conv_size=2, conv_bias=True, feature_map="relu",
        tie_feature_map=True, norm_q=True, norm_k=True,
        use_gate=False, rope_theta=10.0, gate_low_rank_dim=3, gate_logit_normalizer=2.0, lower_bound=-1.0, allow_neg_eigval=True,
        hidden_ratio=64.0, intermediate_size=48, hidden_act="gelu", norm_eps=0.5, initializer_range=0.01, tie_word_embeddings=True,
        use_cache=False, output_logits=False, sliding_window=3, use_lower_bound=False, num_slots=3, num_householder=3,
        use_forget_gate=False, correction_factor=0.5, normalize_feedback=True, state_size=6, num_groups=2,
        attention=dict(num_heads=4, head_dim=4), mixer_norm_eps=0.5, norm="layer", embedding_norm=True, mlp="channel_mix",
        proj_low_rank_dim=3, decay_low_rank_dim=3, a_low_rank_dim=3, v_low_rank_dim=3, squash_x=1.2, squash_eps=0.1,
    )  # fmt: skip
    elsewhere = {"mode", "chunk_size", "pad_token_id", "bos_token_id", "eos_token_id"}  # the form, tested below, and generation's business
    own = set(ChunkwiseConfig.__annotations__) - {"model_type", "keys_to_ignore_at_inference", "attribute_map"}
    assert own == flips.keys() | elsewhere
    needs = dict(conv_size=dict(use_short_conv=True), conv_bias=dict(use_short_conv=True), hidden_ratio=dict(intermediate_size=None),
                 tie_feature_map=dict(feature_map="hedgehog"))  # fmt: skip
    x = ids(1, 20)
    for key, value in flips.items():
        users = [m for m in ("gla", *all_mixers()) if key in fields_of(mixer_class(m))] or ["gla"]
        softmax = {"sliding_window": "sliding_attention", "attention": "full_attention"}.get(key)
        start = dict(ATTENTION[softmax] if softmax else dict(mixer=users[0], **needs.get(key, {})))
        if key == "layer_types":
            start.pop("mixer")
        before, after = build(**start), build(**{**start, key: value})
        if key == "use_cache":
            assert cache_of(before(x)) is not None and cache_of(after(x)) is None
            continue
        if key == "output_logits":
            assert before(x, labels=x).logits is not None and after(x, labels=x).logits is None
            continue
        shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (before, after)]
        assert shapes[0] != shapes[1] or not torch.equal(before(x).logits, after(x).logits), key


def test_mode_and_chunk_size_reach_the_layers_and_change_no_result():
    for name in all_mixers():
        model, x = build(mixer=name), ids(1, 70)
        for form in model.model.layers[0].attn.forms:
            mode = PREFIX[form]
            other = build(mixer=name, mode=mode, chunk_size=16)
            assert all(b.attn.mode == mode and b.attn.chunk_size == 16 for b in other.model.layers)
            with torch.no_grad():
                agree(flat(other(x).logits), flat(wide(model)(x).logits), flat(model(x).logits))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (dict(num_layers=3), TypeError, "unknown key 'num_layers'; did you mean 'num_hidden_layers'"),
        (dict(conv_sizes=4), TypeError, "did you mean 'conv_size'"),
        (dict(mixer="mamba7"), ValueError, "mixer and layer_types must be among"),
        (dict(layer_types=["gla"]), ValueError, "names 1 layers, num_hidden_layers is 2"),
        (dict(layer_types=["gla", "gla"], mixer="kda"), ValueError, "mixer = 'kda' is none of"),
        (dict(gate_low_rank_dim=8), ValueError, "no layer of .* uses gate_low_rank_dim"),
        (dict(mixer="sliding_attention"), ValueError, "sliding_attention layers need sliding_window"),
        (dict(sliding_window=8), ValueError, "no layer of .* uses sliding_window"),
        (dict(hidden_act="mish"), ValueError, "activation must be"),
        (dict(intermediate_size=48, hidden_ratio=4.0), ValueError, "contradicts"),
        (dict(expand_v="wide"), TypeError, "expand_v must be float.*, got 'wide'"),
        (dict(use_short_conv="maybe"), TypeError, "use_short_conv must be bool.*, got 'maybe'"),
        (dict(tie_word_embeddings=1), TypeError, "tie_word_embeddings must be bool, got 1"),
        (dict(num_heads=2.0), TypeError, "num_heads must be int, got 2.0"),
        (dict(num_heads=True), TypeError, "num_heads must be int, got True"),
        (dict(layer_types="gla"), TypeError, "layer_types must be list.*, got 'gla'"),
        (dict(hidden_ratio="4"), TypeError, "hidden_ratio must be float.*, got '4'"),
        (dict(attention=["num_heads"]), TypeError, "attention must be dict"),
        (dict(layer_types=["gla", "full_attention"], attention=dict(rope_theta="far")), TypeError, "rope_theta must be float.*, got 'far'"),
        (dict(norm_eps=-1e-6), ValueError, "norm_eps must be at least 0, got -1e-06"),
        (dict(initializer_range=float("nan")), ValueError, "initializer_range must be finite, got nan"),
        (dict(expand_v=float("inf")), ValueError, "expand_v must be finite, got inf"),
        (dict(mixer="rwkv7", a_low_rank_dim=-1), ValueError, "a_low_rank_dim must be at least 1, got -1"),
    ],
)
def test_configuration_refuses_by_name(changes, error, says):
    with pytest.raises(Exception, match=says) as caught:
        config(**changes)
    cause = caught.value.__cause__ or caught.value
    assert isinstance(caught.value, error) or isinstance(cause, error)


def test_mode_without_a_form_is_refused_by_name():
    with pytest.raises(ValueError, match="kda: mode must be one of"):
        build(mixer="kda", mode="parallel")


def test_unknown_keys_of_a_file_warn(tmp_path):
    config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "invented_later": 3}))
    with pytest.warns(UserWarning, match="invented_later"):
        loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.mixer == "gated_delta_rule" and not hasattr(loaded, "invented_later")
    assert AutoConfig.from_pretrained(tmp_path, norm_eps=0.25).norm_eps == 0.25


def test_model_without_mixer_has_no_memory():
    model, x = build(mixer="none"), ids(1, 12)
    changed = x.clone()
    changed[:, :11] = ids(1, 11, seed=3)
    assert torch.equal(model(x).logits[:, -1], model(changed).logits[:, -1])
    assert not any("attn" in n for n, _ in model.named_parameters()) and isinstance(model.model, ChunkwiseModel)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_heads"])
def test_sizes_below_one_are_refused(field):
    with pytest.raises(ValueError, match=f"^ChunkwiseConfig: {field} must be at least 1, got 0"):
        ChunkwiseConfig(**{field: 0})


def test_an_unknown_mixer_is_a_value_error():
    with pytest.raises(ValueError, match="^ChunkwiseConfig: mixer and layer_types must be among"):
        ChunkwiseConfig(mixer="nope")


def test_feed_forward_layers_that_look_back_need_recurrent_layers_beside_them():
    with pytest.raises(ValueError, match="mlp='channel_mix' keeps its state beside a recurrent layer's, got full_attention layers"):
        config(layer_types=["rwkv7", "full_attention"], mixer="rwkv7", mlp="channel_mix")
    for field in "mlp", "norm":
        with pytest.raises(ValueError, match=f"{field} must be one of .*, got 'other'"):
            config(**{field: "other"})
