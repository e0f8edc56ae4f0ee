"""The one modeling file: a stack of mixers and gated feed-forward layers as a Hugging Face causal language model."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ..nn import (
    ChannelMix,
    Depth,
    GatedMLP,
    LayerNorm,
    Mixer,
    Packing,
    RMSNorm,
    ShortConvolution,
    all_mixers,
    cross_entropy,
    linear_cross_entropy,
    mixer_class,
    plan_packing,
)
from ..nn.joint import hooked, plain
from ..nn.linear import Linear
from .attention import Attention, Sight
from .cache import CACHE_FIELD, MixerCacheLayer, open_cache, tokens_seen
from .configuration import ATTENTION, NONE, ChunkwiseConfig

IGNORED = -100  # the label of tokens that are not predicted


class Block(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)); without the first half for the layer type "none", without the second for such an mlp."""

    def __init__(self, config: ChunkwiseConfig, layer_idx: int):
        super().__init__()
        D, name = config.hidden_size, cast(list, config.layer_types)[layer_idx]
        self.layer_idx = layer_idx
        self.attn: nn.Module | None = None
        if name in ATTENTION:
            window = config.sliding_window if "sliding_window" in ATTENTION[name] else None
            self.attn = Attention(D, layer_idx=layer_idx, window=window, **config.attention_options())
        elif name != NONE:
            mixer = mixer_class(name)
            self.attn = mixer(D, config.num_heads, **config.mixer_options(name), **mixer.place(layer_idx, cast(list, config.layer_types)))
        if self.attn is not None:
            self.attn_norm = norm(config)
        self.mlp: nn.Module | None = None
        inner = cast(int, config.intermediate_size)
        if config.mlp == "gated":
            self.mlp = GatedMLP(D, inner, config.hidden_act)
        elif config.mlp != NONE:
            gated = config.mlp.startswith("gated")
            self.mlp = ChannelMix(D, inner, config.hidden_act, gated=gated, layer_idx=layer_idx, num_layers=config.num_hidden_layers)
        if self.mlp is not None:
            self.mlp_norm = norm(config)

    def forward(
        self,
        x: Tensor,
        y: Tensor | None,
        packing: Packing,
        sight: Sight | None = None,
        cache: Cache | None = None,
        floor: Tensor | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x + y [B, T, D], or [1, n, D] when packed, is the input, and x + y of what is returned the output: the sum is taken together with
        the norm that comes next. floor and first: see `Depth`. Returns x, y and, for the layers above, first."""
        state, before = None, None
        layer = None if cache is None else cache.layers[self.layer_idx]
        depth = Depth(floor, first)
        if self.attn is not None:
            normed, x = add(self.attn_norm, x, y)
            if isinstance(self.attn, Attention):
                y = self.attn(normed, packing, sight, cache)
            else:
                before = layer.state if isinstance(layer, MixerCacheLayer) else None
                y, state = self.attn(normed, packing=packing, state=before, output_state=layer is not None, depth=depth)
        if self.mlp is not None:
            normed, x = add(self.mlp_norm, x, y)
            if isinstance(self.mlp, ChannelMix):
                y, last = self.mlp(normed, packing, None if before is None else before.mlp, layer is not None)
                state = None if state is None else state._replace(mlp=last)
            else:
                y = self.mlp(normed)
        if isinstance(layer, MixerCacheLayer):
            layer.advance(state, packing.length)
        if y is not None and hooked(self):  # who listens hears the output itself
            x, y = x + y, None
        return x, y, depth.first


def add(norm: RMSNorm | LayerNorm, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm of x + y, x + y), in one pass over memory where the norm is nothing but itself."""
    if y is None:
        return norm(x), x
    if plain(norm, RMSNorm, LayerNorm):
        return norm.add(y, x)
    x = x + y
    return norm(x), x


def norm(config: ChunkwiseConfig) -> RMSNorm | LayerNorm:
    """The norm between the model's parts."""
    return RMSNorm(config.hidden_size, config.norm_eps) if config.norm == "rms" else LayerNorm(config.hidden_size, config.norm_eps, True)


class ChunkwisePreTrainedModel(PreTrainedModel):
    """Initialisation and loading, shared by the model with and without the head."""

    config_class = ChunkwiseConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # forward takes num_items_in_batch
    _input_embed_layer = "embeddings"
    _no_split_modules = ["Block"]
    _is_stateful = True  # a recurrent state cannot be rolled back
    _supports_sdpa = True
    _supports_flex_attn = True
    _keep_in_fp32_modules_strict = sorted({name for mixer in all_mixers().values() for name in mixer.keep_float32})

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Mixer | ChannelMix):
            module.reset_parameters(init.copy_)
        elif isinstance(module, ChunkwiseModel) and hasattr(module, "lower_bounds"):
            init.zeros_(module.lower_bounds)
        elif isinstance(module, ShortConvolution):
            init.uniform_(module.weight, -module.bound, module.bound)
            if module.bias is not None:
                init.uniform_(module.bias, -module.bound, module.bound)


class ChunkwiseModel(ChunkwisePreTrainedModel):
    """Embeddings, the blocks and a last norm."""

    def __init__(self, config: ChunkwiseConfig):
        super().__init__(config)
        config.validate_layer_type()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        if config.embedding_norm:
            self.embedding_norm = norm(config)
        self.norm = norm(config)
        floored = [b.attn.key_dim for b in self.layers if isinstance(b.attn, Mixer) and b.attn.floored]
        if floored and config.use_lower_bound is not False:
            self.lower_bounds = nn.Parameter(torch.zeros(config.num_hidden_layers, floored[0]))
            self.spare_decay = ("lower_bounds",)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        past_key_values: Cache | None = None,
        packing: Packing | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """The last layer's normed states, [B, T, D]; zero at padding.

        Args:
            input_ids [B, T] int64, or inputs_embeds [B, T, D].
            attention_mask [B, S], position_ids [B, T], cu_seqlens [N + 1]: padding and packed documents, see `nn.plan_packing`.
                S counts the cached columns too.
            cache: the states of earlier calls, a transformers Cache; `past_key_values` is its older name.
            use_cache: return the cache; default config.use_cache outside training, False in training.
            packing: the plan of this call, when the caller has made it (`plan`).

        Raises:
            ValueError: shapes and options that contradict each other, naming them.
        """
        if output_attentions:
            raise ValueError("output_attentions: linear-attention layers form no attention matrix")
        cache = self.open(cache, past_key_values, use_cache)
        if packing is None:
            packing = self.plan(input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache)
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if packing.documents and cache is not None and ATTENTION.keys() & set(cast(list, self.config.layer_types)):
            if use_cache or cache.get_seq_length() > 0:
                raise ValueError("packed documents leave no cache in a model with attention layers: pass use_cache=False")
            cache = None
        if attention_mask is not None and not torch.compiler.is_compiling() and bool(attention_mask.all()):
            attention_mask = None
        sight = Sight(packing, attention_mask, self.config._attn_implementation)

        x = packing.pack(x)
        if self.config.embedding_norm:
            x = self.embedding_norm(x)
        every = [x] if _flag(output_hidden_states, self.config.output_hidden_states) else None
        floors, first = self.floors(), None
        y = None
        for block, floor in zip(self.layers, floors, strict=True):
            x, y, first = block(x, y, packing, sight, cache, floor, first)
            if every is not None:
                every.append(x if y is None else x + y)
        last = packing.unpack(add(self.norm, x, y)[0])
        hidden = None if every is None else (*(packing.unpack(s) for s in every[:-1]), last)
        output = BaseModelOutputWithPast(last_hidden_state=last, hidden_states=hidden, **{CACHE_FIELD: cache})
        return output if _flag(return_dict, self.config.return_dict) else output.to_tuple()

    def floors(self) -> list[Tensor | None]:
        """The lower bound [channels] of every layer's forget factor, rising from 0 at the lowest, where None says it; for HGRN."""
        L = len(self.layers)
        if not hasattr(self, "lower_bounds"):
            return [None] * L
        share = self.lower_bounds.softmax(0, dtype=torch.promote_types(self.lower_bounds.dtype, torch.float32))
        return [None, *(share.cumsum(0) - share[:1])[1:].unbind(0)]

    def open(self, cache: Cache | None, past_key_values: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache of this call, ready for this model's layers, or None."""
        if cache is not None and past_key_values is not None:
            raise ValueError("past_key_values is the older name of cache: give one, not both")
        cache = past_key_values if cache is None else cache
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled() and (cache is not None or use_cache):
            raise ValueError("use_cache: gradient checkpointing runs each layer twice, so it cannot keep a cache; pass use_cache=False")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return None if cache is None and not use_cache else open_cache(self.config, cache)

    def plan(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, attention_mask: Tensor | None, position_ids: Tensor | None,
        cu_seqlens: Tensor | None, cache: Cache | None,
    ) -> Packing:  # fmt: skip
        """How the call is laid out: `nn.plan_packing` with what the cache knows."""
        x = input_ids if inputs_embeds is None else inputs_embeds
        if x is None or input_ids is not None and inputs_embeds is not None:
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        seen = None if cache is None else tokens_seen(cache)
        if seen is None and cache is not None and position_ids is None and (past := cache.get_seq_length()) > 0:
            # Attention layers alone: they count columns, and the mask tells which of them are real.
            real = torch.ones(x.shape[0], past, device=x.device) if attention_mask is None else attention_mask[:, :past]
            seen = real.to(torch.int64).sum(1)
        return plan_packing(
            x.shape[0], x.shape[1], device=x.device, attention_mask=attention_mask, position_ids=position_ids, cu_seqlens=cu_seqlens,
            offset=seen, keep=cache is not None,
        )  # fmt: skip


class ChunkwiseForCausalLM(ChunkwisePreTrainedModel, GenerationMixin):
    """The language model: `ChunkwiseModel` and a linear head."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: ChunkwiseConfig):
        super().__init__(config)
        self.model = ChunkwiseModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        cu_seqlens: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        output_logits: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits [B, T, vocab], and the loss when labels are given. Arguments not named here: `ChunkwiseModel.forward`.

        Args:
            labels: [B, T] int64, unshifted; -100 is not predicted, and neither are padding and the first token of any document or row.
                The loss is the mean cross entropy in nats over what is predicted, 0 when nothing is.
            logits_to_keep: the last so many positions, or the positions in a tensor; 0 is all. Not together with labels.
            num_items_in_batch: divide the summed loss by this instead (gradient accumulation).
            cu_seq_lens_q: `cu_seqlens` under the name that transformers' flattening collator gives it; cu_seq_lens_k, max_length_q,
                max_length_k and seq_idx say the same again and are not read.
            output_logits: whether logits are returned; default config.output_logits, whose default is: not with labels in training, where
                the loss is computed without ever storing them all.
        """
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("logits_to_keep cuts the positions that labels need: give one, not both")
        if cu_seqlens is None:
            cu_seqlens = cu_seq_lens_q
        cache = self.model.open(cache, past_key_values, use_cache)
        packing = self.model.plan(input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache)
        output = self.model(
            input_ids, attention_mask, cache=cache, inputs_embeds=inputs_embeds, use_cache=use_cache, packing=packing,
            output_hidden_states=output_hidden_states, output_attentions=output_attentions, return_dict=True,
        )  # fmt: skip
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep > 0 else logits_to_keep
        hidden, logits, loss = output.last_hidden_state, None, None
        wanted = self.config.output_logits if output_logits is None else output_logits
        if labels is None or not plain(self.lm_head, Linear, nn.Linear) or (not self.training if wanted is None else wanted):
            logits = self.lm_head(hidden if isinstance(keep, int) else hidden[:, keep])
        if labels is not None:
            target = _targets(labels, hidden, packing)
            if logits is None:
                total = linear_cross_entropy(hidden, self.lm_head.weight, target, ignore_index=IGNORED, reduction="sum")
            else:
                total = cross_entropy(logits, target.to(logits.device), ignore_index=IGNORED, reduction="sum")
            loss = total / ((target != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=output.hidden_states, **{CACHE_FIELD: output.get(CACHE_FIELD)}
        )
        return result if _flag(return_dict, self.config.return_dict) else result.to_tuple()

    def generate(self, inputs: Tensor | None = None, *args: Any, **options: Any) -> Any:
        """As in transformers, for prompts padded on either side: new tokens come after the last column, so rows whose padding is there
        are read with it moved to the front. The prompts come back as they were given."""
        name = "input_ids" if inputs is None else "inputs"
        given, mask = options.get("input_ids") if inputs is None else inputs, options.get("attention_mask")
        if given is None or mask is None or mask.shape != given.shape or bool(mask[:, -1:].all()):
            return super().generate(inputs, *args, **options)
        order = mask.bool().to(torch.int8).argsort(dim=1, stable=True)  # padding first, the tokens in their order
        moved = {**options, name: given.gather(1, order), "attention_mask": mask.gather(1, order)}
        result = super().generate(moved.pop("inputs", None), *args, **moved)
        sequences = result if isinstance(result, Tensor) else result.sequences
        B, T = given.shape
        sequences[:, :T] = given.repeat_interleave(sequences.shape[0] // max(B, 1), 0)
        return result


def _targets(labels: Tensor, hidden: Tensor, packing: Packing) -> Tensor:
    """[B, T]: what each token has to predict, the next label of its own sequence; IGNORED at ends and at padding."""
    if labels.shape != hidden.shape[:2]:
        raise ValueError(f"labels must be [B, T] = {list(hidden.shape[:2])}, got {list(labels.shape)}")
    labels = labels.to(hidden.device)
    if packing.cu_seqlens is None:
        return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    target = nn.functional.pad(packing.pack(labels), (0, 1), value=IGNORED)  # [1, n + 1]
    target = target.index_fill(1, packing.cu_seqlens, IGNORED)[:, 1:]  # nothing predicts a first token
    if (kept := packing.kept) is not None:
        target = torch.where(kept, target, IGNORED)
    if packing.index is None:
        return target.view(labels.shape)
    return torch.full_like(labels, IGNORED).view(-1).index_copy(0, packing.index, target.squeeze(0)).view(labels.shape)


def _flag(given: bool | None, default: bool | None) -> bool:
    return bool(default if given is None else given)
