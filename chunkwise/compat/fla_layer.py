"""Layers of flash-linear-attention under its names, constructor arguments and parameter names, computed by chunkwise's layers.

Those whose parameters are other tensors here (RWKV-6, RWKV-7, Mamba-2) have no such class: `chunkwise convert` reads their checkpoints.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..nn import Depth, mixer_class
from ..nn.feature import LEARNT
from ..spec import Form
from .alias import bind, parameters
from .fla_cache import Cache

HEADS = "hidden_size=2048, expand_v=%s, head_dim=256, num_heads=6, num_v_heads=None, mode='chunk'"
CONV = "conv_size=4, conv_bias=False, layer_idx=None, norm_eps=1e-5"
WIDE = "mode='chunk', hidden_size=1024, expand_k=%s, expand_v=%s, num_heads=%s"
SQUASH = "squash_x=1.5, squash_eps=1e-6, log_atk_scale_init=-0.2"
NORMED = "elementwise_affine=True, norm_eps=1e-5"
FEATURES = {**{name: name for name in (*LEARNT, "dpfp", "relu", "identity")}, "elu": "elu_plus_one"}  # fla's feature_map -> ours
NORMALIZED = "normalized_linear_attn"
ASIDE = {"layer_idx", "fuse_norm", "safe_gate", "gate_low_rank_dim"}  # of these layers: what changes no result
FIXED: dict[str, tuple[Any, ...]] = {"elementwise_affine": (True,), "gate_fn": ("swish", "silu")}


@dataclass(frozen=True)
class LayerAlias:
    """One class of fla. `signature` is its constructor's; `fixed`: the values that mean what chunkwise computes."""

    file: str  # below fla.layers
    op: str
    signature: str
    rename: Mapping[str, str] = field(default_factory=dict)  # fla's names of arguments -> chunkwise's
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    words: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)  # by fla's argument: its word -> ours
    options: Mapping[str, Any] = field(default_factory=dict)  # ours that are always so
    low_rank: bool = False  # takes gate_low_rank_dim
    switch: tuple[str, str] | None = None  # fla's argument that, true, has it run another operator, and that operator
    note: str = ""  # what else differs

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]

    def arguments(self, x: dict[str, Any]) -> dict[str, Any]:
        """Our layer's keyword arguments. Raises ValueError naming what chunkwise's layer has not."""
        made: dict[str, Any] = {**self.options}
        tied = x.pop("tie_feature_map_qk", False) and x["feature_map"] in LEARNT  # as in fla, others have nothing to tie
        made |= {"tie_feature_map": True} if tied else {}
        if self.op == "hgrn2":
            D, heads, ratio = x["hidden_size"], x.pop("num_heads"), x.pop("expand_ratio")
            if D % (ratio or heads or D + 1):
                raise ValueError(f"{self.name}: hidden_size {D} must be a multiple of expand_ratio or num_heads, got {ratio}, {heads}")
            heads = D // ratio if ratio else heads  # as in fla, a ratio decides
            made |= {"num_heads": heads, "head_dim": ratio or D // heads, "expand_v": D / heads / (ratio or D // heads)}
        for name, value in x.items():
            allowed, words = {**FIXED, **self.fixed}.get(name), self.words.get(name)
            if allowed is not None:
                if value not in allowed:
                    raise ValueError(f"{self.name}: {name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
            elif words is not None and value not in words:
                raise ValueError(f"{self.name}: {name} must be one of {', '.join(map(repr, words))}, got {value!r}")
            elif value is not None and (name not in ASIDE or name == "gate_low_rank_dim" and self.low_rank):
                made[self.rename.get(name, name)] = value if words is None else words[value]
        return {n: value for n, value in made.items() if value is not None}

    def layer(self) -> type[nn.Module]:
        """The class: `forward` gives (o, None, past_key_values), as fla's does."""
        alias, named = self, parameters(self.signature)
        order, empty = tuple(named), inspect.Parameter.empty
        defaults = {n: d for n, d in named.items() if d is not empty}
        ours: Any = mixer_class(self.op)
        switch, other = (self.switch[0], mixer_class(self.switch[1])) if self.switch else ("", ours)

        class Layer(ours):
            def __init__(self, *args: Any, **kwargs: Any):
                given = bind(alias.name, order, defaults, args, kwargs)
                if given.pop(switch, False):  # of the instance: who derives from fla's class, or saves one, knows that class alone
                    self.op, self.forms = other.op, other.forms
                index, fused = given.get("layer_idx"), given.get("fuse_norm", True) and given.get("gate_fn", "swish") == "swish"
                x = alias.arguments(given)
                if alias.op in ("retention", "gla") and not (fused and x.get("use_gate", True)):
                    self.norm_name = "g_norm"
                super().__init__(x.pop("hidden_size"), x.pop("num_heads"), **x)
                if x.get("tie_feature_map"):
                    self.feature_map_k = self.feature_map_q  # fla's checkpoints have it under both names
                if given.get("output_norm") == "identity":
                    self.norm = nn.Identity()
                self.layer_idx = index
                self.bounded = ours.floored and index != 0  # fla's first layer has no bound

            def forward(
                self, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None, use_cache: bool = False,
                output_attentions: bool = False, cu_seqlens: Tensor | None = None, lower_bound: Tensor | None = None,
            ) -> tuple[Tensor, None, Cache | None]:  # fmt: skip
                """As in fla. past_key_values: a `fla.models.utils.Cache`, which use_cache has the layer write to. lower_bound [channels]:
                of the forget factors of HGRN and HGRN2, but in a layer of layer_idx 0.

                Raises ValueError for a lower_bound of another layer, for output_attentions, for a cache where the layer has no layer_idx;
                TypeError for another kind of cache.
                """
                if output_attentions:
                    raise ValueError(f"{alias.name}: output_attentions: linear-attention layers form no attention matrix")
                if lower_bound is not None and not ours.floored:
                    raise ValueError(f"{alias.name}: lower_bound: this layer's gate has none")
                before = None
                if past_key_values is not None:
                    if not isinstance(past_key_values, Cache):
                        wanted = "past_key_values must be a fla.models.utils.Cache"
                        raise TypeError(f"{alias.name}: {wanted}, got {type(past_key_values).__name__}")
                    if self.layer_idx is None:
                        raise ValueError(f"{alias.name}: past_key_values needs a layer made with layer_idx")
                    before = past_key_values.states.get(self.layer_idx)
                keep = use_cache and past_key_values is not None
                depth = Depth(floor=lower_bound if self.bounded else None)
                o, state = super().forward(
                    hidden_states, attention_mask=attention_mask, cu_seqlens=cu_seqlens, state=before, output_state=keep, depth=depth
                )
                if keep:
                    past_key_values.advance(self.layer_idx, state, hidden_states.shape[1])
                return o, None, past_key_values

            def operate(self, inputs: dict[str, Tensor], *, form: Form, **options: Any) -> tuple[Tensor, Tensor | None]:
                if self.op == alias.op:
                    return super().operate(inputs, form=form, **options)
                return other.member(inputs, form=form.value, **options)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        Layer.__name__ = Layer.__qualname__ = self.name
        Layer.__module__ = f"fla.layers.{self.file}"
        Layer.__doc__ = f"`chunkwise.nn.{ours.__name__}` under fla's constructor arguments."
        Layer.__signature__ = inspect.Signature([inspect.Parameter(n, kind, default=d) for n, d in named.items()])
        return Layer


GATED = {"use_output_gate": "use_gate"}
LAYERS = (
    LayerAlias("multiscale_retention", "retention", f"MultiScaleRetention({WIDE % (1.0, 2.0, 8)}, num_kv_heads=None, feature_map=None, "
               "use_short_conv=False, conv_size=4, conv_bias=False, use_output_gate=True, gate_fn='swish', "
               f"{NORMED}, fuse_norm=True, layer_idx=None)", GATED),
    LayerAlias("gla", "gla", f"GatedLinearAttention({WIDE % (0.5, 1.0, 4)}, num_kv_heads=None, feature_map=None, use_short_conv=False, "
               f"conv_size=4, conv_bias=False, use_output_gate=True, gate_fn='swish', {NORMED}, gate_logit_normalizer=16, "
               "gate_low_rank_dim=16, clamp_min=None, fuse_norm=True, layer_idx=None)", GATED, {"clamp_min": (None,)}, low_rank=True),
    LayerAlias("delta_net", "delta_rule", "DeltaNet(mode='chunk', d_model=None, hidden_size=1024, expand_k=1.0, expand_v=1.0, num_heads=4, "
               "use_beta=True, use_gate=False, use_short_conv=True, conv_size=4, conv_bias=False, allow_neg_eigval=False, layer_idx=None, "
               "qk_activation='silu', qk_norm='l2', norm_eps=1e-5)",
               fixed={"d_model": (None,), "use_beta": (True,), "qk_activation": ("silu",), "qk_norm": ("l2",)}),
    LayerAlias("gated_deltanet", "gated_delta_rule", f"GatedDeltaNet({HEADS % 2}, use_gate=True, use_short_conv=True, "
               f"allow_neg_eigval=False, {CONV}, output_gate_activation='swish')", fixed={"output_gate_activation": ("swish", "silu")}),
    LayerAlias("kda", "kda", "KimiDeltaAttention(hidden_size=2048, expand_v=1, head_dim=128, num_heads=16, num_v_heads=None, "
               f"mode='chunk', use_short_conv=True, allow_neg_eigval=False, safe_gate=False, lower_bound=None, {CONV})"),
    LayerAlias("linear_attn", "linear_attn", f"LinearAttention({WIDE % (1.0, 1.0, 8)}, num_kv_heads=None, "
               "feature_map='elementwise_product', tie_feature_map_qk=False, output_norm='rmsnorm', norm_q=False, norm_k=False, "
               f"do_feature_map_norm=False, {NORMED}, layer_idx=None)",
               fixed={"output_norm": ("rmsnorm", "identity")}, words={"feature_map": FEATURES}, options={"use_gate": False},
               switch=("do_feature_map_norm", NORMALIZED)),
    LayerAlias("gated_deltaproduct", "gated_delta_product", f"GatedDeltaProduct({HEADS % 2}, use_output_gate=True, use_short_conv=True, "
               f"{CONV}, use_forget_gate=True, allow_neg_eigval=True, num_householder=2)", GATED),
    LayerAlias("comba", "comba", f"Comba({HEADS % 2}, use_short_conv=True, use_output_gate=True, use_output_correction=True, "
               f"use_inner_decay=True, correction_factor=1.0, {CONV})", GATED,
               {"use_output_correction": (True,), "use_inner_decay": (True,)}, options={"normalize_feedback": True}),
    LayerAlias("gsa", "gsa", f"GatedSlotAttention({WIDE % (1.0, 1.0, 4)}, num_kv_heads=None, use_short_conv=False, conv_size=4, "
               f"conv_bias=False, num_slots=None, {NORMED}, gate_logit_normalizer=8, feature_map='swish', use_output_gate=False, "
               "use_norm=True, layer_idx=None, scale=1.0)",
               fixed={"use_output_gate": (False,), "use_norm": (True,), "scale": (1.0,)},
               words={"feature_map": {"swish": "silu", "silu": "silu", "relu": "relu"}}, options={"use_gate": False},
               note="No output gate."),
    LayerAlias("abc", "abc", "ABCAttention(hidden_size=1024, expand_k=0.5, expand_v=1.0, num_heads=4, use_short_conv=False, conv_size=4, "
               f"conv_bias=False, num_slots=None, {NORMED}, gate_low_rank_dim=16, gate_logit_normalizer=16, use_rope=True, "
               "use_input_gate=False, use_output_gate=True, use_norm=True, clamp_min=-32, clamp_max=32, layer_idx=None)", GATED,
               {"use_rope": (True,), "use_input_gate": (False,), "use_norm": (True,), "clamp_min": (-32,), "clamp_max": (32,),
                "gate_logit_normalizer": (16,)}),
    LayerAlias("precond_gated_deltanet", "precond_gated_delta_rule", f"PrecondGatedDeltaNet({HEADS % 2}, use_gate=True, "
               f"use_short_conv=True, allow_neg_eigval=False, {CONV}, {SQUASH})", fixed={"log_atk_scale_init": (-0.2,)}),
    LayerAlias("precond_kda", "precond_kda", "PrecondKDA(hidden_size=2048, expand_v=1, head_dim=128, num_heads=16, num_v_heads=None, "
               f"mode='chunk', use_short_conv=True, allow_neg_eigval=False, safe_gate=False, lower_bound=None, {CONV}, {SQUASH})",
               fixed={"num_v_heads": (None,), "log_atk_scale_init": (-0.2,)}),
    LayerAlias("hgrn", "hgrn", "HGRNAttention(mode='chunk', hidden_size=1024, expand_ratio=1, use_short_conv=False, conv_size=4, "
               f"conv_bias=False, {NORMED}, layer_idx=None)", {"expand_ratio": "expand_v"}, options={"num_heads": 1}),
    LayerAlias("hgrn2", "hgrn2", "HGRN2Attention(mode='chunk', hidden_size=1024, num_heads=None, expand_ratio=128, use_short_conv=False, "
               f"conv_size=4, conv_bias=False, {NORMED}, layer_idx=None)"),
)  # fmt: skip
