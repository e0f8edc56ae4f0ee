"""How well a model predicts, by how many tokens it has seen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .cache import CACHE_FIELD


@torch.no_grad()
def nats_by_context(model: nn.Module, tokens: Tensor, piece: int = 1024) -> Tensor:
    """Mean negative log likelihood in nats of the token after 1 .. T - 1 tokens of the same row: [T - 1] float64 on the CPU.

    tokens: [N, T] int64 on the model's device, T at least 2. piece: tokens a call, each continuing the last one's cache, so that long rows
    take no more memory than that for logits.
    """
    if tokens.ndim != 2 or tokens.shape[1] < 2 or tokens.shape[0] < 1:
        raise ValueError(f"nats_by_context: tokens must be [N, T] with N >= 1 and T >= 2, got {list(tokens.shape)}")
    if piece < 1:
        raise ValueError(f"nats_by_context: piece must be at least 1, got {piece}")
    nats, cache = [], None
    for start in range(0, tokens.shape[1] - 1, piece):
        read, due = tokens[:, start : min(start + piece, tokens.shape[1] - 1)], tokens[:, start + 1 : start + piece + 1]
        output = model(read, use_cache=True, **({} if cache is None else {CACHE_FIELD: cache}))
        cache = output.get(CACHE_FIELD)
        scores = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))  # [N, piece, vocab]
        nats.append(
            nn.functional.cross_entropy(scores.flatten(0, 1), due.flatten(), reduction="none").view(due.shape).double().mean(0).cpu()
        )
    return torch.cat(nats)


def by_doubling(nats: Tensor) -> dict[int, float]:
    """{tokens seen: mean nats of the tokens after so many and up to twice as many}, from nats [T - 1]: 1, 2-3, 4-7, ..."""
    edges = [2**i for i in range(nats.numel().bit_length())]
    return {a: nats[a - 1 : 2 * a - 1].mean().item() for a in edges}
