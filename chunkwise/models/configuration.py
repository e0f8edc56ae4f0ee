"""The one configuration of all chunkwise models."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import warnings
from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin

from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig

from ..nn import Mixer, all_mixers, mixer_class
from ..nn.activation import activation
from ..nn.mlp import intermediate_size

SHAPE = frozenset({"head_dim", "num_kv_heads", "rope_theta"})
ATTENTION = {"full_attention": SHAPE, "sliding_attention": SHAPE | {"sliding_window"}}  # softmax attention, and the fields it uses
NORMS = ("rms", "layer")
MLPS = ("gated", "channel_mix", "gated_channel_mix", "none")
NEVER_BELOW_ZERO = ("norm_eps", "mixer_norm_eps", "initializer_range")
NONE = "none"  # no mixer at all: what the rest of the model can do alone


@strict
class ChunkwiseConfig(PretrainedConfig):
    """Everything that decides a model's parameters and function.

    The layers: `mixer`, one name for all of them (a member of `chunkwise.nn.all_mixers()`, "full_attention", "sliding_attention" or
    "none"), or `layer_types`, one name per layer. Fields that only some members use are None by default, which is each member's own
    default; given for a model where no layer uses them they are refused, so that no setting is silently without effect.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_heads: sizes. Bytes need 256.
        head_dim, expand_k, expand_v, num_kv_heads, num_v_heads, chunk_size, use_short_conv, conv_size, conv_bias, feature_map, use_gate:
            see `chunkwise.nn.mixer.MixerOptions`; the other fields that are None by default: see the members' pages. head_dim,
            num_kv_heads and rope_theta also shape attention layers. attention: num_heads, num_kv_heads, head_dim and rope_theta of these
            where they differ, as a dictionary.
        sliding_window: tokens that a sliding_attention layer sees. use_lower_bound: learnt lower bounds of the forget factors of HGRN.
        mode: how the operator is evaluated: "chunk", "fused_chunk", "fused_recurrent" or "parallel"; the function is the same.
        hidden_ratio, intermediate_size: width of the feed-forward layers; intermediate_size wins.
        mlp: the feed-forward layers: "gated", RWKV's "channel_mix" (RWKV-7) or "gated_channel_mix" (RWKV-6), whose own activation is
            "sqrelu", or "none". hidden_act: their activation.
        norm: "rms", or "layer" with bias, before mixers and feed-forward layers and at the end; embedding_norm: one more after the
            embeddings.
        mixer_norm_eps: of the norms inside the mixers, where it is not norm_eps.
        norm_eps, initializer_range, tie_word_embeddings, use_cache: as everywhere in transformers.
        output_logits: return logits beside a loss too; None: not in training, where the loss then never stores them all.

    Raises:
        TypeError: an unknown key, with the nearest known one; a value of the wrong type. Unknown keys of a *loaded* file only warn.
        ValueError: a number out of all range, an unknown mixer, mode or activation, layers that contradict each other, a field that no
            layer uses.
    """

    model_type: ClassVar[str] = "chunkwise"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    attribute_map: ClassVar[dict[str, str]] = {"num_attention_heads": "num_heads"}

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    mixer: str | None = None
    layer_types: list[str] | None = None
    mode: str = "chunk"
    num_heads: int = 8
    num_kv_heads: int | None = None
    num_v_heads: int | None = None
    head_dim: int | None = None
    expand_k: float | int | None = None
    expand_v: float | int | None = None
    chunk_size: int | None = None
    use_short_conv: bool | None = None
    conv_size: int | None = None
    conv_bias: bool | None = None
    feature_map: str | None = None
    tie_feature_map: bool | None = None
    norm_q: bool | None = None
    norm_k: bool | None = None
    use_gate: bool | None = None
    rope_theta: float | int | None = None
    sliding_window: int | None = None
    attention: dict[str, Any] | None = None
    gate_low_rank_dim: int | None = None
    gate_logit_normalizer: float | int | None = None
    lower_bound: float | int | None = None
    use_lower_bound: bool | None = None
    num_slots: int | None = None
    num_householder: int | None = None
    use_forget_gate: bool | None = None
    correction_factor: float | int | None = None
    normalize_feedback: bool | None = None
    squash_x: float | int | None = None
    squash_eps: float | int | None = None
    state_size: int | None = None
    num_groups: int | None = None
    proj_low_rank_dim: int | None = None
    decay_low_rank_dim: int | None = None
    a_low_rank_dim: int | None = None
    v_low_rank_dim: int | None = None
    allow_neg_eigval: bool | None = None
    hidden_ratio: float | int | None = None
    intermediate_size: int | None = None
    mlp: str = "gated"
    hidden_act: str = "silu"
    norm: str = "rms"
    embedding_norm: bool = False
    norm_eps: float = 1e-6
    mixer_norm_eps: float | None = None
    initializer_range: float = 0.02
    use_cache: bool = True
    output_logits: bool | None = None
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_values()
        unknown = sorted(kwargs.keys() - _known_to_transformers())
        if unknown:
            near = difflib.get_close_matches(unknown[0], [f.name for f in dataclasses.fields(self)], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"ChunkwiseConfig: unknown key {unknown[0]!r}{hint}")
        if self.mixer is None:
            types = self.layer_types or ["gated_delta_rule"]
            self.mixer = next((t for t in types if t not in ATTENTION), types[0])
        if self.layer_types is None:
            self.layer_types = [self.mixer] * self.num_hidden_layers
        if self.intermediate_size is None:
            self.intermediate_size = intermediate_size(self.hidden_size, 4.0 if self.hidden_ratio is None else self.hidden_ratio)
        elif self.hidden_ratio is not None and self.intermediate_size != intermediate_size(self.hidden_size, self.hidden_ratio):
            raise ValueError(f"ChunkwiseConfig: hidden_ratio {self.hidden_ratio} contradicts intermediate_size {self.intermediate_size}")
        self.validate_layer_type()  # transformers asks again, and would hide the ValueError in an error of its own
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; keys that this version does not know, as a newer version's file may hold, are dropped with a warning."""
        known = {f.name for f in dataclasses.fields(cls)} | _known_to_transformers()
        unknown = sorted(config_dict.keys() - known)
        if unknown:
            warnings.warn(f"ChunkwiseConfig: unknown keys in the loaded configuration are ignored: {', '.join(unknown)}", stacklevel=2)
        return super().from_dict({k: v for k, v in config_dict.items() if k in known}, **kwargs)

    def _check_values(self) -> None:
        """Refuse values of the wrong type or out of all range; what a member asks of its own fields is on its page."""
        for name, kind in _kinds().items():
            _check_value(name, getattr(self, name), kind)
        for name, x in (self.attention or {}).items():
            if name in _kinds():
                _check_value(name, x, _kinds()[name])

    def mixer_options(self, name: str) -> dict[str, Any]:
        """The keyword arguments of the mixer `name`: the fields that it takes, where they are given."""
        own = {"mode": self.mode, "norm_eps": self.norm_eps if self.mixer_norm_eps is None else self.mixer_norm_eps}
        taken = set(mixer_class(name).options())
        return {n: own.get(n, getattr(self, n)) for n in taken if own.get(n, getattr(self, n)) is not None}

    def attention_options(self) -> dict[str, Any]:
        """The keyword arguments of attention layers besides their window."""
        given = {n: getattr(self, n) for n in SHAPE if getattr(self, n) is not None}
        return {"num_heads": self.num_heads, **given, **(self.attention or {})}

    def validate_layer_type(self) -> None:
        """Refuse layers that contradict each other and fields that no layer uses. Called by transformers and by the model."""
        self._check_values()
        types = self.layer_types or []
        known = [*all_mixers(), *ATTENTION, NONE]
        for name in {*types, self.mixer}:
            if name not in known:
                raise ValueError(f"ChunkwiseConfig: mixer and layer_types must be among {known}, got {name!r}")
        if len(types) != self.num_hidden_layers:
            raise ValueError(f"ChunkwiseConfig: layer_types names {len(types)} layers, num_hidden_layers is {self.num_hidden_layers}")
        if types and self.mixer not in types:
            raise ValueError(f"ChunkwiseConfig: mixer = {self.mixer!r} is none of layer_types = {types}")
        activation(self.hidden_act)
        for field, allowed in (("norm", NORMS), ("mlp", MLPS)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"ChunkwiseConfig: {field} must be one of {', '.join(allowed)}, got {getattr(self, field)!r}")
        stateless = sorted({*types} - all_mixers().keys())
        if self.mlp.endswith("channel_mix") and stateless:
            raise ValueError(f"ChunkwiseConfig: mlp={self.mlp!r} keeps its state beside a recurrent layer's, got {stateless[0]} layers")
        taken: set[str] = set()
        for name in set(types) - {NONE}:
            taken |= ATTENTION[name] if name in ATTENTION else fields_of(mixer_class(name))
        if "sliding_attention" in types and self.sliding_window is None:
            raise ValueError("ChunkwiseConfig: sliding_attention layers need sliding_window, the tokens that each sees")
        for name in self.attention or {}:
            if name not in {"num_heads", *SHAPE}:
                raise ValueError(f"ChunkwiseConfig: attention may hold num_heads, {', '.join(sorted(SHAPE))}, got {name!r}")
        if self.attention and not ATTENTION.keys() & set(types):
            raise ValueError(f"ChunkwiseConfig: no layer of {sorted(set(types))} uses attention, got {self.attention!r}")
        for field in _optional_fields():
            if getattr(self, field) is not None and field not in taken:
                raise ValueError(f"ChunkwiseConfig: no layer of {sorted(set(types))} uses {field}, got {getattr(self, field)!r}")


@cache
def _kinds() -> Mapping[str, Any]:
    """The type of every field of ours."""
    known = {f.name for f in dataclasses.fields(ChunkwiseConfig)}
    return {n: t for n, t in inspect.get_annotations(ChunkwiseConfig, eval_str=True).items() if n in known}


def _check_value(name: str, x: Any, kind: Any) -> None:
    """Raises TypeError where x is not of the field's type, ValueError where a count, a rate or a constant of it cannot be such a number."""
    if not _is(x, kind):
        shown = kind.__name__ if isinstance(kind, type) else kind
        raise TypeError(f"ChunkwiseConfig: {name} must be {shown}, got {x!r}")
    if not isinstance(x, Real) or isinstance(x, bool) or name.endswith("token_id"):
        return
    if not math.isfinite(x):
        raise ValueError(f"ChunkwiseConfig: {name} must be finite, got {x}")
    if int in _alternatives(kind) and float not in _alternatives(kind) and x < 1:
        raise ValueError(f"ChunkwiseConfig: {name} must be at least 1, got {x}")
    if name in NEVER_BELOW_ZERO and x < 0:
        raise ValueError(f"ChunkwiseConfig: {name} must be at least 0, got {x}")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """(int, None) of `int | None`, (int,) of `int`."""
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _is(x: Any, kind: Any) -> bool:
    """Whether x is of a field's type; whole numbers are numbers too, booleans are not."""
    for k in _alternatives(kind):
        plain = get_origin(k) or k
        if plain is list and isinstance(x, (list, tuple)):
            return all(_is(y, get_args(k)[0]) for y in x)
        if plain in (int, float) and isinstance(x, Integral if plain is int else Real) and not isinstance(x, bool):
            return True
        if plain not in (int, float, list) and isinstance(x, plain):
            return True
    return False


def fields_of(mixer: type[Mixer]) -> set[str]:
    """The fields that layers of this member use."""
    return {*mixer.options(), *(("use_lower_bound",) if mixer.floored else ())}


def _optional_fields() -> list[str]:
    """The fields of mixers: those of ChunkwiseConfig that some member takes and that are None by default."""
    taken = {field for mixer in all_mixers().values() for field in fields_of(mixer)}.union(*ATTENTION.values())
    return [f.name for f in dataclasses.fields(ChunkwiseConfig) if f.name in taken and f.default is None]


def _known_to_transformers() -> set[str]:
    """Keys that transformers itself puts into, or takes out of, a configuration."""
    base = {f.name for f in dataclasses.fields(PretrainedConfig)}
    kept = {"model_type", "auto_map", "torch_dtype", "attn_implementation", "experts_implementation", "output_attentions", "name_or_path"}
    internal = {"_name_or_path", "_commit_hash", "_attn_implementation_internal", "_experts_implementation_internal", "num_labels"}
    return base | kept | internal | {"quantization_config", "per_layer_config", "transformers_version"}
