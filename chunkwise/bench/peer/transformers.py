"""The PyTorch fallbacks inside transformers' models: what runs where no kernels are installed. The decorated names may hand over to
other packages; what they wrap is the fallback itself."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...spec import Gate, Rule
from ..case import Case, Inputs, plain
from . import installed

WHERE = {  # gate, rule: module, chunk form, token form
    (Gate.SCALAR, Rule.DELTA): (
        "qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule",
    ),
    (Gate.KEY, Rule.DELTA): ("kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
}  # fmt: skip
GROUPED = {Gate.SCALAR}  # takes more value heads than heads


def available() -> str:
    return installed("transformers")


def _function(c: Case) -> Callable[..., Any]:
    module, chunk, recurrent = WHERE[c.member.gate, c.member.rule]
    name = recurrent if c.form == "recurrent" or (c.form == "auto" and c.decode) else chunk
    return inspect.unwrap(getattr(importlib.import_module(f"transformers.models.{module}"), name))


def supports(c: Case) -> str:
    if not plain(c.member) or (c.member.gate, c.member.rule) not in WHERE:
        return f"has no fallback for {c.op}"
    if c.N:
        return "its fallbacks take no packed sequences"
    if c.HV != c.H and c.member.gate not in GROUPED:
        return f"its fallback takes as many value heads as heads, got HV={c.HV}, H={c.H}"
    if c.dtype == "float64":
        return "its fallbacks compute in float32"
    try:
        _function(c)
    except (ImportError, AttributeError) as missing:
        return f"this version has no such fallback: {missing}"
    return ""


def call(c: Case, x: Inputs, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    t = tensors
    return _function(c)(t["q"], t["k"], t["v"], g=t["g"], beta=t["beta"], initial_state=x.S0, output_final_state=x.S0 is not None)
