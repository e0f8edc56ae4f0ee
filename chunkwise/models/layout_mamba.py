"""Mamba-2 as fla and transformers save it: nothing but mixers, and the same names of tensors in both."""

from __future__ import annotations

from .configuration import NONE, ChunkwiseConfig
from .layout import Fields, Layout, State, head_sizes

NO_LIMIT = ([0.0, {"__float__": "Infinity"}], [0.0, float("inf")], (0.0, float("inf")))  # the first as transformers writes it
RENAMED = (("backbone.", "model."), (".norm_f.", ".norm."), (".mixer.", ".attn."))


def _arrange(given: Fields) -> Fields:
    """transformers' word for the norms' epsilon; heads from their size."""
    given["norm_eps"] = given.pop("layer_norm_epsilon", given["norm_eps"])
    head, wide = given.pop("head_dim"), given["expand"] * given["hidden_size"]
    if wide % head or given.get("num_heads") not in (None, wide // head):
        raise ValueError(f"mamba2: num_heads * head_dim must be expand * hidden_size = {wide}, got {given.get('num_heads')} * {head}")
    return given | {"num_heads": wide // head}


def _deduce(config: ChunkwiseConfig) -> Fields:
    V = head_sizes(config)[1]
    return {"head_dim": V, "expand": V * config.num_heads // config.hidden_size, "layer_norm_epsilon": config.norm_eps}


def _read(state: State, config: ChunkwiseConfig) -> State:
    result: State = {}
    for name, t in state.items():
        if name.startswith("backbone.layers.") and name.split(".")[3] == "norm":
            name = name.replace(".norm.", ".attn_norm.")
        for old, new in RENAMED:
            name = name.replace(old, new)
        result[name] = t
    return result


def _write(state: State, config: ChunkwiseConfig) -> State:
    result: State = {}
    for name, t in state.items():
        name = name.replace("model.norm.", "model.norm_f.").replace(".attn_norm.", ".norm.")
        result[name.replace(".attn.", ".mixer.").replace("model.", "backbone.")] = t
    return result


LAYOUTS = (
    Layout(
        "mamba2", "Mamba2ForCausalLM", "mamba2",
        names={"num_heads": "num_heads", "expand": "expand_v", "state_size": "state_size", "n_groups": "num_groups",
               "conv_kernel": "conv_size", "use_conv_bias": "conv_bias", "norm_eps": "norm_eps"},
        defaults=dict(hidden_size=2048, num_hidden_layers=48, vocab_size=32000, head_dim=64, num_heads=None, state_size=128, expand=2,
                      n_groups=1, conv_kernel=4, use_conv_bias=True, norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False),
        fixed={"use_bias": (False,), "rmsnorm": (True,), "norm_before_gate": (False,), "D_has_hdim": (False,), "dt_limit": NO_LIMIT,
               "time_step_limit": NO_LIMIT},
        aside=frozenset(
            ("chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor",
             "time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "fuse_norm", "fuse_cross_entropy",
             "fuse_linear_cross_entropy", "use_l2warp", "intermediate_size")
        ),
        ours={"mlp": NONE}, deduce=_deduce, read=_read, write=_write, arrange=_arrange,
    ),
)  # fmt: skip
