"""Checkpoints of fla and transformers: read, computed and written back; what has no counterpart is refused by name."""

import copy
import importlib
import inspect
import json
from pathlib import Path

import pytest
import test_nn_paper as paper
import torch
from nn_agreement import agree
from torch.nn import functional as F

pytest.importorskip("transformers", reason="transformers is not installed")

from compat_case import KIMI, MODELS, MOE, SHARED, ids  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from chunkwise.cli.app import run  # noqa: E402
from chunkwise.models import ChunkwiseConfig, ChunkwiseForCausalLM  # noqa: E402
from chunkwise.models.convert import layouts, read_folder, read_model, write_folder, write_model  # noqa: E402
from chunkwise.nn import Mixer, all_mixers  # noqa: E402

RECORDED = json.loads((Path(__file__).parent / "fla_checkpoint.json").read_text())  # made by fla 0.6.0: config.json, names, shapes
FLA = [n for n in RECORDED if n in layouts() and layouts()[n].mixer in (*all_mixers(), "full_attention")]
OF_PLAIN_BLOCKS = [n for n in FLA if not layouts()[n].ours.keys() & {"mlp", "norm"}]  # the others: tests/test_convert_fla.py
TRANSFORMERS = {
    "qwen3_5": {},
    "qwen3_next": dict(mlp_only_layers=[0, 1]),
    "kimi_linear": dict(mlp_layer_types=["dense", "dense"]),
}


def checkpoint(name):
    """(config.json, random tensors) as fla 0.6.0 saves them."""
    made, gen = RECORDED[name], torch.Generator().manual_seed(0)
    state = {n: torch.randn(*s, generator=gen) * (1 if len(s) == 1 else 0.3) for n, s in made["tensors"].items()}
    return made["config"], {n: 1 + 0.2 * t if n.endswith("norm.weight") else t for n, t in state.items()}


def restated(model, state, x):
    """Logits of one sequence x [T], from a checkpoint's tensors alone: the papers' layers, token by token, in a plain pre-norm stack."""
    h = state["model.embeddings.weight"][x]
    for i, block in enumerate(model.model.layers):
        p = {n.removeprefix(f"model.layers.{i}."): t for n, t in state.items() if n.startswith(f"model.layers.{i}.")}
        own = {n.removeprefix("attn."): t for n, t in p.items() if n.startswith("attn.")}
        y = paper.normed(h, p["attn_norm.weight"])
        h = h + (mixed(block.attn, own, y) if isinstance(block.attn, Mixer) else attention(own, y, block.attn.num_heads))
        y = paper.normed(h, p["mlp_norm.weight"])
        gate, up = F.linear(y, p["mlp.gate_proj.weight"]), F.linear(y, p["mlp.up_proj.weight"])
        h = h + F.linear(F.silu(gate) * up, p["mlp.down_proj.weight"])
    return F.linear(paper.normed(h, state["model.norm.weight"]), state["lm_head.weight"])


def mixed(layer, p, x):
    return comba(layer, p, x) if layer.op == "comba" else getattr(paper, f"plain_{layer.op}")(layer, p, x)


def comba(layer, p, x):
    """As fla has it: q and the feedback become unit vectors after all."""
    q, k, v = paper.project(layer, p, x, silu_without_conv=True)
    e = k * p["decay"].sigmoid()[:, None]
    q, k, e = paper.unit(q - p["D"][:, None] * e), paper.unit(k), paper.unit(e)
    g = -p["A_log"].exp() * F.softplus(F.linear(x, p["a_proj.weight"]) + p["dt_bias"])
    beta, S, outputs = F.linear(x, p["b_proj.weight"]).sigmoid(), torch.zeros(*k.shape[1:], v.shape[2], dtype=x.dtype), []
    for t in range(len(x)):
        error = v[t] - torch.einsum("hkv,hk->hv", S, e[t])
        S = g[t].exp()[:, None, None] * S + k[t][..., None] * (beta[t][:, None] * error)[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", S, q[t]) * q.shape[2] ** -0.5)
    return paper.output(layer, p, x, torch.stack(outputs), "o_norm", F.linear(x, p["g_proj.weight"]).sigmoid())


def attention(p, x, heads):
    """Causal attention with rotary positions, grouped heads."""
    T, K = x.shape[0], p["q_proj.weight"].shape[0] // heads
    q, k, v = (paper.spread(F.linear(x, p[f"{n}_proj.weight"]).view(T, -1, K), heads) for n in "qkv")
    angle = torch.arange(T, dtype=x.dtype)[:, None, None] * 10000.0 ** (-2 * torch.arange(K // 2, dtype=x.dtype) / K)
    i = torch.exp(1j * angle)
    turn = lambda t: torch.view_as_real(torch.complex(t[..., : K // 2], t[..., K // 2 :]) * i).mT.flatten(-2)  # (a + bi) e^(i angle)
    scores = torch.einsum("thk,shk->hts", turn(q), turn(k)) * K**-0.5
    weights = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf")).softmax(-1)
    return F.linear(torch.einsum("hts,shv->thv", weights, v).flatten(1), p["o_proj.weight"])


@pytest.mark.parametrize("name", OF_PLAIN_BLOCKS)
def test_fla_checkpoint_computes_what_its_papers_say(name):
    config, state = checkpoint(name)
    if "model.lower_bounds" in state:  # the floors of its forget factors are the stack's business: tests/test_convert_fla.py
        config = config | {"use_lower_bound": False}
        del state["model.lower_bounds"]
    model, x = read_model(config, state), ids(21)
    wide = {n: t.double() for n, t in state.items()}
    with torch.no_grad():
        agree({"logits": model(x[None]).logits[0]}, {"logits": restated(model, wide, x)}, {"logits": restated(model, state, x)})


@pytest.mark.parametrize("name", FLA)
def test_fla_checkpoint_is_written_as_it_was_read(name):
    config, state = checkpoint(name)
    model = read_model(config, state)
    described, back = write_model(model, name)
    assert back.keys() == state.keys() and all(torch.equal(back[n], state[n]) for n in state)
    assert {n: v for n, v in described.items() if n in config and v != config[n]} in ({}, {"hidden_ratio": None})
    again = read_model(described, back)
    assert again.config.to_dict() == model.config.to_dict()


def test_mamba2_of_transformers_computes_the_same_through_ours_and_back(tmp_path):
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    groups = 2 if "group_size" in inspect.signature(MambaRMSNormGated).parameters else 1  # older versions normed all groups together
    sizes = dict(num_heads=4, head_dim=8, hidden_size=16, state_size=6, num_hidden_layers=2, n_groups=groups, vocab_size=37)
    theirs = Mamba2ForCausalLM(Mamba2Config(**sizes, chunk_size=16)).eval()
    with torch.no_grad():
        for n, p in theirs.named_parameters():
            if not n.endswith(("A_log", "dt_bias")):
                p.add_(0.2 * torch.randn_like(p))
    theirs.save_pretrained(tmp_path / "theirs")
    ours, x = read_folder(tmp_path / "theirs"), ids(2, 40)
    with torch.no_grad():
        truth, want = copy.deepcopy(ours).double()(x).logits.flatten(0, 1), theirs(x, use_cache=False).logits.flatten(0, 1)
        agree({"logits": ours(x).logits.flatten(0, 1)}, {"logits": truth}, {"logits": want})
        agree({"logits": want}, {"logits": truth}, {"logits": ours(x).logits.flatten(0, 1)})
    write_folder(ours, tmp_path / "back", "mamba2")
    again = Mamba2ForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert again.keys() == theirs.state_dict().keys() and all(torch.equal(again[n], t) for n, t in theirs.state_dict().items())


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_model_of_transformers_computes_the_same_through_ours_and_back(name, tmp_path):
    model, config, own = MODELS[name]
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    configuration = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    torch.manual_seed(0)
    given = {**SHARED, **own, **TRANSFORMERS[name], "layer_types": ["linear_attention"] * 2}
    theirs = getattr(modeling, model)(getattr(configuration, config)(**given)).eval()
    with torch.no_grad():
        for n, p in theirs.named_parameters():
            if n.endswith(("A_log", "dt_bias")):
                p.uniform_(-2.0, 1.0)
            elif "norm" in n:
                p.add_(0.2 * torch.randn_like(p))
    theirs.save_pretrained(tmp_path / "theirs")
    ours, x = read_folder(tmp_path / "theirs"), ids(2, 40)
    with torch.no_grad():
        truth, honest, got = (m(x, use_cache=False).logits for m in (copy.deepcopy(ours).double(), theirs, ours))
    agree({"logits": got.flatten(0, 1)}, {"logits": truth.flatten(0, 1)}, {"logits": honest.flatten(0, 1)})
    write_folder(ours, tmp_path / "back", theirs.config.model_type, tmp_path / "theirs")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(back) is type(theirs)
    for n, p in theirs.named_parameters():  # a norm's weight goes through 1 + w and back
        torch.testing.assert_close(dict(back.named_parameters())[n], p, rtol=0, atol=torch.finfo(torch.float32).eps)


def test_older_checkpoints_of_fla_are_read():
    config, state = checkpoint("gated_deltanet")
    now, older = read_model(config, state), dict(state)
    for i in range(2):
        where = f"model.layers.{i}"
        gate, up = older[f"{where}.mlp.gate_proj.weight"], older.pop(f"{where}.mlp.up_proj.weight")
        older[f"{where}.mlp.gate_proj.weight"] = torch.cat([gate, up])
        older[f"{where}.attn.D"] = torch.ones(4)
    then = read_model(config, older)
    assert all(torch.equal(a, b) for a, b in zip(now.state_dict().values(), then.state_dict().values(), strict=True))
    defaults = {n: v for n, v in config.items() if n not in ("conv_size", "use_gate", "hidden_act", "tie_word_embeddings")}
    assert read_model(defaults, state).config.to_dict() == now.config.to_dict()


def test_options_of_layers_arrive():
    for name, given in (("delta_net", dict(allow_neg_eigval=True)), ("kda", dict(safe_gate=True, lower_bound=-5.0))):
        config, state = checkpoint(name)
        model = read_model(config | given, state)
        assert all(getattr(model.config, n) == v for n, v in given.items() if n != "safe_gate")
        assert write_model(model, name)[0].items() >= given.items()


@pytest.mark.parametrize("name", ["elementwise_product", "hedgehog", "t2r", "dpfp", "relu", "identity"])
@pytest.mark.parametrize("switch", ["tie_feature_map_qk", "norm_q", "norm_k", "norm_feature_map"])
def test_feature_maps_of_fla_arrive_and_go_back(name, switch):
    """Tensors as fla has them: both maps of a tied pair are there."""
    config, state = checkpoint("linear_attn")
    config = config | {"feature_map": name, switch: True}
    model = ChunkwiseForCausalLM(layouts()["linear_attn"].configuration(config))
    described, made = write_model(model, "linear_attn")
    learnt = {"elementwise_product": 4, "hedgehog": 2, "t2r": 1}.get(name, 0)
    assert len(made.keys() - state.keys()) == 2 * 2 * learnt and state.keys() <= made.keys()  # a layer, a side
    assert described[switch] is (switch != "tie_feature_map_qk" or learnt > 0) and described["feature_map"] == name
    assert model.config.mixer == ("normalized_linear_attn" if switch == "norm_feature_map" else "linear_attn")
    again, x = read_model(described, made), ids(1, 9)
    assert again.config.to_dict() == model.config.to_dict() and torch.equal(again(x).logits, model.eval()(x).logits)


def test_two_maps_that_should_be_one_are_refused():
    config, _ = checkpoint("linear_attn")
    config = config | {"feature_map": "t2r", "tie_feature_map_qk": True}
    described, made = write_model(ChunkwiseForCausalLM(layouts()["linear_attn"].configuration(config)), "linear_attn")
    other = made | {n: t + 1 for n, t in made.items() if ".1.attn.feature_map_k." in n}
    with pytest.raises(ValueError, match=r"model.layers.1.attn.feature_map_k.layer.weight must be that of feature_map_q, .* is another"):
        read_model(described, other)


def test_hybrids_keep_their_attention_layers_as_they_are():
    config, _ = checkpoint("gated_deltanet")
    attn = dict(layers=[1], num_heads=4, num_kv_heads=2, qkv_bias=False, window_size=None, rope_theta=5e3)
    layout = layouts()["gated_deltanet"]
    for spec, types in (
        (attn, ["gated_delta_rule", "full_attention"]),
        ([attn | {"layers": [0], "window_size": 7}], ["sliding_attention", "gated_delta_rule"]),
        ([attn | {"layers": [0]}, attn | {"layers": [2], "window_size": 7}], ["full_attention", "gated_delta_rule", "sliding_attention"]),
    ):
        ours = layout.configuration(config | {"attn": spec, "num_hidden_layers": len(types)})
        assert ours.layer_types == types and ours.attention == dict(num_heads=4, num_kv_heads=2, head_dim=4, rope_theta=5e3)
        back = layout.description(ours)["attn"]
        assert back == (spec[0] if isinstance(spec, list) and len(spec) == 1 else spec)
        attention = ChunkwiseForCausalLM(ours).model.layers[types.index(next(t for t in types if "attention" in t))].attn
        assert (attention.num_heads, attention.num_kv_heads, attention.rope_theta) == (4, 2, 5e3)
    for change, said in (({"qkv_bias": True}, "qkv_bias"), ({"gate": 1}, "no gate")):
        with pytest.raises(ValueError, match=said):
            layout.configuration(config | {"attn": attn | change})
    with pytest.raises(ValueError, match="must be alike"):
        layout.configuration(config | {"attn": [attn | {"layers": [0]}, attn | {"num_heads": 2}]})
    windowed = layouts()["transformer"].configuration(RECORDED["transformer"]["config"] | {"window_size": 7})
    assert windowed.mixer == "sliding_attention" and windowed.sliding_window == 7
    assert layouts()["transformer"].description(windowed)["window_size"] == 7


def test_attention_of_its_own_shape_is_checked():
    hybrid = dict(layer_types=["gla", "full_attention"], num_hidden_layers=2, hidden_size=16, num_heads=2)
    assert ChunkwiseConfig(**hybrid, attention={"num_heads": 4}).attention_options() == {"num_heads": 4}
    with pytest.raises(ValueError, match="attention may hold num_heads, head_dim.*got 'heads'"):
        ChunkwiseConfig(**hybrid, attention={"heads": 4})
    with pytest.raises(ValueError, match="no layer of .*gla.* uses attention"):
        ChunkwiseConfig(mixer="gla", attention={"num_heads": 4})


def test_gate_parameters_stay_float32_in_a_half_checkpoint():
    config, state = checkpoint("kda")
    model = read_model(config, {n: t.bfloat16() for n, t in state.items()})
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    assert {d for n, d in dtypes.items() if n.endswith(("A_log", "dt_bias"))} == {torch.float32}
    assert {d for n, d in dtypes.items() if not n.endswith(("A_log", "dt_bias"))} == {torch.bfloat16}


def test_tied_embeddings_are_one_tensor_either_way():
    config, state = checkpoint("gla")
    del state["lm_head.weight"]
    model = read_model(config | {"tie_word_embeddings": True}, state)
    assert model.lm_head.weight is model.model.embeddings.weight
    assert write_model(model, "gla")[1].keys() == state.keys()


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("gla", dict(model_type="mamba3"), "model_type must be one of retnet, gla, .*got 'mamba3'"),
        ("gla", dict(clamp_min=-1.0), "gla: clamp_min must be None, which is what chunkwise computes, got -1.0"),
        ("gla", dict(gate_fn2="swish"), "gla: chunkwise does not know gate_fn2 = 'swish'"),
        ("gla", dict(attnres_block_size=2), "attnres_block_size must be None"),
        ("linear_attn", dict(feature_map="exp"), "feature_map must be one of .*'elementwise_product', .*got 'exp'"),
        ("delta_net", dict(qk_norm="sum"), "qk_norm must be 'l2'"),
        ("retnet", dict(vocab_size=38), r"model.embeddings.weight must be \[38, 16\], got \[37, 16\]"),
        ("retnet", dict(num_hidden_layers=1), "left over .*model.layers.1"),
        ("kda", dict(num_hidden_layers=3), "missing .*model.layers.2"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_name(name, change, said):
    config, state = checkpoint(name)
    with pytest.raises(ValueError, match=said):
        read_model(config | change, state)


@pytest.mark.parametrize(
    "own, change, said",
    [
        ("qwen3_5", dict(layer_types=["linear_attention", "full_attention"]), "linear_attention alone, got full_attention"),
        ("qwen3_next", MOE, r"layers \[0, 1\] are mixtures of experts"),
        ("kimi_linear", KIMI, r"layers \[1\] are mixtures of experts"),
    ],
)  # fmt: skip
def test_layers_of_transformers_that_we_have_not_are_refused(own, change, said):
    configuration = importlib.import_module(f"transformers.models.{own}.configuration_{own}")
    given = {**SHARED, **MODELS[own][2], **TRANSFORMERS[own], "layer_types": ["linear_attention"] * 2, "mlp_only_layers": None, **change}
    given = {n: v for n, v in given.items() if v is not None}
    config = getattr(configuration, MODELS[own][1])(**given).to_dict()
    with pytest.raises(ValueError, match=said):
        read_model(config, {})


def ours(**given):
    tiny = dict(vocab_size=37, hidden_size=16, num_hidden_layers=2, num_heads=2, intermediate_size=24)
    return ChunkwiseForCausalLM(ChunkwiseConfig(**{**tiny, **given}))


@pytest.mark.parametrize(
    "given, to, said",
    [
        (dict(mixer="gla"), "retnet", "retnet: layers must be retention or attention, got gla"),
        (dict(mixer="gla", gate_logit_normalizer=8), "gla", "config.json has no field for gate_logit_normalizer = 8"),
        (dict(mixer="kda", use_gate=False), "kda", "use_gate must be True, got False"),
        (dict(mixer="gated_delta_rule", use_short_conv=False), "qwen3_5_text", "use_short_conv must be True"),
        (dict(mixer="kda", expand_v=2), "kimi_linear", "keys and values must be alike"),
        (dict(mixer="comba"), "comba", "normalize_feedback must be True, got False"),
        (dict(mixer="gla", mixer_norm_eps=0.5), "gla", "mixer_norm_eps must be norm_eps"),
        (dict(mixer="gated_delta_rule", hidden_act="relu"), "qwen3_5_text", "hidden_act must be 'silu', got 'relu'"),
        (dict(mixer="full_attention", layer_types=["full_attention", "sliding_attention"], sliding_window=4), "transformer", "be alike"),
        (dict(mixer="kda", head_dim=4), "nothing", "model_type must be one of"),
    ],
)  # fmt: skip
def test_what_they_cannot_say_is_refused_by_name(given, to, said):
    with pytest.raises(ValueError, match=said):
        write_model(ours(**given), to)


def test_attention_of_a_transformer_keeps_its_shape():
    given = dict(num_heads=4, num_kv_heads=2, rope_theta=500.0)
    model, x = ours(mixer="full_attention", attention=given).eval(), ids(1, 9)
    assert torch.equal(read_model(*write_model(model, "transformer"))(x).logits, model(x).logits)


def test_tensors_of_a_layer_that_are_missing_or_left_over_are_named():
    config, state = write_model(ours(mixer="gated_delta_rule"), "qwen3_5_text")
    name = "model.layers.0.linear_attn.conv1d"
    with pytest.raises(ValueError, match="left over.*conv1d.bias"):
        read_model(config, {**state, f"{name}.bias": torch.ones(4)})
    with pytest.raises(ValueError, match="missing conv1d.weight"):
        read_model(config, {n: t for n, t in state.items() if n != f"{name}.weight"})


def test_an_output_gate_with_a_bias_has_no_place_in_kimi_linear():
    model = ours(mixer="kda", head_dim=8)
    with torch.no_grad():
        model.model.layers[0].attn.g_proj[1].bias.fill_(1)
    with pytest.raises(ValueError, match="g_proj.1.bias must be zero"):
        write_model(model, "kimi_linear")


def test_command_converts_folders_and_says_why_it_cannot(tmp_path, capsys):
    config, state = checkpoint("gated_deltanet")
    source = tmp_path / "fla"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text("{}")
    names = sorted(state)
    save_file({n: state[n] for n in names[::2]}, source / "model-00001-of-00002.safetensors")
    save_file({n: state[n] for n in names[1::2]}, source / "model-00002-of-00002.safetensors")
    assert run(["convert", str(source), str(tmp_path / "ours")]) == 0
    assert "gated_delta_rule, 2 layers" in capsys.readouterr().out
    model, x = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval(), ids(1, 9)
    assert torch.equal(model(x).logits, read_model(config, state)(x).logits) and (tmp_path / "ours" / "tokenizer.json").is_file()
    capsys.readouterr()
    assert run(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "gated_deltanet"]) == 0
    assert not capsys.readouterr().err
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys() and all(torch.equal(back[n], t) for n, t in state.items())
    for arguments, said in (
        ([source, tmp_path / "ours"], "is not empty"),
        ([tmp_path, tmp_path / "new"], "holds no config.json"),
        ([source, tmp_path / "new", "--to", "mamba3"], "--to must be chunkwise or one of"),
        ([tmp_path / "ours", tmp_path / "new", "--to", "gla"], "layers must be gla"),
    ):
        assert run(["convert", *map(str, arguments)]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_weights_of_pytorch_files_are_read_as_tensors_alone(tmp_path):
    config, state = checkpoint("retnet")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="holds no weights"):
        read_folder(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert torch.equal(read_folder(tmp_path).lm_head.weight, state["lm_head.weight"])
