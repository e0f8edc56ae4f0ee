"""fla's models by their names: its configurations and checkpoints, our model behind them."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from chunkwise import compat  # noqa: E402
from chunkwise.compat import install_as_fla  # noqa: E402
from chunkwise.models import ChunkwiseForCausalLM  # noqa: E402
from chunkwise.models.convert import read_model  # noqa: E402
from chunkwise.models.layout_fla import LAYOUTS  # noqa: E402

RECORDED = json.loads((Path(__file__).parent / "fla_checkpoint.json").read_text())  # made by fla 0.6.0: config.json, names, shapes
by_name = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def imported(name):
    import fla.models

    return getattr(fla.models, name)


@by_name
def test_models_of_fla_are_built_saved_and_loaded_under_their_names(layout, tmp_path):
    made, x = RECORDED[layout.model_type], torch.randint(1, 37, (2, 19), generator=torch.Generator().manual_seed(0))
    base = layout.architecture.removesuffix("ForCausalLM")
    with install_as_fla(replace=True):
        torch.manual_seed(0)
        model = imported(layout.architecture)(imported(f"{base}Config")(**made["config"])).eval()
        assert isinstance(model, ChunkwiseForCausalLM) and type(model).__name__ == layout.architecture
        model.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert {n: v for n, v in written.items() if n in made["config"] and v != made["config"][n]} in ({}, {"hidden_ratio": None})
        again, headless = AutoModelForCausalLM.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)
        assert type(again) is type(model) and type(headless) is imported(f"{base}Model")
        assert imported(layout.architecture) is getattr(sys.modules["fla"], layout.architecture)
    state = model.state_dict()
    assert {n: list(t.shape) for n, t in state.items()} == made["tensors"]
    assert all(torch.equal(again.state_dict()[n], t) for n, t in state.items())
    with torch.no_grad():
        logits = model(x).logits
        assert torch.equal(again(x).logits, logits) and torch.equal(headless(x).last_hidden_state, model.model(x).last_hidden_state)
        assert torch.equal(read_model(written, state)(x).logits, logits)


def test_a_tied_feature_map_is_saved_under_both_names_and_loaded(tmp_path):
    sizes = dict(hidden_size=16, num_hidden_layers=2, vocab_size=37, num_heads=2)
    with install_as_fla(replace=True):
        config = imported("LinearAttentionConfig")(**sizes, feature_map="hedgehog", tie_feature_map_qk=True)
        model, x = imported("LinearAttentionForCausalLM")(config).eval(), torch.arange(9)[None]
        model.save_pretrained(tmp_path)
        assert sum(".feature_map_k." in n for n in load_file(tmp_path / "model.safetensors")) == 4
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(x).logits, model(x).logits)


def test_generation_and_fields_go_by_flas_names():
    with install_as_fla(replace=True):
        config = imported("GLAConfig")(hidden_size=16, num_hidden_layers=2, vocab_size=37, num_heads=2, use_output_gate=False)
        model = AutoModelForCausalLM.from_config(config).eval()
    assert config.use_output_gate is False and config.use_gate is False and config.model_type == "gla"
    assert model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=4, do_sample=False).shape == (1, 7)


def test_what_chunkwise_has_not_is_refused_by_name(tmp_path):
    sizes = dict(hidden_size=16, num_hidden_layers=2, vocab_size=37, num_heads=2)
    with install_as_fla(replace=True):
        with pytest.raises(ValueError, match="gla: clamp_min must be None"):
            imported("GLAConfig")(clamp_min=-1.0)
        with pytest.raises(ValueError, match="gla: chunkwise does not know invented"):
            imported("GLAConfig")(invented=1)
        with pytest.raises(ValueError, match="hgrn2: expand_ratio must divide hidden_size = 64, got 128"):
            imported("HGRN2Config")(hidden_size=64)
        with pytest.raises(ValueError, match="hgrn2: num_heads must divide hidden_size = 64, got None"):
            imported("HGRN2Config")(hidden_size=64, expand_ratio=None)
        with pytest.raises(ImportError, match="RWKV7ForCausalLM"):
            from fla.models import RWKV7ForCausalLM  # noqa: F401
        model = imported("GLAForCausalLM")(imported("GLAConfig")(**sizes))
        state = model.state_dict()
        del state["model.norm.weight"]
        model.save_pretrained(tmp_path, state_dict=state)
        with pytest.raises(ValueError, match="gla: tensors do not fit: missing .'model.norm.weight'"):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_undoing_takes_the_model_types_back():
    new = [layout.model_type for layout in LAYOUTS if layout.model_type not in CONFIG_MAPPING]
    with install_as_fla(replace=True):
        assert all(CONFIG_MAPPING[name].__module__ == f"fla.models.{name}" for name in new)
    assert not any(name in CONFIG_MAPPING for name in new)


def test_without_transformers_operators_and_layers_are_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "chunkwise.compat.fla_model", None)  # importing it fails
    monkeypatch.delattr(compat, "fla_model", raising=False)
    with install_as_fla(replace=True):
        from fla.layers import GatedDeltaNet  # noqa: F401
        from fla.models.utils import Cache  # noqa: F401
        from fla.ops.gla import chunk_gla  # noqa: F401

        with pytest.raises(ImportError, match="GLAConfig"):
            from fla.models import GLAConfig  # noqa: F401
