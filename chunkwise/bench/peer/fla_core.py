"""flash-linear-attention's Triton operators, package fla-core. Its names and arguments are looked up, not listed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...spec import PREFIX, Form
from ..case import Case, Inputs
from . import installed

RAW = True


def available() -> str:
    why = installed("fla-core", "fla")
    return why or ("" if torch.cuda.is_available() else "fla-core needs a GPU")


@cache
def _function(name: str) -> Callable[..., Any] | None:
    ops = importlib.import_module("fla.ops")
    # Its guard refuses the gated backward on Triton 3.4.0 to 3.7.0 (fla #640). For timing it is off; the proof says if the result is right.
    importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True  # type: ignore[attr-defined]
    found = getattr(ops, name, None)
    if found is None:  # some are not gathered in its ops
        try:
            found = getattr(importlib.import_module(f"fla.ops.{name.split('_', 1)[1]}"), name, None)
        except ImportError:
            return None
    return found


def _name(c: Case) -> str:
    form = Form(c.form) if c.form != "auto" else Form.RECURRENT if c.decode else Form.CHUNK
    return f"{PREFIX[form]}_{c.op}"


def supports(c: Case) -> str:
    function = _function(_name(c))
    if function is None:
        return f"has no {_name(c)}"
    known = inspect.signature(function).parameters
    lacking = [n for n in c.member.args if _argument(n, known) not in known]
    if c.gates == "raw" and "use_qk_l2norm_in_kernel" not in known:
        lacking.append("use_qk_l2norm_in_kernel")
    return f"its {_name(c)} takes no {lacking[0]}" if lacking else ""


def _argument(name: str, known: Mapping[str, Any]) -> str:
    """Its name for an input: g is gk where it means a gate per key."""
    return "gk" if name == "g" and "g" not in known else name


def prepare(dtype: str) -> None:
    """Exact products of float32: its kernels name no precision of theirs, which means tf32. What Triton finds them under hangs on it."""
    language = importlib.import_module("triton.knobs").language
    exact = "ieee" if dtype == "float32" else None
    if language.fp32_default != exact:
        language.fp32_default = exact


def call(c: Case, x: Inputs, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    function = _function(_name(c))
    if function is None:
        raise ValueError(f"fla-core has no {_name(c)}")
    prepare(c.dtype)
    known = inspect.signature(function).parameters
    options: dict[str, Any] = {n: s for n, s in (("initial_state", x.S0), ("cu_seqlens", x.cu)) if s is not None}
    options |= {n: value for n, value in c.member.settings.items() if n in known}
    if "normalize" in known:
        options["normalize"] = False
    if "output_final_state" in known:  # its parallel forms have no states
        options["output_final_state"] = x.S0 is not None
    options |= x.options  # some go by its **kwargs
    given = {_argument(n, known): t for n, t in tensors.items()}
    return function(**given, **options)
