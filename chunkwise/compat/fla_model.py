"""Models of flash-linear-attention under its names: its configurations' fields and its checkpoints, the one chunkwise model behind them.

Needs transformers. Those whose tensors have other names here (RWKV-6, RWKV-7, Mamba-2) have no such class: `chunkwise convert` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from ..models import ChunkwiseConfig, ChunkwiseForCausalLM, ChunkwiseModel
from ..models.layout import Layout
from ..models.layout_fla import LAYOUTS

OURS = tuple(f.name for f in fields(ChunkwiseConfig) if f.name in ChunkwiseConfig.__annotations__)


@cache
def models() -> dict[str, Any]:
    """GLAConfig, GLAModel, GLAForCausalLM and the others, by name."""
    return {cls.__name__: cls for layout in LAYOUTS for cls in _classes(layout)}


def places() -> Iterator[tuple[str, type]]:
    """(dotted path below fla, the class) of all of them."""
    for name, cls in models().items():
        kind = cls.__module__.rpartition(".")[2]
        of_config = issubclass(cls, PretrainedConfig)
        if not of_config:
            yield name, cls
        file = f"{'configuration' if of_config else 'modeling'}_{kind}"
        for where in ("models", f"models.{kind}", f"models.{kind}.{file}"):
            yield f"{where}.{name}", cls


def register() -> list[str]:
    """Tell transformers' Auto classes of them; the model types that it did not know before."""
    new = []
    for name, cls in models().items():
        if issubclass(cls, PretrainedConfig) and cls.model_type not in CONFIG_MAPPING:
            base = name.removesuffix("Config")
            AutoConfig.register(cls.model_type, cls)
            AutoModel.register(cls, models()[f"{base}Model"])
            AutoModelForCausalLM.register(cls, models()[f"{base}ForCausalLM"])
            new.append(cls.model_type)
    return new


def forget(model_types: list[str]) -> None:
    """Take back what `register` did, where it still stands."""
    for kind in model_types:
        cls = CONFIG_MAPPING._extra_content.get(kind)
        if cls in models().values():
            del CONFIG_MAPPING._extra_content[kind]
            for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
                mapping._extra_content.pop(cls, None)


def _classes(layout: Layout) -> Iterator[type]:
    base = layout.architecture.removesuffix("ForCausalLM")
    renamed = {theirs: ours for theirs, ours in layout.names.items() if theirs != ours}

    class Config(ChunkwiseConfig):
        model_type: ClassVar[str] = layout.model_type
        attribute_map: ClassVar[dict[str, str]] = {**ChunkwiseConfig.attribute_map, **renamed}

        def __init__(self, **given: Any):
            """fla's fields by name, with its defaults. Raises ValueError naming a field, or a value, that chunkwise has nothing for."""
            further = {n: given.pop(n) for n in given.keys() & _transformers() - {*OURS}}
            ours = layout.configuration(given)
            super().__init__(**{n: getattr(ours, n) for n in OURS}, **further)

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            """As fla reads its config.json: every field is looked at."""
            return PretrainedConfig.from_dict.__func__(cls, config_dict, **kwargs)

        def to_dict(self) -> dict[str, Any]:
            """fla's config.json."""
            kept = {n: v for n, v in super().to_dict().items() if n not in OURS}
            return {**layout.description(self), **kept, "model_type": layout.model_type}

        def to_diff_dict(self) -> dict[str, Any]:
            """What goes into a file: of transformers' own fields those that are not as everywhere."""
            usual, theirs = PretrainedConfig().to_dict(), {*layout.description(self), "transformers_version"}
            return {n: v for n, v in self.to_dict().items() if n in theirs or n not in usual or v != usual[n]}

        def _get_generation_parameters(self) -> dict[str, Any]:
            """None: older versions of transformers would build a configuration from fla's defaults to tell, some of which we refuse."""
            return {}

    class Loaded:
        config_class = Config
        beside: ClassVar[tuple[str, ...]] = ()  # tensors that a checkpoint may have besides this model's

        @classmethod
        def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
            """As in transformers; a checkpoint whose tensors are not all of this model's is refused by name.

            Raises:
                ValueError: tensors that are missing or left over.
            """
            model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
            missing, spare = sorted(info["missing_keys"]), {*info["unexpected_keys"]} - {*cls.beside}
            left = sorted(n for n in spare if layout.read({n: torch.empty(0)}, model.config))  # but what reading drops
            if missing or left:
                raise ValueError(
                    f"{layout}: tensors do not fit: missing {missing[:5] or 'none'}, left over {left[:5] or 'none'}; "
                    "`chunkwise convert` reads fla's older forms too"
                )
            return (model, info) if output_loading_info else model

        def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
            state = kwargs.pop("state_dict", None)
            state = layout.write(self.state_dict() if state is None else state, self.config)  # type: ignore[attr-defined]
            return super().save_pretrained(*args, state_dict=state, **kwargs)  # type: ignore[misc]

    class Model(Loaded, ChunkwiseModel):
        beside = ("lm_head.weight",)

    class ForCausalLM(Loaded, ChunkwiseForCausalLM):
        pass

    for cls, kind in ((Config, "Config"), (Model, "Model"), (ForCausalLM, "ForCausalLM")):
        cls.__name__ = cls.__qualname__ = f"{base}{kind}"
        cls.__module__ = f"fla.models.{layout.model_type}"
        yield cls


@cache
def _transformers() -> frozenset[str]:
    return frozenset(PretrainedConfig().to_dict()) | {"name_or_path", "_name_or_path", "torch_dtype", "dtype", "attn_implementation"}
