"""Softmax attention, PyTorch's: another function, at the price a Transformer pays for the same shape. Proved against itself in float64."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..case import Case, Inputs
from ..proof import Part

LONG = 1 << 15  # tokens whose float64 score matrix, one head at a time, still fits into a large GPU
PACKAGE = "torch"


def available() -> str:
    return ""


def supports(c: Case) -> str:
    if not {"q", "k", "v"} <= set(c.member.args) or any(len(c.member.args[n].axes.split()) != 4 for n in "qkv"):
        return f"{c.op} has no q, k, v of one token each"
    if c.N or c.decode:
        return "timed for whole, unpacked sequences only"
    return f"T={c.T} is too long to prove" if c.T > LONG else ""


def call(c: Case, x: Inputs, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    q, k, v = (tensors[n].transpose(1, 2) for n in "qkv")
    n = c.HV // c.H  # PyTorch groups queries, not values: queries and keys are repeated
    q, k = (t.repeat_interleave(n, 1) if t.shape[1] != c.HV else t for t in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None


def truth(c: Case, x: Inputs, backward: bool, dtype: torch.dtype, p: Part) -> dict[str, Tensor]:
    """The definition, one row of scores a query: softmax(q k' / sqrt(K)) v, on the part."""
    q, k, v = (p.pick(x.x[n], c.member.args[n].axes).to(dtype).transpose(1, 2).detach().requires_grad_(backward) for n in "qkv")
    n = v.shape[1] // k.shape[1]
    with torch.set_grad_enabled(backward):
        score = q.repeat_interleave(n, 1) @ k.repeat_interleave(n, 1).mT * c.K**-0.5
        hidden = torch.ones(c.T, c.T, dtype=torch.bool, device=q.device).triu(1)
        o = score.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    made = {"o": o.detach().transpose(1, 2)}
    if backward:
        d = torch.autograd.grad(o, (q, k, v), p.pick(x.do, "B T HV V").to(dtype).transpose(1, 2))
        made |= {f"d{n}": t.transpose(1, 2) for n, t in zip("qkv", d)}
    return made
