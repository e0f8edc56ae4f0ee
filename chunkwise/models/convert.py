"""Checkpoints of other libraries: read into a chunkwise model, and written from one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..nn import Mixer
from .configuration import ChunkwiseConfig
from .layout import Layout, State
from .layout_fla import LAYOUTS as FLA
from .layout_mamba import LAYOUTS as MAMBA
from .layout_rwkv import LAYOUTS as RWKV
from .layout_transformers import LAYOUTS as TRANSFORMERS
from .modeling import ChunkwiseForCausalLM

WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
OTHERS = ("config.json", "README.md", "LICENSE*", ".*")  # not copied: written anew, or not about the tokenizer


@cache
def layouts() -> Mapping[str, Layout]:
    """Every layout by its model_type."""
    return MappingProxyType({layout.model_type: layout for layout in (*FLA, *RWKV, *MAMBA, *TRANSFORMERS)})


def layout_named(model_type: str | None) -> Layout:
    """Raises ValueError for a model_type that there is no layout of, with those that there are."""
    if model_type is None or model_type not in layouts():
        raise ValueError(f"model_type must be one of {', '.join(layouts())}, got {model_type!r}")
    return layouts()[model_type]


def read_model(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> ChunkwiseForCausalLM:
    """A model of ours from the config.json and the tensors of another library, in the dtype of the tensors; gate parameters in float32.

    Raises:
        ValueError: an unknown model_type; a field that has no counterpart; tensors that are missing, left over or of another shape: all by
            name.
    """
    layout = layout_named(config.get("model_type"))
    try:
        ours = layout.configuration(config)
    except KeyError as error:
        raise ValueError(f"{layout}: config.json has no {error.args[0]}") from None
    with torch.device("meta"):
        model = ChunkwiseForCausalLM(ours)
    try:
        read = layout.read(dict(state), ours)
    except KeyError as error:
        raise ValueError(f"{layout}: tensors do not fit: missing {error.args[0]}") from None
    return _fill(model, read, layout)


def _fill(model: ChunkwiseForCausalLM, state: State, layout: Layout) -> ChunkwiseForCausalLM:
    wanted = model.state_dict()
    if model.config.tie_word_embeddings:
        state.setdefault("lm_head.weight", state["model.embeddings.weight"])
    missing, left = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    if missing or left:
        raise ValueError(f"{layout}: tensors do not fit: missing {missing[:5] or 'none'}, left over {left[:5] or 'none'}")
    for name, t in state.items():
        if t.shape != wanted[name].shape:
            raise ValueError(f"{layout}: {name} must be {list(wanted[name].shape)}, got {list(t.shape)}")
    kept = {f"{where}.{n}" for where, m in model.named_modules() if isinstance(m, Mixer) for n in m.keep_float32}
    model.load_state_dict({n: t.float() if n in kept else t.clone() for n, t in state.items()}, assign=True)
    model.tie_weights()
    return model.eval()


def write_model(model: ChunkwiseForCausalLM, model_type: str) -> tuple[dict[str, Any], State]:
    """(config.json, tensors) of a model of ours as another library has them.

    Raises:
        ValueError: an unknown model_type; something about the model that they cannot say, by name.
    """
    layout = layout_named(model_type)
    config = layout.description(model.config)
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    state = {n: t.detach() for n, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return config, {n: t.contiguous() for n, t in layout.write(state, model.config).items()}


def read_folder(folder: str | Path) -> ChunkwiseForCausalLM:
    """A model of ours from a folder with config.json and weights: safetensors, whole or in shards, or PyTorch's (read as tensors alone).

    Raises:
        ValueError: no config.json or no weights there; and what `read_model` refuses.
    """
    folder = Path(folder)
    config = _config(folder)
    if config.get("model_type") == ChunkwiseConfig.model_type:
        return ChunkwiseForCausalLM.from_pretrained(folder)
    return read_model(config, _tensors(folder))


def write_folder(model: ChunkwiseForCausalLM, folder: str | Path, model_type: str = ChunkwiseConfig.model_type, source: Any = None) -> None:
    """Save a model as another library reads it, or as ours; what lies beside the weights in `source` (the tokenizer) is copied.

    Raises:
        ValueError: `folder` is not empty; and what `write_model` refuses.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    if model_type == ChunkwiseConfig.model_type:
        model.save_pretrained(folder)
    else:
        from huggingface_hub import save_torch_state_dict

        config, state = write_model(model, model_type)
        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(state, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if source is not None:
        skipped = {p for pattern in (*WEIGHTS, *OTHERS) for p in Path(source).glob(pattern)}
        for file in sorted(p for p in Path(source).iterdir() if p.is_file() and p not in skipped and not (folder / p.name).exists()):
            shutil.copyfile(file, folder / file.name)


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json")
    return json.loads((folder / "config.json").read_text())


def _tensors(folder: Path) -> State:
    from safetensors.torch import load_file

    state: State = {}
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:
        state |= load_file(shard)
    for shard in [] if shards else sorted(folder.glob("pytorch_model*.bin")):
        state |= torch.load(shard, map_location="cpu", weights_only=True)
    if not state:
        raise ValueError(f"{folder} holds no weights: neither *.safetensors nor pytorch_model*.bin")
    return state

