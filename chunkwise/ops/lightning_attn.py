"""Lightning attention: every head forgets at a rate of its own, slower in deeper layers.

    S_t = exp(g_h) S_{t-1} + k_t v_t',   g_h = -(8 h / H) (1 - layer / layers),   h = 0 .. H - 1
    o_t = scale * S_t' q_t

Qin, Sun, Li, Shen, Sun, Zhong. Lightning Attention-2: A Free Lunch for Handling Unlimited Sequence Lengths in Large Language Models. 2024.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from ..engine.constant import constant
from ..recurrence import read, write
from ..spec import Arg, Gate, Op, Output, PlainOptions, Rule, Streams


@constant
def log_decay(H: int, layer_idx: int, num_layers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Natural logarithm of every head's forget factor: [H]."""
    slope = -8 / H * (1 - layer_idx / num_layers)
    return (slope * torch.arange(H, dtype=torch.float64, device=device)).to(dtype)


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int) -> tuple[Tensor, Tensor]:
    H = S.shape[1]
    rates = [-8 * h / H * (num_layers - layer_idx) / num_layers for h in range(H)]
    forget = torch.tensor(rates, dtype=S.dtype, device=S.device).exp()
    S = forget[:, None, None] * S + write(k, v)
    return S, read(q, S)


def lower(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int) -> Streams:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return Streams(q, k, v, g=log_decay(v.shape[2], layer_idx, num_layers, dtype, device=q.device))


def fault(layer_idx: int, num_layers: int) -> str:
    return "" if 0 <= layer_idx < num_layers else f"layer_idx must be in 0 .. num_layers - 1 = {num_layers - 1}, got {layer_idx}"


LIGHTNING_ATTN = Op(
    name="lightning_attn", gate=Gate.HEAD, rule=Rule.ADD, paper="https://arxiv.org/abs/2401.04658",
    args=dict(q=Arg("B T H K"), k=Arg("B T H K"), v=Arg("B T HV V")),
    step=step, lower=lower, parallel=True, options=PlainOptions, settings=dict(layer_idx=3, num_layers=12),
    fault=fault,
)  # fmt: skip


def lightning_attn(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, **options: Unpack[PlainOptions]) -> Output:
    """Linear attention with a constant decay a head.

    q, k: [B, T, H, K]; v: [B, T, HV, V] of one dtype, HV a multiple of H; layer_idx: number of the layer, from 0, of num_layers.
    Options: `chunkwise.spec.PlainOptions`.
    Returns o: [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 inputs), or None.
    Raises ValueError or TypeError naming the argument that does not fit.
    """
    return LIGHTNING_ATTN(dict(q=q, k=k, v=v), layer_idx=layer_idx, num_layers=num_layers, **options)


(
    chunk_lightning_attn,
    fused_chunk_lightning_attn,
    fused_recurrent_lightning_attn,
    parallel_lightning_attn,
) = LIGHTNING_ATTN.publish(lightning_attn)  # fmt: skip
