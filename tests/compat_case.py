"""Tiny random models of transformers that have linear-attention layers, and what a run of one gives."""

import copy
import functools
import importlib.util

import pytest
import torch

from chunkwise.compat import patch_transformers
from chunkwise.compat.patch import PROVED

drop_in = functools.partial(patch_transformers, replace=True)  # fla may be installed where the tests run
SHARED = dict(
    vocab_size=37, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
    initializer_range=0.2, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2, pad_token_id=0, bos_token_id=None,
    eos_token_id=None, experts_implementation="eager",
)  # fmt: skip
GDN = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16, head_dim=16)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
LATENT = dict(linear_num_heads=2, linear_head_dim=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
KIMI = dict(**LATENT, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_layer_types=["dense", "sparse"])
MODELS = {
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {**GDN, **MOE}),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", GDN),
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig", KIMI),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", {n: v for n, v in GDN.items() if n != "head_dim"}),
}
BAMBA = dict(  # ...: it has no such field
    layer_types=..., attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=16, mamba_expand=2,
    experts_implementation=...,
)  # fmt: skip
FURTHER = {
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", dict(layer_types=["conv", "full_attention"], block_multiple_of=8)),
    "bailing_hybrid": ("BailingHybridForCausalLM", "BailingHybridConfig", LATENT),
    "bamba": ("BambaForCausalLM", "BambaConfig", BAMBA),
}
HERE = [n for n in PROVED if importlib.util.find_spec(f"transformers.models.{n}")]  # older versions of transformers have not all of them
APART = [n for n in HERE if n not in MODELS or not {"num_experts", "num_local_experts"} & MODELS[n][2].keys()]  # experts round otherwise
models = pytest.mark.parametrize("name", MODELS)
CU = [0, 20, 27, 60]


def tiny(name, **changes):
    """A small random model in float32, its gates drawn as those of trained models; changes: of its configuration."""
    model, config, own = {**MODELS, **FURTHER}[name]
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    configuration = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    torch.manual_seed(0)
    fields = {n: v for n, v in {**SHARED, **own, **changes}.items() if v is not ...}
    built = getattr(modeling, model)(getattr(configuration, config)(**fields)).eval()
    with torch.no_grad():
        for n, p in built.named_parameters():
            if n.endswith("A_log"):
                p.uniform_(0.0, 1.5)
            elif n.endswith("dt_bias"):
                p.uniform_(-4.0, -1.0)
    return built


def ids(*shape, seed=0):
    return torch.randint(1, SHARED["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def results(model, x, call=None, **given):
    """Logits, loss and every gradient, of the model or of what was compiled of it."""
    model.zero_grad()
    output = (model if call is None else call)(x, labels=x, use_cache=False, **given)
    output.loss.backward()
    grads = {f"d{n}": p.grad.flatten().clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach().flatten(0, -2), "loss": output.loss.detach()[None]} | grads


def wide(model):
    """The model in float64, through chunkwise: transformers' own fallbacks round to float32."""
    return copy.deepcopy(model).double()


def cross_entropy(logits, x):
    return torch.nn.functional.cross_entropy(logits[0, :-1], x[0, 1:], reduction="sum")


def gradients(model):
    return {f"d{n}": p.grad.flatten().clone() for n, p in model.named_parameters() if p.grad is not None}
