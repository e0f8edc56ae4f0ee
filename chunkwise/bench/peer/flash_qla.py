"""FlashQLA's TileLang kernels of the gated delta rule, package flash-qla."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...spec import Gate, Rule
from ..case import Case, Inputs, plain
from . import installed


def available() -> str:
    why = installed("flash-qla", "flash_qla") or installed("tilelang")
    return why or ("" if torch.cuda.is_available() else "flash-qla needs a GPU")


def supports(c: Case) -> str:
    if not plain(c.member) or (c.member.gate, c.member.rule) != (Gate.SCALAR, Rule.DELTA):
        return f"has the gated delta rule only, not {c.op}"
    if c.dtype not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, not {c.dtype}"
    return "" if c.form in ("auto", "chunk") and not c.decode else "has the chunk form only"


def call(c: Case, x: Inputs, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    from flash_qla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(**tensors, cu_seqlens=None if x.cu is None else x.cu.long())
