"""The models of flash-linear-attention (fla): config.json as its classes write it, tensors under the names we share with it.

Two older forms of its checkpoints are read too: before February 2025 mlp.gate_proj held gate and up, one above the other; before March
2025 Gated DeltaNet carried an attn.D that nothing used.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

from ..compat.fla_layer import FEATURES, NORMALIZED
from ..nn.feature import LEARNT
from .configuration import ATTENTION, ChunkwiseConfig
from .layout import Fields, Layout, State, head_sizes

FULL, SLIDING = ATTENTION
QUERIES, KEYS = ".attn.feature_map_q.", ".attn.feature_map_k."
COMMON = dict(  # fla's defaults of what every model has
    hidden_size=2048, num_hidden_layers=24, intermediate_size=None, hidden_ratio=4, hidden_act="swish", norm_eps=1e-6, attn=None,
    use_cache=True, pad_token_id=None, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, initializer_range=0.02, vocab_size=32000,
)  # fmt: skip
ASIDE = frozenset(  # how fla computes, and what bears on training alone
    ("attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp", "max_position_embeddings")
)
PLAIN: dict[str, tuple[Any, ...]] = {"attnres_block_size": (None,)}
AFFINE: dict[str, tuple[Any, ...]] = {**PLAIN, "elementwise_affine": (True,)}
GROUPED = {"num_kv_heads": "num_kv_heads", "feature_map": "feature_map"}
ACT = {"hidden_act": {"swish": "silu", "silu": "silu"}}
CONV = {"use_short_conv": "use_short_conv", "conv_size": "conv_size"}
SAME = {"num_heads": "num_heads", "norm_eps": "norm_eps", "hidden_ratio": "hidden_ratio"}
WIDE = {**SAME, "expand_k": "expand_k", "expand_v": "expand_v"}
INNER = {"use_gate": False, "mixer_norm_eps": 1e-5}  # of the last norm of these layers, whatever norm_eps is
SQUASH = {"squash_x": "squash_x", "squash_eps": "squash_eps"}
BEGUN = ("log_atk_scale_init", "a_log_init_lower")  # where parameters begin
HEADED = {**SAME, **CONV, "head_dim": "head_dim", "expand_v": "expand_v"}


def _arrange(given: Fields, mixer: str) -> Fields:
    """One field for the width of the feed-forward layers; the layers one by one."""
    if given.get("intermediate_size") is not None:
        given.pop("hidden_ratio", None)
    if given.get("window_size") is not None:  # the Transformer's
        given |= {"mixer": SLIDING, "sliding_window": given["window_size"]}
    given.pop("window_size", None)
    if mixer == "hgrn2":
        D, heads, ratio = given["hidden_size"], given["num_heads"], given.pop("expand_ratio")
        name, part = ("expand_ratio", ratio) if ratio else ("num_heads", heads)  # as in fla, a ratio decides
        if (part or 0) < 1 or D % part:
            raise ValueError(f"hgrn2: {name} must divide hidden_size = {D}, got {part}")
        given |= {"num_heads": D // ratio if ratio else heads, "head_dim": ratio or D // heads, "expand_v": 1.0}
    if mixer == "linear_attn":
        given["tie_feature_map_qk"] = given["tie_feature_map_qk"] and given["feature_map"] in LEARNT  # as in fla, nothing else is tied
        if given.pop("norm_feature_map"):
            mixer = given["mixer"] = NORMALIZED
    if mixer == "precond_kda":  # fla preconditions by value heads here, ours by key heads
        if given.pop("num_v_heads", None) not in (None, given["num_heads"]):
            raise ValueError(f"precond_kda: num_v_heads must be num_heads = {given['num_heads']}, for fla preconditions each value head")
    specs = given.pop("attn", None)
    if specs:
        given |= _hybrid([specs] if isinstance(specs, dict) else specs, mixer, given)
    return given


def _hybrid(specs: list[Fields], mixer: str, given: Fields) -> Fields:
    """fla's `attn`: which layers are attention, and what it is like there; ours has one kind with a window and one without."""
    types = [mixer] * given["num_hidden_layers"]
    shapes, windows = [], set()
    for spec in specs:
        unknown = spec.keys() - {"layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta"}
        if unknown or spec.get("qkv_bias"):
            raise ValueError(f"attn: chunkwise has no {', '.join(sorted(unknown)) or 'qkv_bias'} in attention layers, got {spec}")
        heads, window = spec["num_heads"], spec.get("window_size")
        windows |= {window} - {None}
        shapes.append({"num_heads": heads, "num_kv_heads": spec.get("num_kv_heads") or heads, "head_dim": given["hidden_size"] // heads,
                       "rope_theta": spec.get("rope_theta", 10000.0)})  # fmt: skip
        for i in spec["layers"]:
            types[i] = FULL if window is None else SLIDING
    if any(shape != shapes[0] for shape in shapes) or len(windows) > 1:
        raise ValueError(f"attn: attention layers must be alike but for having a window, got {specs}")
    return {"layer_types": types, "attention": shapes[0], **({"sliding_window": windows.pop()} if windows else {})}


def _attention(config: ChunkwiseConfig) -> Fields:
    """The inverse of `_hybrid`; for the Transformer, whose layers are all alike, their shape."""
    shape = config.attention_options()
    heads = shape["num_heads"]
    width = shape.get("head_dim", config.hidden_size // heads) * heads
    if set(config.layer_types or []) & ATTENTION.keys() and width != config.hidden_size:
        raise ValueError(f"fla: attention heads must together be hidden_size = {config.hidden_size} wide, got {width}")
    if config.mixer in ATTENTION:
        kinds = set(config.layer_types or [str(config.mixer)])
        if len(kinds) > 1:
            raise ValueError(f"transformer: layers must be alike, all with a window or all without, got {', '.join(sorted(kinds))}")
        if width != config.hidden_size:
            raise ValueError(f"transformer: attention heads must together be hidden_size = {config.hidden_size} wide, got {width}")
        return {"window_size": config.sliding_window if kinds == {SLIDING} else None, "num_heads": heads,
                "num_kv_heads": shape.get("num_kv_heads") or heads, "rope_theta": shape.get("rope_theta", 10000.0)}  # fmt: skip
    specs = []
    for kind, window in ((FULL, None), (SLIDING, config.sliding_window)):
        layers = [i for i, t in enumerate(config.layer_types or []) if t == kind]
        if layers:
            specs.append({"layers": layers, "num_heads": heads, "num_kv_heads": shape.get("num_kv_heads") or heads, "qkv_bias": False,
                          "window_size": window, "rope_theta": shape.get("rope_theta", 10000.0)})  # fmt: skip
    return {"attn": specs[0] if len(specs) == 1 else specs or None}


def _widths(config: ChunkwiseConfig) -> Fields:
    """fla's expand_k and expand_v count from the hidden size."""
    K, V = head_sizes(config)
    return {"expand_k": K * config.num_heads / config.hidden_size, "expand_v": V * config.num_heads / config.hidden_size, **_mlp(config)}


def _heads(config: ChunkwiseConfig) -> Fields:
    """fla's expand_v counts from head_dim, the key size."""
    K, V = head_sizes(config)
    return {"head_dim": K, "expand_v": V / K, **_mlp(config)}


def _hgrn2(config: ChunkwiseConfig) -> Fields:
    """fla's expand_ratio is the key size; its keys and values are hidden_size wide."""
    K, V = head_sizes(config)
    for what, width in ("keys", K * config.num_heads), ("values", V * config.num_heads):
        if width != config.hidden_size:
            raise ValueError(f"hgrn2: {what} must be hidden_size = {config.hidden_size} wide, got {width}")
    return {"expand_ratio": K, "use_lower_bound": config.use_lower_bound is not False, **_mlp(config)}


def _features(config: ChunkwiseConfig) -> Fields:
    return {**_widths(config), "norm_feature_map": config.mixer == NORMALIZED}


def _kda(config: ChunkwiseConfig) -> Fields:
    return {**_heads(config), "safe_gate": config.lower_bound is not None}


def _mlp(config: ChunkwiseConfig) -> Fields:
    return {"hidden_ratio": None, "intermediate_size": config.intermediate_size}


def _read(state: State, config: ChunkwiseConfig) -> State:
    """The two older forms, and the norm's name where fla does not fuse it with the gate."""
    result: State = {}
    for name, t in state.items():
        if re.search(r"\.attn\.D$", name) and config.mixer == "gated_delta_rule":
            continue
        if config.tie_feature_map and KEYS in name:
            if not torch.equal(t, state.get(name.replace(KEYS, QUERIES), t)):
                raise ValueError(f"linear_attn: {name} must be that of feature_map_q, as tie_feature_map_qk says, and is another")
            continue
        if name.endswith("mlp.gate_proj.weight") and t.shape[0] == 2 * int(config.intermediate_size or 0):
            result[name], result[name.replace("gate_proj", "up_proj")] = t.chunk(2)
        elif config.mixer in ("retention", "gla") and name.endswith(".attn.g_norm.weight"):
            result[name.replace("g_norm", "g_norm_swish_gate")] = t
        else:
            result[name] = t
    return result


def _write(state: State, config: ChunkwiseConfig) -> State:
    if config.tie_feature_map:  # fla saves one map under both names
        return state | {name.replace(QUERIES, KEYS): t.clone() for name, t in state.items() if QUERIES in name}
    if config.use_gate is False and config.mixer in ("retention", "gla"):
        return {name.replace("g_norm_swish_gate", "g_norm"): t for name, t in state.items()}
    return state


def _layout(model_type: str, name: str, mixer: str, names: Any, **further: Any) -> Layout:
    defaults, values = {**COMMON, **further.pop("defaults", {})}, {**ACT, **further.pop("values", {})}
    sizes = further.pop("deduce", _heads if "head_dim" in names else _widths if "expand_k" in names else _mlp)
    return Layout(
        model_type, f"{name}ForCausalLM", mixer, names=names, defaults=defaults, arrange=partial(_arrange, mixer=mixer), hybrid=True,
        deduce=lambda config: {**sizes(config), **_attention(config)}, read=_read, write=_write,
        values=values, aside=ASIDE.union(further.pop("aside", ())), **further,
    )  # fmt: skip


LAYOUTS = (
    _layout("retnet", "RetNet", "retention", {**WIDE, **GROUPED, "use_output_gate": "use_gate"},
            defaults=dict(expand_k=1.0, expand_v=2.0, num_heads=8, use_output_gate=True, hidden_ratio=2),
            fixed=AFFINE, aside=("use_short_conv", "conv_size"),  # which fla never reads
            ours={"use_short_conv": False}),
    _layout("gla", "GLA", "gla", {**WIDE, **CONV, **GROUPED, "use_output_gate": "use_gate"},
            defaults=dict(expand_k=0.5, expand_v=1.0, num_heads=4, use_short_conv=False, conv_size=4, use_output_gate=True),
            fixed={**AFFINE, "clamp_min": (None,), "use_gk": (True,), "use_gv": (False,)}),
    _layout("delta_net", "DeltaNet", "delta_rule", {**WIDE, **CONV, "use_gate": "use_gate", "allow_neg_eigval": "allow_neg_eigval"},
            defaults=dict(expand_k=1.0, expand_v=1.0, num_heads=16, use_gate=False, use_short_conv=True, conv_size=4,
                          allow_neg_eigval=False),
            fixed={**PLAIN, "qk_norm": ("l2",), "qk_activation": ("silu",), "use_beta": (True,), "use_output_norm": (True,)}),
    _layout("gated_deltanet", "GatedDeltaNet", "gated_delta_rule",
            {**HEADED, "num_v_heads": "num_v_heads", "use_gate": "use_gate", "allow_neg_eigval": "allow_neg_eigval"},
            defaults=dict(expand_v=2.0, head_dim=256, num_heads=6, num_hidden_layers=21, use_gate=True, use_short_conv=True, conv_size=4,
                          allow_neg_eigval=False),
            fixed={**PLAIN, "output_gate_activation": ("swish", "silu")}),
    _layout("kda", "KDA", "kda",
            {**HEADED, "num_v_heads": "num_v_heads", "allow_neg_eigval": "allow_neg_eigval", "lower_bound": "lower_bound"},
            defaults=dict(expand_v=1.0, head_dim=128, num_heads=16, use_short_conv=True, conv_size=4, allow_neg_eigval=False),
            fixed=PLAIN, aside=("safe_gate",), ours={"use_gate": True}, deduce=_kda),
    _layout("linear_attn", "LinearAttention", "linear_attn",
            {**WIDE, **GROUPED, "tie_feature_map_qk": "tie_feature_map", "norm_q": "norm_q", "norm_k": "norm_k"},
            defaults=dict(expand_k=1.0, expand_v=1.0, num_heads=4, feature_map="elementwise_product", tie_feature_map_qk=False,
                          norm_q=False, norm_k=False, norm_feature_map=False),
            fixed=AFFINE, ours={"use_gate": False, "use_short_conv": False}, instead=NORMALIZED, deduce=_features,
            values={"feature_map": FEATURES}),
    _layout("gated_deltaproduct", "GatedDeltaProduct", "gated_delta_product",
            {**HEADED, "use_output_gate": "use_gate", "allow_neg_eigval": "allow_neg_eigval", "num_householder": "num_householder",
             "use_forget_gate": "use_forget_gate"},
            defaults=dict(expand_v=2.0, head_dim=256, num_heads=6, num_hidden_layers=21, use_output_gate=True, use_short_conv=True,
                          conv_size=4, allow_neg_eigval=False, num_householder=1, use_forget_gate=False),
            fixed=PLAIN),
    _layout("comba", "Comba", "comba",
            {**HEADED, "num_v_heads": "num_v_heads", "use_output_gate": "use_gate", "correction_factor": "correction_factor"},
            defaults=dict(expand_v=2.0, head_dim=256, num_heads=6, num_hidden_layers=21, use_output_gate=True, use_short_conv=True,
                          conv_size=4, correction_factor=1.0),
            fixed={**PLAIN, "use_output_correction": (True,), "use_inner_decay": (True,)}, ours={"normalize_feedback": True}),
    _layout("gsa", "GSA", "gsa",
            {**WIDE, **CONV, **GROUPED, "num_slots": "num_slots", "gate_logit_normalizer": "gate_logit_normalizer"},
            defaults=dict(expand_k=1, expand_v=1, num_heads=4, num_slots=64, gate_logit_normalizer=8, use_short_conv=False, conv_size=4,
                          feature_map="swish"),
            fixed={**AFFINE, "clamp_min": (None,), "clamp_max": (None,), "use_output_gate": (False,), "use_norm": (True,)},
            ours=INNER, values={"feature_map": {"swish": "silu", "silu": "silu", "relu": "relu"}}),
    _layout("abc", "ABC", "abc", {**WIDE, **CONV, "num_slots": "num_slots"},
            defaults=dict(expand_k=0.5, expand_v=1, num_heads=4, num_slots=64, use_short_conv=False, conv_size=4),
            fixed={**AFFINE, "clamp_min": (-32,), "clamp_max": (32,), "use_rope": (True,)}, aside=("gate_low_rank_dim",)),
    _layout("precond_gated_deltanet", "PrecondGatedDeltaNet", "precond_gated_delta_rule",
            {**HEADED, **SQUASH, "num_v_heads": "num_v_heads", "use_gate": "use_gate", "allow_neg_eigval": "allow_neg_eigval"},
            defaults=dict(expand_v=2.0, head_dim=256, num_heads=6, num_hidden_layers=21, use_gate=True, use_short_conv=True, conv_size=4,
                          allow_neg_eigval=False, squash_x=1.5, squash_eps=1e-6),
            aside=BEGUN),
    _layout("precond_kda", "PrecondKDA", "precond_kda",
            {**HEADED, **SQUASH, "allow_neg_eigval": "allow_neg_eigval", "lower_bound": "lower_bound"},
            defaults=dict(expand_v=1.0, head_dim=128, num_heads=16, use_short_conv=True, conv_size=4, allow_neg_eigval=False, squash_x=1.5,
                          squash_eps=1e-6),
            aside=(*BEGUN, "safe_gate"), ours={"use_gate": True}, deduce=_kda),
    _layout("hgrn", "HGRN", "hgrn",
            {**CONV, "norm_eps": "norm_eps", "hidden_ratio": "hidden_ratio", "expand_ratio": "expand_v",
             "use_lower_bound": "use_lower_bound"},
            defaults=dict(expand_ratio=1, use_short_conv=False, conv_size=4, use_lower_bound=True), fixed=AFFINE),
    _layout("hgrn2", "HGRN2", "hgrn2", {**HEADED, "use_lower_bound": "use_lower_bound"},
            defaults=dict(num_heads=None, expand_ratio=128, use_short_conv=False, conv_size=4, use_lower_bound=True),
            fixed=AFFINE, ours=INNER, deduce=_hgrn2, note="`expand_ratio` (128) must divide `hidden_size`."),
    _layout("transformer", "Transformer", FULL, {**SAME, "num_kv_heads": "num_kv_heads", "rope_theta": "rope_theta"},
            defaults=dict(num_heads=32, rope_theta=10000.0),
            fixed={**AFFINE, "qkv_bias": (False,), "qk_norm": (False,)}),
)  # fmt: skip

