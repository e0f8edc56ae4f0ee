"""transformers' Qwen3.5, Qwen3-Next and Kimi Linear: their linear-attention layers, and whole models of nothing but these.

Their attention layers (gated, with norms of q and k and partly rotary; multi-head latent) and mixtures of experts have no counterpart here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .configuration import ChunkwiseConfig
from .layout import Fields, Layout, State, head_sizes

Split = Callable[[State, ChunkwiseConfig], State]


def qwen3_5_layer(state: State, config: ChunkwiseConfig) -> State:
    """A Gated DeltaNet layer's tensors under our names: in_proj_qkv is q, k and v one above the other, and so is the convolution."""
    q, k, v = state["in_proj_qkv.weight"].split(_widths(config))
    z, a, b = (state[f"in_proj_{n}.weight"] for n in "zab")
    return _gated_delta_net(state, config, q, k, v, z, a, b)


def qwen3_next_layer(state: State, config: ChunkwiseConfig) -> State:
    """The same, where in_proj_qkvz holds q, k, the values and the output gate key head by key head, and in_proj_ba beta and the gate."""
    K, V = head_sizes(config)
    H, n = config.num_heads, (config.num_v_heads or config.num_heads) // config.num_heads
    parts = state["in_proj_qkvz.weight"].unflatten(0, (H, -1)).split([K, K, n * V, n * V], 1)
    b, a = (t.flatten(0, 1) for t in state["in_proj_ba.weight"].unflatten(0, (H, -1)).split([n, n], 1))
    q, k, v, z = (t.flatten(0, 1) for t in parts)
    return _gated_delta_net(state, config, q, k, v, z, a, b)


def _gated_delta_net(
    state: State, config: ChunkwiseConfig, q: Tensor, k: Tensor, v: Tensor, z: Tensor, a: Tensor, b: Tensor
) -> State:
    convs = zip("qkv", state["conv1d.weight"].split(_widths(config)))
    return {
        "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "g_proj.weight": z, "a_proj.weight": a, "b_proj.weight": b,
        **{f"{n}_conv1d.weight": t for n, t in convs}, "A_log": state["A_log"], "dt_bias": state["dt_bias"],
        "o_norm.weight": state["norm.weight"], "o_proj.weight": state["out_proj.weight"],
    }  # fmt: skip


def _from_gated_delta_net(state: State) -> State:
    return {
        "conv1d.weight": torch.cat([state[f"{n}_conv1d.weight"] for n in "qkv"]), "A_log": state["A_log"], "dt_bias": state["dt_bias"],
        "norm.weight": state["o_norm.weight"], "out_proj.weight": state["o_proj.weight"],
    }  # fmt: skip


def to_qwen3_5_layer(state: State, config: ChunkwiseConfig) -> State:
    """The inverse of `qwen3_5_layer`."""
    return {
        "in_proj_qkv.weight": torch.cat([state[f"{n}_proj.weight"] for n in "qkv"]), "in_proj_z.weight": state["g_proj.weight"],
        "in_proj_a.weight": state["a_proj.weight"], "in_proj_b.weight": state["b_proj.weight"], **_from_gated_delta_net(state),
    }  # fmt: skip


def to_qwen3_next_layer(state: State, config: ChunkwiseConfig) -> State:
    """The inverse of `qwen3_next_layer`."""
    by_head = lambda names: torch.cat([state[f"{n}_proj.weight"].unflatten(0, (config.num_heads, -1)) for n in names], 1).flatten(0, 1)
    return {"in_proj_qkvz.weight": by_head("qkvg"), "in_proj_ba.weight": by_head("ba"), **_from_gated_delta_net(state)}


def kimi_layer(state: State, config: ChunkwiseConfig) -> State:
    """A Kimi delta attention layer's tensors under our names; the three convolutions apart, as published, or one above the other."""
    state = {n.removeprefix("forget_gate."): t for n, t in state.items()}
    if "conv1d.weight" in state:
        state |= {f"{n}_conv1d.weight": t for n, t in zip("qkv", state.pop("conv1d.weight").split(_widths(config)))}
    renamed = {"f_a_proj": "f_proj.0", "f_b_proj": "f_proj.1", "g_a_proj": "g_proj.0", "g_b_proj": "g_proj.1"}
    result = {}
    for name, t in state.items():
        head, _, last = name.partition(".")
        result[f"{renamed.get(head, head)}.{last}" if last else head] = t
    result["A_log"] = result["A_log"].flatten()
    result.setdefault("g_proj.1.bias", torch.zeros_like(result["g_proj.1.weight"][:, 0]))  # theirs has none
    return result


def to_kimi_layer(state: State, config: ChunkwiseConfig) -> State:
    """The inverse of `kimi_layer`, in the published form. Raises ValueError for an output gate with a bias, which theirs has not."""
    if bool(state["g_proj.1.bias"].any()):
        raise ValueError("kimi_linear: g_proj.1.bias must be zero: the layer of transformers has no such parameter")
    renamed = {"f_proj.0": "f_a_proj", "f_proj.1": "f_b_proj", "g_proj.0": "g_a_proj", "g_proj.1": "g_b_proj"}
    result = {}
    for name, t in state.items():
        if name != "g_proj.1.bias":
            head, _, last = name.rpartition(".")
            result[f"{renamed.get(head, head)}.{last}" if head else last] = t.view(1, 1, -1, 1) if name == "A_log" else t
    return result


def _widths(config: ChunkwiseConfig) -> list[int]:
    """Channels of q, k and v."""
    K, V = head_sizes(config)
    return [config.num_heads * K, config.num_heads * K, (config.num_v_heads or config.num_heads) * V]


NAMES = {"embed_tokens": "embeddings", "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}  # of a block, theirs -> ours


class Seen(dict[str, Tensor]):
    """A layer's tensors, and which of them were looked up."""

    def __init__(self, tensors: State):
        super().__init__(tensors)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)

    def items(self) -> Any:
        self.names.update(self)
        return super().items()


def _blocks(mixer: str, layer: Split, centred: bool) -> Split:
    """A whole model's tensors under our names. mixer: what they call the layer; centred: their norms multiply by 1 + weight."""

    def read(state: State, config: ChunkwiseConfig) -> State:
        result: State = {}
        layers: dict[str, State] = {}
        for name, t in state.items():
            name = re.sub(r"^model\.language_model\.", "model.", name).replace(".block_sparse_moe.", ".mlp.")  # as Kimi Linear is saved
            inside = re.match(rf"(model\.layers\.\d+)\.{mixer}\.(.+)", name)
            if inside:
                layers.setdefault(inside[1], {})[inside[2]] = t
                continue
            ours = re.sub(r"\b(embed_tokens|input_layernorm|post_attention_layernorm)\b", lambda m: NAMES[m[0]], name)
            result[ours] = t + 1 if centred and ours.endswith("norm.weight") else t
        for where, own in layers.items():
            seen = Seen(own)
            result |= {f"{where}.attn.{n}": t for n, t in layer(seen, config).items()}
            if own.keys() - seen.names:
                raise ValueError(f"tensors do not fit: left over {sorted(f'{where}.{mixer}.{n}' for n in own.keys() - seen.names)[:5]}")
        return result

    return read


def _unblocks(mixer: str, layer: Split, centred: bool) -> Split:
    """The inverse of `_blocks`."""
    back = {ours: theirs for theirs, ours in NAMES.items()}

    def write(state: State, config: ChunkwiseConfig) -> State:
        result: State = {}
        layers: dict[str, State] = {}
        for name, t in state.items():
            inside = re.match(r"(model\.layers\.\d+)\.attn\.(.+)", name)
            if inside:
                layers.setdefault(inside[1], {})[inside[2]] = t
                continue
            theirs = re.sub(r"\b(embeddings|attn_norm|mlp_norm)\b", lambda m: back[m[0]], name)
            result[theirs] = t - 1 if centred and theirs.endswith("norm.weight") else t
        for where, own in layers.items():
            result |= {f"{where}.{mixer}.{n}": t for n, t in layer(own, config).items()}
        return result

    return write


def _arrange(given: Fields) -> Fields:
    """Their text model alone, with nothing that we have not: the layers one by one, the sizes as ours."""
    given = {**given, **given.get("text_config", {})}
    kind = given["model_type"]
    types = given.pop("layer_types", None) or []
    other = sorted({t for t in types if t != "linear_attention"})
    if other or not types:
        raise ValueError(f"{kind}: layer_types must be linear_attention alone, got {', '.join(other) or None}: chunkwise has no such layer")
    dense, experts = set(given.pop("mlp_only_layers", None) or []), given.pop("num_experts", None) or given.pop("num_local_experts", None)
    mlps = given.pop("mlp_layer_types", None)
    every = given.pop("decoder_sparse_step", 1)
    sparse = [i for i in range(len(types)) if (mlps[i] != "dense" if mlps else experts and i not in dense and (i + 1) % every == 0)]
    if sparse:
        raise ValueError(f"{kind}: layers {sparse} are mixtures of experts, which chunkwise has not")
    if kind != "kimi_linear":
        given["linear_value_head_dim"] = given["linear_value_head_dim"] / given["linear_key_head_dim"]
    return {n: value for n, value in given.items() if n not in ("text_config", "vision_config")}


UNUSED = frozenset(  # fields of layers that a model of linear attention alone does not have, and of what it is trained with
    (
        "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "attention_dropout", "rope_parameters", "rope_theta",
        "rope_scaling", "partial_rotary_factor", "max_position_embeddings", "model_max_length", "full_attention_interval",
        "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "num_experts_per_token", "norm_topk_prob",
        "moe_renormalize", "output_router_logits", "router_aux_loss_coef", "n_shared_experts", "num_shared_experts",
        "routed_scaling_factor", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim", "v_head_dim",
        "n_group", "num_expert_group", "topk_group", "pretraining_tp", "num_local_experts", "mtp_num_hidden_layers", "attn_output_gate",
        "mamba_ssm_dtype", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "language_model_only",
        "experts_implementation",
    )
)  # fmt: skip
GDN = {
    "rms_norm_eps": "norm_eps", "linear_num_key_heads": "num_heads", "linear_num_value_heads": "num_v_heads",
    "linear_key_head_dim": "head_dim", "linear_value_head_dim": "expand_v", "linear_conv_kernel_dim": "conv_size",
}  # fmt: skip
KIMI = {"rms_norm_eps": "norm_eps", "linear_num_heads": "num_heads", "linear_head_dim": "head_dim", "linear_conv_kernel_dim": "conv_size"}


def _sizes(config: ChunkwiseConfig) -> Fields:
    K, V = head_sizes(config)
    values = config.num_v_heads or config.num_heads
    return {
        "linear_key_head_dim": K, "linear_value_head_dim": V, "linear_num_value_heads": values,
        "layer_types": ["linear_attention"] * config.num_hidden_layers,
    }  # fmt: skip


def _next_sizes(config: ChunkwiseConfig) -> Fields:
    return {**_sizes(config), "num_experts": 0, "mlp_only_layers": list(range(config.num_hidden_layers))}


def _kimi_sizes(config: ChunkwiseConfig) -> Fields:
    K, V = head_sizes(config)
    if V != K or config.num_v_heads not in (None, config.num_heads):
        raise ValueError(f"kimi_linear: keys and values must be alike in size and heads, got K = {K}, V = {V}, HV = {config.num_v_heads}")
    L = config.num_hidden_layers
    return {"linear_head_dim": K, "layer_types": ["linear_attention"] * L, "mlp_layer_types": ["dense"] * L}


def _layout(model_type: str, name: str, member: str, names: dict[str, str], sizes: Any, parts: tuple[str, Split, Split, bool]) -> Layout:
    where, to_ours, to_theirs, centred = parts
    return Layout(
        model_type, f"{name}ForCausalLM", member, names=names, arrange=_arrange, deduce=sizes, aside=UNUSED,
        ours={"use_short_conv": True, "use_gate": True}, values={"hidden_act": {"silu": "silu", "swish": "silu"}},
        read=_blocks(where, to_ours, centred), write=_unblocks(where, to_theirs, centred),
    )  # fmt: skip


QWEN = ("linear_attn", qwen3_5_layer, to_qwen3_5_layer, True)
LAYOUTS = (
    _layout("qwen3_5_text", "Qwen3_5", "gated_delta_rule", GDN, _sizes, QWEN),
    _layout("qwen3_5", "Qwen3_5", "gated_delta_rule", GDN, _sizes, QWEN),
    _layout("qwen3_next", "Qwen3Next", "gated_delta_rule", GDN, _next_sizes, ("linear_attn", qwen3_next_layer, to_qwen3_next_layer, True)),
    _layout("kimi_linear", "KimiLinear", "kda", KIMI, _kimi_sizes, ("self_attn", kimi_layer, to_kimi_layer, False)),
)
