"""How other libraries write a model of ours down: the fields of their config.json and the names of their tensors, both ways."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from ..nn import all_mixers
from .configuration import ATTENTION, ChunkwiseConfig

Fields = dict[str, Any]
State = dict[str, Tensor]
EMPTY: Mapping[str, Any] = MappingProxyType({})
SHARED = (  # the same name and meaning everywhere
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "hidden_act", "initializer_range", "tie_word_embeddings",
    "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
LAYERS = ("mixer", "layer_types", "attention", "sliding_window")  # ours, which `arrange` makes of theirs
STRUCTURE = ("mlp", "norm", "embedding_norm")  # ours, which each layout has but one value of
SIZES = ("head_dim", "expand_k", "expand_v")  # said in each library's own way: see `head_sizes`


@dataclass(frozen=True)
class Layout:
    """One model_type of another library.

    Every field of a config.json is accounted for: it is one of ours (`names`), has the one value that we compute (`fixed`), or changes no
    result (`aside`); anything else is refused by name.
    """

    model_type: str
    architecture: str  # the class that config.json names
    mixer: str  # the member, or "full_attention"
    names: Mapping[str, str] = field(default_factory=lambda: EMPTY)  # theirs -> ours, beyond SHARED
    defaults: Mapping[str, Any] = field(default_factory=lambda: EMPTY)  # what a missing field means to them
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: EMPTY)  # the values that mean what we do; the first is written
    aside: frozenset[str] = frozenset()
    ours: Mapping[str, Any] = field(default_factory=lambda: EMPTY)  # fields of ours that are always so
    hybrid: bool = False  # some layers may be attention
    instead: str | None = None  # another member that `arrange` may say, for all of a model's layers
    values: Mapping[str, Mapping[Any, Any]] = field(default_factory=lambda: EMPTY)  # by our field: their word -> ours
    arrange: Callable[[Fields], Fields] = lambda given: given  # their fields, checked and unfolded, before anything else
    deduce: Callable[[ChunkwiseConfig], Fields] = lambda config: {}  # further fields of theirs
    read: Callable[[State, ChunkwiseConfig], State] = lambda state, config: state
    write: Callable[[State, ChunkwiseConfig], State] = lambda state, config: state
    note: str = ""  # what else differs, for docs/compat.md

    def __str__(self) -> str:
        return self.model_type

    def configuration(self, given: Mapping[str, Any]) -> ChunkwiseConfig:
        """Our configuration of their config.json.

        Raises:
            ValueError: a field that we have no counterpart for, or a value of it; naming both.
        """
        if self.mixer not in (*all_mixers(), *ATTENTION):
            raise ValueError(f"{self}: chunkwise has no layer for {self.mixer}")
        full = self.arrange({**self.defaults, **given})
        result: Fields = dict(self.ours)
        for name, value in full.items():
            target = name if name in (*SHARED, *LAYERS) else self.names.get(name)
            if target is not None:
                if value is not None:
                    result[target] = self._word(target, name, value)
            elif name in self.fixed:
                if value not in self.fixed[name]:
                    raise ValueError(f"{self}: {name} must be {_either(self.fixed[name])}, which is what chunkwise computes, got {value!r}")
            elif name not in self.aside and name not in _base() and not name.startswith("_"):
                raise ValueError(f"{self}: chunkwise does not know {name} = {value!r}")
        return ChunkwiseConfig(**{"mixer": self.mixer, **result})

    def _word(self, target: str, name: str, value: Any) -> Any:
        words = self.values.get(target)
        if words is None:
            return value
        if value not in words:
            raise ValueError(f"{self}: {name} must be one of {list(words)}, got {value!r}")
        return words[value]

    def description(self, config: ChunkwiseConfig) -> Fields:
        """Their config.json of our configuration.

        Raises:
            ValueError: what they cannot say, naming the field.
        """
        mixer = self.instead if self.instead and config.mixer == self.instead else self.mixer
        types, allowed = set(config.layer_types or []), {mixer, *(ATTENTION if self.hybrid else ())}
        if not types <= allowed or (config.mixer in ATTENTION) != (mixer in ATTENTION):
            kinds = f"{mixer}{' or attention' if self.hybrid and mixer not in ATTENTION else ''}"
            raise ValueError(f"{self}: layers must be {kinds}, got {', '.join(sorted({str(config.mixer), *types}))}")
        back = {ours: theirs for theirs, ours in self.names.items()}
        result: Fields = {"model_type": self.model_type, "architectures": [self.architecture]}
        result |= {name: allowed[0] for name, allowed in self.fixed.items()}
        for name in (*SHARED, *back):
            value = getattr(config, name)
            if value is None and name in back:
                value = _own_default(config, name)
            words = {ours: theirs for theirs, ours in reversed(list(self.values.get(name, EMPTY).items()))}
            if words and value is not None and value not in words:
                raise ValueError(f"{self}: {name} must be {_either(tuple(words))}, got {value!r}")
            result[back.get(name, name)] = words.get(value, value)
        for name in STRUCTURE:
            if name not in self.ours and name not in back and getattr(config, name) != getattr(ChunkwiseConfig, name):
                raise ValueError(f"{self}: {name} must be {getattr(ChunkwiseConfig, name)!r}, got {getattr(config, name)!r}")
        for name in _optional_fields():
            known = name in back or name in self.ours or name in SIZES or name in LAYERS
            if not known and getattr(config, name) is not None and getattr(config, name) != _own_default(config, name):
                raise ValueError(f"{self}: config.json has no field for {name} = {getattr(config, name)!r}")
        if "mixer_norm_eps" not in self.ours and config.mixer_norm_eps not in (None, config.norm_eps):
            raise ValueError(f"{self}: mixer_norm_eps must be norm_eps = {config.norm_eps}, got {config.mixer_norm_eps}")
        for name, value in self.ours.items():
            given = getattr(config, name)
            if given is None:
                given = config.norm_eps if name == "mixer_norm_eps" else _own_default(config, name)
            if given not in (None, value):
                raise ValueError(f"{self}: {name} must be {value!r}, got {given!r}")
        return result | self.deduce(config)


def _optional_fields() -> Iterator[str]:
    """The fields of mixers that are None unless given and change results."""
    taken = {option for mixer in all_mixers().values() for option in mixer.options()} - {"chunk_size"}
    return (f.name for f in fields(ChunkwiseConfig) if f.name in taken and f.default is None)


def head_sizes(config: ChunkwiseConfig) -> tuple[int, int]:
    """K and V of the member's heads."""
    D, H = config.hidden_size, config.num_heads
    expand_k, expand_v = (_own_default(config, n) if getattr(config, n) is None else getattr(config, n) for n in ("expand_k", "expand_v"))
    K = config.head_dim or round(D * (1.0 if expand_k is None else expand_k) / H)
    return K, round((config.head_dim or D / H) * expand_v)


def _own_default(config: ChunkwiseConfig, name: str) -> Any:
    """What a field that is None means to the member."""
    mixer = all_mixers().get(str(config.mixer))
    if mixer is None:
        return {"rope_theta": 10000.0}.get(name)
    for base in mixer.__mro__:
        if "__init__" in vars(base):
            given = inspect.signature(vars(base)["__init__"]).parameters.get(name)
            if given is not None and given.default not in (None, inspect.Parameter.empty):
                return given.default
    value = getattr(mixer, name, None)
    return None if callable(value) else value


@cache
def _base() -> frozenset[str]:
    """Fields that transformers puts into every config.json."""
    return frozenset(PretrainedConfig().to_dict()) | {"torch_dtype", "dtype", "model_type", "auto_map", "output_attentions"}


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(v) for v in values)
