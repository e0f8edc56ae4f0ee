"""Softmax attention for hybrid models and as a baseline: grouped heads, rotary positions, PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..nn import Packing, rotary
from ..nn.linear import Linear
from ..nn.packing import sequence_index


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
        self.rope_theta, self.window = rope_theta, window
        self.q_proj = Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor, packing: Packing, attention_mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """x, o: [B, T, D], or [1, n, D] when packed.

        Args:
            attention_mask: [B, past + T] over all columns, nonzero where a token is real; None when all are.
        """
        q, k, v = (p(x).unflatten(-1, (h, -1)) for p, h in self._projections())
        q, k = rotary(q, packing.positions, self.rope_theta), rotary(k, packing.positions, self.rope_theta)
        padded = not packing.documents  # a padded batch goes back to [B, T] for the attention itself
        if padded:
            q, k, v = packing.unpack(q), packing.unpack(k), packing.unpack(v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, head]
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        T, S = q.shape[2], k.shape[2]
        if self.window is not None and T == S > 2 * self.window and attention_mask is None and not packing.documents:
            return self.o_proj(packing.pack(self._blocks(q, k, v, self.window)))
        mask = self._documents(packing, T) if packing.documents else self._padding(attention_mask, T, S, q.device)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.num_kv_heads < self.num_heads)
        o = o.transpose(1, 2).flatten(-2)
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
        mask = self._within(distance).repeat(n, 1, 1)
        mask[0, :, :window] = False  # before the first block there is nothing
        mask = mask.repeat(B, 1, 1).unsqueeze(1)  # [B * n, 1, window, 2 window]
        o = F.scaled_dot_product_attention(split(q, 0), split(k, 1), split(v, 1), attn_mask=mask, enable_gqa=k.shape[1] < H)
        return o.unflatten(0, (B, n)).transpose(2, 3).reshape(B, n * window, H * D)[:, :T]

    def _projections(self) -> list[tuple[nn.Linear, int]]:
        return [(self.q_proj, self.num_heads), (self.k_proj, self.num_kv_heads), (self.v_proj, self.num_kv_heads)]

    def _padding(self, attention_mask: Tensor | None, T: int, S: int, device: torch.device) -> Tensor | None:
        """[B or 1, 1, T, S] bool over the S columns at hand, or None where plain causality says it all."""
        if attention_mask is None and T == S and (self.window is None or T <= self.window):
            return None
        earlier = self._within(torch.arange(S - T, S, device=device)[:, None] - torch.arange(S, device=device))
        if attention_mask is None:
            return earlier[None, None]
        if attention_mask.shape[1] < S or (self.window is None and attention_mask.shape[1] > S):
            raise ValueError(f"attention_mask must cover the cache and the new tokens, S = {S} columns, got {attention_mask.shape[1]}")
        # Padding rows look at themselves: a softmax over nothing is NaN, in the backward pass too.
        itself = torch.zeros_like(earlier).diagonal_scatter(torch.ones(T, dtype=torch.bool, device=device), S - T)
        return (earlier & attention_mask[:, -S:].bool()[:, None, :] | itself)[:, None]

    def _documents(self, packing: Packing, tokens: int) -> Tensor:
        """[1, 1, n, n] bool: earlier tokens of the same document."""
        document, token = sequence_index(cast(Tensor, packing.cu_seqlens), tokens), torch.arange(tokens, device=packing.positions.device)
        return ((document[:, None] == document) & self._within(token[:, None] - token))[None, None]

    def _within(self, distance: Tensor) -> Tensor:
        """Whether a token may look so far back."""
        return (distance >= 0) if self.window is None else (distance >= 0) & (distance < self.window)
