"""The small models that the model tests run, one of each kind."""

import copy

import pytest
import torch

from chunkwise.models import ChunkwiseConfig, ChunkwiseForCausalLM
from chunkwise.models.cache import CACHE_FIELD
from chunkwise.nn import all_mixers

VOCAB = 37
ATTENTION = {"full_attention": dict(mixer="full_attention"), "sliding_attention": dict(mixer="sliding_attention", sliding_window=8)}
HYBRID = dict(layer_types=["retention", "full_attention", "none", "sliding_attention"], num_hidden_layers=4, sliding_window=8)
SHIFTED = dict(norm="layer", embedding_norm=True, hidden_act="sqrelu")
BLOCKS = {
    "rwkv6 in its own blocks": dict(mixer="rwkv6", mlp="gated_channel_mix", **SHIFTED),
    "rwkv7 in its own blocks": dict(mixer="rwkv7", mlp="channel_mix", **SHIFTED),
    "mamba2 alone": dict(mixer="mamba2", mlp="none"),
}
KINDS = {**{name: dict(mixer=name) for name in all_mixers()}, **ATTENTION, "hybrid": HYBRID, **BLOCKS}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
recurrent_kinds = pytest.mark.parametrize("kind", [k for n, k in KINDS.items() if n in all_mixers()], ids=list(all_mixers()))


def config(**changes):
    tiny = dict(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_heads=2, intermediate_size=32, initializer_range=0.3)
    return ChunkwiseConfig(**{**tiny, **changes})


def build(seed=0, **changes):
    torch.manual_seed(seed)
    return ChunkwiseForCausalLM(config(**changes)).eval()


def ids(*shape, seed=0):
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def wide(model):
    return copy.deepcopy(model).double()


def cache_of(output):
    return output.get(CACHE_FIELD)


def flat(logits):
    return {"logits": logits.detach().flatten(0, -2)}


def gradients(model):
    return {f"d{n}": p.grad.flatten().clone() for n, p in model.named_parameters()}
