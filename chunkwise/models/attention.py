"""Softmax attention for hybrid models and as a baseline: grouped heads, rotary positions, by transformers' "sdpa" or "flex_attention"."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..nn import Packing, rotary
from ..nn.linear import Linear
from ..nn.packing import sequence_index

FLEX = "flex_attention"


class Sight:
    """Which tokens each token of a call sees: earlier ones of its own document that are real. Masks are made once for all layers alike.

    Args:
        attention_mask: [B, past + T] over all columns, nonzero where a token is real; None when all are.
        implementation: transformers' name of what attends: "flex_attention", or another for "sdpa".
    """

    def __init__(self, packing: Packing, attention_mask: Tensor | None = None, implementation: str = "sdpa"):
        self.packing, self.attention_mask = packing, attention_mask
        self.flex = implementation == FLEX
        self.masks: dict[int | None, Any] = {}

    def mask(self, window: int | None, q: Tensor, k: Tensor) -> Any:
        """Of queries q [B, H, T, head] over the columns k [B, H, S, head], whose last T are their own: [B or 1, 1, T, S] bool, or as
        FlexAttention takes it; None where plain causality says it all."""
        T, S = q.shape[2], k.shape[2]
        mask = None if self.packing.documents else self.attention_mask  # padding is no document's
        if not (self.flex or self.packing.documents) and mask is None and T == S and (window is None or T <= window):
            return None
        if mask is not None and (mask.shape[1] < S or (window is None and mask.shape[1] > S)):
            raise ValueError(f"attention_mask must cover the cache and the new tokens, S = {S} columns, got {mask.shape[1]}")
        if window not in self.masks:  # caches of one kind hold as many columns
            self.masks[window] = self._made(window, mask, q.shape[0], T, S, q.device)
        return self.masks[window]

    def _made(self, window: int | None, mask: Tensor | None, B: int, T: int, S: int, device: torch.device) -> Any:
        document = sequence_index(cast(Tensor, self.packing.cu_seqlens), T) if self.packing.documents else None
        real = None if mask is None else mask[:, -S:].bool()

        def seen(row: Tensor, query: Tensor, column: Tensor) -> Tensor:
            sight = within(query - column, window)
            if document is not None:
                sight = sight & (document[query] == document[column])
            # Padding looks at itself: a softmax over nothing is NaN, in the backward pass too.
            return sight if real is None else sight & real[row, column] | (query == column)

        if self.flex:
            from torch.nn.attention.flex_attention import create_block_mask

            own = device.type != "cpu" and not torch.compiler.is_compiling()  # compiled, it is never as large as T times S
            rows = None if real is None else B
            return create_block_mask(lambda b, h, t, s: seen(b, t + (S - T), s), rows, None, T, S, device=str(device), _compile=own)
        row = torch.arange(B if real is not None else 1, device=device)[:, None, None]
        return seen(row, torch.arange(S - T, S, device=device)[:, None], torch.arange(S, device=device)).expand(len(row), T, S)[:, None]


def within(distance: Tensor, window: int | None) -> Tensor:
    """Whether a token may look so far back."""
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


class Attention(nn.Module):
    """Causal attention over all earlier tokens of the same sequence, or the last `window` of them, itself included.

    A window counts columns: padding between a row's tokens (after a prompt padded on the right, say) takes room in it.

    Raises:
        ValueError: heads that do not divide, an odd head size, a window of fewer than two tokens.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, layer_idx: int, num_kv_heads: int | None = None, head_dim: int | None = None,
        rope_theta: float = 10000.0, window: int | None = None,
    ):  # fmt: skip
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        if window is not None and window < 2:
            raise ValueError(f"sliding_attention: sliding_window must be at least 2, got {window}")
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"attention: hidden_size = {hidden_size} must be a multiple of num_heads = {num_heads}, or give head_dim")
        head_dim = head_dim or hidden_size // num_heads
        if num_heads % num_kv_heads or head_dim % 2:
            raise ValueError(
                f"attention: num_kv_heads must divide num_heads and the head size be even, got {num_kv_heads}, {num_heads}, {head_dim}"
            )
        self.num_heads, self.num_kv_heads, self.layer_idx = num_heads, num_kv_heads, layer_idx
        self.num_key_value_groups = num_heads // num_kv_heads  # as transformers' functions ask for it
        self.rope_theta, self.window = rope_theta, window
        self.q_proj = Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor, packing: Packing, sight: Sight | None = None, cache: Cache | None = None) -> Tensor:
        """x, o: [B, T, D], or [1, n, D] when packed. sight: who sees whom; None: by the packing alone."""
        sight = Sight(packing) if sight is None else sight
        q, k, v = (p(x).unflatten(-1, (h, -1)) for p, h in self._projections())
        q, k = rotary(q, packing.positions, self.rope_theta), rotary(k, packing.positions, self.rope_theta)
        padded = not packing.documents  # a padded batch goes back to [B, T] for the attention itself
        if padded:
            q, k, v = packing.unpack(q), packing.unpack(k), packing.unpack(v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, head]
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        T, plain = q.shape[2], sight.attention_mask is None and not (packing.documents or sight.flex)
        if self.window is not None and T == k.shape[2] > 2 * self.window and plain:
            return self.o_proj(packing.pack(self._blocks(q, k, v, self.window)))
        attend = ALL_ATTENTION_FUNCTIONS[FLEX if sight.flex else "sdpa"]
        o = attend(self, q, k, v, sight.mask(self.window, q, k), scaling=q.shape[-1] ** -0.5)[0].flatten(-2)
        return self.o_proj(packing.pack(o) if padded else o)

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """o [B, T, channels] of q, k, v [B, H, T, head]: blocks of `window` tokens, each of which sees itself and the block before."""
        B, H, T, D = q.shape
        n = -(-T // window)

        def split(x: Tensor, before: int) -> Tensor:
            """[B * n, H, (before + 1) * window, head]"""
            x = F.pad(x, (0, 0, before * window, n * window - T)).unfold(2, (before + 1) * window, window)  # [B, H, n, head, ..]
            return x.permute(0, 2, 1, 4, 3).flatten(0, 1)

        distance = torch.arange(window, 2 * window, device=q.device)[:, None] - torch.arange(2 * window, device=q.device)
        mask = within(distance, window).repeat(n, 1, 1)
        mask[0, :, :window] = False  # before the first block there is nothing
        mask = mask.repeat(B, 1, 1).unsqueeze(1)  # [B * n, 1, window, 2 window]
        o = F.scaled_dot_product_attention(split(q, 0), split(k, 1), split(v, 1), attn_mask=mask, enable_gqa=k.shape[1] < H)
        return o.unflatten(0, (B, n)).transpose(2, 3).reshape(B, n * window, H * D)[:, :T]

    def _projections(self) -> list[tuple[nn.Linear, int]]:
        return [(self.q_proj, self.num_heads), (self.k_proj, self.num_kv_heads), (self.v_proj, self.num_kv_heads)]
