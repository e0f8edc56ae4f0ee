"""FlashQLA's TileLang kernels of the gated delta rule, package flash-qla."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...spec import Gate, Rule
from ..case import Case, Inputs
from . import installed, one_cell


def available() -> str:
    why = installed("flash-qla", "flash_qla") or installed("tilelang")
    return why or ("" if torch.cuda.is_available() else "flash-qla needs a GPU")


def supports(c: Case) -> str:
    return one_cell(c, Gate.SCALAR, Rule.DELTA, "the gated delta rule")


def call(c: Case, x: Inputs, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    from flash_qla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(**tensors, cu_seqlens=None if x.cu is None else x.cu.long())
