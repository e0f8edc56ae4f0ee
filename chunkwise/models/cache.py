"""What a model remembers between calls, as layers of transformers' own Cache, and the two names transformers gave it.

transformers 5.24 renamed the argument and output field `past_key_values` to `cache`. This file alone knows: models take both
arguments, and the output carries the name that the installed version reads.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    StaticLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..nn import MixerState, all_mixers
from .configuration import NONE, ChunkwiseConfig

CACHE_FIELD = "cache" if "cache" in {f.name for f in fields(BaseModelOutputWithPast)} else "past_key_values"


class MixerCacheLayer(CacheLayerMixin):
    """The state of one mixer: of constant size, replaced at every call, so that gradients may flow through it.

    It counts tokens, so that a cache of such layers alone knows its length. It cannot be cropped: a recurrent state does not know
    what it was some tokens ago.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, max_cache_len: int | None = None, sliding_window: int | None = None):
        super().__init__()  # what a StaticCache, and transformers before 5.24, offer all layers; the size of this one depends on neither
        self.state: MixerState | None = None
        self.length = 0

    def advance(self, state: MixerState | None, tokens: int) -> None:
        """Take the state after `tokens` more tokens (padding counted, as attention caches do); None for a layer without a mixer."""
        self.state, self.length, self.is_initialized = state, self.length + tokens, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        raise TypeError("MixerCacheLayer holds a recurrent state, not keys and values")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("MixerCacheLayer holds a recurrent state, not keys and values")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.length, self.is_initialized = None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to remove is fine; anything else is refused.

        Raises:
            ValueError: always, when tokens would have to be removed.
        """
        if tokens_to_remove != 0:
            raise ValueError(
                "a recurrent state cannot be cropped: it does not hold the tokens one by one. Keep a copy (copy.deepcopy(cache)) "
                "to return to, and generate without assisted or speculative decoding"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            n = self.state.seen.shape[0]
            self.state = self.state.select(torch.arange(n, device=self.state.seen.device).repeat_interleave(repeats))

    def offload(self) -> None:
        """A state is as small as one token's activations: it stays where it is."""

    def prefetch(self) -> None:
        """Nothing was offloaded."""


def register_cache_layers() -> None:
    """Tell transformers which cache layer each of our layer types has, so that its own Cache classes build from our configuration."""
    for name in [*all_mixers(), NONE]:
        DYNAMIC_LAYER_TYPE_MAPPING[name] = MixerCacheLayer
        STATIC_LAYER_TYPE_MAPPING[name] = MixerCacheLayer


def open_cache(config: ChunkwiseConfig, cache: Cache | None) -> Cache:
    """A cache with this model's layers: a new one, the caller's own, or the caller's empty one furnished.

    Raises:
        TypeError: not a transformers Cache. ValueError: a cache made for other layers, or whose layers hold different numbers of tokens.
    """
    if cache is None:
        return DynamicCache(config=config)
    if not isinstance(cache, Cache):
        raise TypeError(f"cache must be a transformers Cache, got {type(cache).__name__}")
    if not cache.layers:  # DynamicCache(): it did not know the configuration
        cache.layers, cache.layer_class_to_replicate = DynamicCache(config=config).layers, None
    if any(isinstance(layer, StaticLayer) for layer in cache.layers):
        raise ValueError("a static cache cannot serve full_attention layers here: use the default dynamic one")
    ours = [DYNAMIC_LAYER_TYPE_MAPPING[name] is MixerCacheLayer for name in config.layer_types or []]
    if [isinstance(layer, MixerCacheLayer) for layer in cache.layers] != ours:
        raise ValueError("cache was not made for this model: use DynamicCache(config=model.config), or an empty DynamicCache()")
    lengths = [layer.get_seq_length() for layer in cache.layers]
    if not torch.compiler.is_compiling() and lengths and min(lengths) != max(lengths):
        raise ValueError(f"cache: its layers hold {lengths} tokens: some alone were cropped or reset; go on from a copy, or a new cache")
    return cache


def tokens_seen(cache: Cache) -> Tensor | None:
    """[N] int64, the tokens (padding not counted) each sequence has behind it; None before the first call and without mixers."""
    for layer in cache.layers:
        if isinstance(layer, MixerCacheLayer) and layer.state is not None:
            return layer.state.seen
    return None
