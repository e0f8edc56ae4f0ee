"""fla's RWKV-6 and RWKV-7: layer norms, one of them after the embeddings, and feed-forward layers that mix neighbouring tokens.

An older form of RWKV-7, whose six mixtures were one tensor x_x, is read too.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from .configuration import ChunkwiseConfig
from .layout import Fields, Layout, State, head_sizes
from .layout_fla import ASIDE, COMMON

SHIFTED = {**COMMON, "hidden_act": "sqrelu", "norm_eps": 1e-5, "norm_first": True, "norm_bias": True}
NAMES = {"num_heads": "num_heads", "norm_eps": "norm_eps", "norm_first": "embedding_norm", "expand_v": "expand_v"}
FIXED: dict[str, tuple[Any, ...]] = {"attn": (None,), "norm_bias": (True,)}
ACTS = {"hidden_act": {a: a for a in ("sqrelu", "relu", "silu")}}
RENAMED = (("layers.0.pre_norm.", "embedding_norm."), (".ffn_norm.", ".mlp_norm."), (".ffn.", ".mlp."))
SIX = (*RENAMED, (".x_proj.0.mu", ".x_mu"), (".x_proj.2.weight", ".x_up"), (".x_proj.0.linear.", ".x_proj."),
       ("_proj.linear.lora.", "_lora."), (".mlp.key.mu", ".mlp.x_k"), (".mlp.receptance.mu", ".mlp.x_r"))  # fmt: skip
SEVEN = (*RENAMED, ("_lora.lora.", "_lora."))
MIXED = "rwkvag"  # RWKV-7's mixtures in the order of x_mix


def _width(given: Fields) -> None:
    """The feed-forward layers' width from its ratio."""
    ratio = given.pop("hidden_ratio", None)
    if given.get("intermediate_size") is None:
        given["intermediate_size"] = 32 * -(-int(given["hidden_size"] * ratio) // 32)


def _renamed(state: State, pairs: Any) -> State:
    for old, new in pairs:
        state = {name.replace(old, new): t for name, t in state.items()}
    return state


def _back(pairs: Any) -> list[tuple[str, str]]:
    return [(new, old) for old, new in reversed(pairs)]


def _arrange_7(given: Fields) -> Fields:
    _width(given)
    D, head = given["hidden_size"], given.pop("head_dim")
    given["num_heads"] = D // head if head else given["num_heads"]
    values = given.pop("value_dim", None)
    widths = set(values) if isinstance(values, list) else {values or D}
    if len(widths) > 1:
        raise ValueError(f"rwkv7: value_dim must be the same in every layer, got {values}")
    return given | {"expand_v": widths.pop() / D}


def _deduce_7(config: ChunkwiseConfig) -> Fields:
    D = config.hidden_size
    return {"head_dim": D // config.num_heads, "value_dim": [head_sizes(config)[1] * config.num_heads] * config.num_hidden_layers,
            "hidden_ratio": None}  # fmt: skip


def _read_7(state: State, config: ChunkwiseConfig) -> State:
    state = _renamed(state, SEVEN)
    for where in [f"model.layers.{i}.attn." for i in range(config.num_hidden_layers)]:
        whole = state.pop(f"{where}x_x", None)
        parts = [state.pop(f"{where}x_{n}").view(1, -1) for n in MIXED] if whole is None else [whole]
        state[f"{where}x_mix"] = torch.cat(parts)
    return state


def _write_7(state: State, config: ChunkwiseConfig) -> State:
    result: State = {}
    for name, t in _renamed(state, _back(SEVEN)).items():
        if name.endswith(".x_mix"):
            result |= {f"{name.removesuffix('mix')}{n}": row.clone().view(1, 1, -1) for n, row in zip(MIXED, t)}
        else:
            result[name] = t
    return result


def _arrange_6(given: Fields) -> Fields:
    _width(given)
    return given


def _deduce_6(config: ChunkwiseConfig) -> Fields:
    K, V = head_sizes(config)
    widths = {"expand_k": K * config.num_heads / config.hidden_size, "expand_v": V * config.num_heads / config.hidden_size}
    return {**widths, "hidden_ratio": None}


def _read_6(state: State, config: ChunkwiseConfig) -> State:
    result: State = {}
    for name, t in _renamed(state, SIX).items():
        if name.endswith(".x_up"):
            t = t.unflatten(1, (5, -1)).permute(1, 2, 0).contiguous()  # [D, 5 rank] -> [5, rank, D]
        result[name if ".x_proj." in name else re.sub(r"(_proj|\.key|\.receptance)\.linear\.", r"\1.", name)] = t
    return result


def _write_6(state: State, config: ChunkwiseConfig) -> State:
    result: State = {}
    for name, t in _renamed({re.sub(r"(attn\.[rkvg]_proj|mlp\.key|mlp\.receptance)\.", r"\1.linear.", n): t for n, t in state.items()},
                            _back(SIX)).items():  # fmt: skip
        result[name] = t.permute(2, 0, 1).flatten(1) if name.endswith(".x_proj.2.weight") else t
    return result


LAYOUTS = (
    Layout("rwkv6", "RWKV6ForCausalLM", "rwkv6",
           names={**NAMES, "expand_k": "expand_k", "proj_low_rank_dim": "proj_low_rank_dim", "gate_low_rank_dim": "gate_low_rank_dim"},
           defaults={**SHIFTED, "num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "hidden_ratio": 3.5, "proj_low_rank_dim": 32,
                     "gate_low_rank_dim": 64},
           fixed=FIXED, aside=ASIDE, ours={"mlp": "gated_channel_mix", "norm": "layer"}, values=ACTS, arrange=_arrange_6,
           deduce=_deduce_6, read=_read_6, write=_write_6),
    Layout("rwkv7", "RWKV7ForCausalLM", "rwkv7",
           names={**NAMES, **{n: n for n in ("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim")}},
           defaults={**SHIFTED, "head_dim": 64, "num_heads": None, "decay_low_rank_dim": 64, "gate_low_rank_dim": 128,
                     "a_low_rank_dim": 64, "v_low_rank_dim": 16},
           fixed=FIXED, aside=ASIDE, ours={"mlp": "channel_mix", "norm": "layer"}, values=ACTS, arrange=_arrange_7, deduce=_deduce_7,
           read=_read_7, write=_write_7),
)  # fmt: skip
