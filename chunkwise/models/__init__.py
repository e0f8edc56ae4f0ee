"""Hugging Face models: importing this module registers them with transformers' Auto classes."""

from __future__ import annotations

from chunkwise.extra import extra

with extra("models", __name__):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from .cache import MixerCacheLayer, register_cache_layers
    from .configuration import ChunkwiseConfig
    from .modeling import ChunkwiseForCausalLM, ChunkwiseModel, ChunkwisePreTrainedModel

register_cache_layers()
AutoConfig.register(ChunkwiseConfig.model_type, ChunkwiseConfig, exist_ok=True)
AutoModel.register(ChunkwiseConfig, ChunkwiseModel, exist_ok=True)
AutoModelForCausalLM.register(ChunkwiseConfig, ChunkwiseForCausalLM, exist_ok=True)

__all__ = ["ChunkwiseConfig", "ChunkwiseForCausalLM", "ChunkwiseModel", "ChunkwisePreTrainedModel", "MixerCacheLayer"]
