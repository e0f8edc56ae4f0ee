"""A function of flash-linear-attention (fla) under its own name and signature, computed by an operator of chunkwise."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from ..engine.dispatch import CHUNKS, DIGITS
from ..spec import PREFIX, public_functions

HINTS = {  # arguments that choose how fla computes, never what
    "chunk_indices", "safe_gate", "disable_recompute", "checkpoint_level", "use_graph", "max_num_seqs",
}  # fmt: skip
ABSENT = {  # arguments that ask for what chunkwise has not
    "cp_context": "context parallelism",
    "return_intermediate_states": "states inside a sequence",
    "output_attentions": "attention matrices",
}
RAW_GATE = ("A_log", "dt_bias", "lower_bound")
NONE: Mapping[str, str] = MappingProxyType({})
Call = Callable[..., Any]


@dataclass(frozen=True)
class Alias:
    """One name of fla. `signature` is what callers may pass; what fla hides in **kwargs is named in it."""

    folder: str  # below fla.ops
    signature: str
    to: str = ""  # chunkwise's function; fla's name unless said otherwise
    rename: Mapping[str, str] = field(default_factory=lambda: NONE)  # fla's names of inputs -> chunkwise's
    convert: Callable[[Call, dict[str, Any]], Any] | None = None  # where states, or the choice of the operator, differ
    note: str = ""  # what differs, for the table in docs/compat.md

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]

    @property
    def file(self) -> str:
        """The submodule of the folder that holds it: chunk, fused_recurrent, ..."""
        return next((p for p in PREFIX.values() if self.name.startswith(p)), "fused_recurrent")

    @property
    def target(self) -> str:
        return self.to or self.name

    def function(self) -> Callable[..., Any]:
        """The function. Its parameters are real and named, for those that read signatures; unknown keywords are refused by name.

        Raises (the function): TypeError for arguments missing, unknown or given twice; ValueError for what fla has and chunkwise has not,
        and whatever the operator refuses.
        """
        name, rename, convert = self.name, dict(self.rename), self.convert
        named = parameters(self.signature)
        order = tuple(named)
        defaults = {n: d for n, d in named.items() if d is not inspect.Parameter.empty}
        target = public_functions()[self.target]

        def call(**x: Any) -> Any:
            return evaluate(target, {rename.get(n, n): t for n, t in x.items()})

        def function(*args: Any, **kwargs: Any) -> Any:
            x = translate(name, bind(name, order, defaults, args, kwargs))
            return call(**x) if convert is None else convert(call, x)

        function.__name__ = function.__qualname__ = name
        function.__module__ = f"fla.ops.{self.folder}"
        function.__doc__ = f"`chunkwise.{self.target}` under fla's signature.{' ' + self.note if self.note else ''}"
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        function.__signature__ = inspect.Signature([inspect.Parameter(n, kind, default=d) for n, d in named.items()])  # type: ignore[attr-defined]
        return function


@cache
def parameters(signature: str) -> Mapping[str, Any]:
    """Names of a signature's parameters with their defaults, `Parameter.empty` where there is none."""
    (declared,) = ast.parse(f"def {signature}: ...").body
    if not isinstance(declared, ast.FunctionDef):
        raise ValueError(f"{signature!r} is no signature")
    names = [a.arg for a in declared.args.args]
    values = [ast.literal_eval(d) for d in declared.args.defaults]
    return MappingProxyType(dict(zip(names, [inspect.Parameter.empty] * (len(names) - len(values)) + values)))


def bind(name: str, order: tuple[str, ...], defaults: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name. Raises TypeError naming the function and the argument."""
    if len(args) > len(order):
        raise TypeError(f"{name}: takes at most {len(order)} arguments, got {len(args)}")
    x = dict(zip(order, args))
    for n, value in kwargs.items():
        if n not in order:
            raise TypeError(f"{name}: unexpected keyword {n!r}; it takes {', '.join(order)}")
        if n in x:
            raise TypeError(f"{name}: {n} is given twice")
        x[n] = value
    missing = [n for n in order if n not in x and n not in defaults]
    if missing:
        raise TypeError(f"{name}: needs {', '.join(missing)}")
    return {**defaults, **x}


def translate(name: str, x: dict[str, Any]) -> dict[str, Any]:
    """fla's options in chunkwise's terms: hints dropped, older names replaced, what cannot be met refused."""
    x = {n: value for n, value in x.items() if n not in HINTS}
    if x.pop("head_first", None):
        raise ValueError(f"{name}: head_first=True: inputs must be [B, T, H, D], got them head first; transpose axes 1 and 2")
    for n, what in ABSENT.items():
        if x.pop(n, None):
            raise ValueError(f"{name}: {n}: chunkwise has no {what}")
    if x.pop("transpose_state_layout", None):
        if x.get("state_v_first"):
            raise ValueError(f"{name}: transpose_state_layout is the older name of state_v_first: give one, not both")
        warnings.warn(f"{name}: transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=4)
        x["state_v_first"] = True
    flattened = x.pop("cu_seq_lens_q", None)  # what transformers calls the offsets
    if flattened is not None and x.get("cu_seqlens") is None:
        x["cu_seqlens"] = flattened
    inverse = x.pop("solve_tril_precision", None)  # of the products of an inverse
    if inverse is not None:
        if inverse not in DIGITS:
            raise ValueError(f"{name}: solve_tril_precision must be None or one of {', '.join(DIGITS)}, got {inverse!r}")
        x["inverse_precision"] = inverse
    if x.get("chunk_size") not in CHUNKS:
        x.pop("chunk_size", None)
    if not x.get("use_gate_in_kernel"):
        x = {n: value for n, value in x.items() if n not in RAW_GATE}
    elif x.get("A_log") is None and x.get("lower_bound") is not None:
        x["A_log"] = x["g"].new_zeros(x["g"].shape[2])  # lower_bound sigmoid(g + dt_bias)
    return x


def evaluate(target: Callable[..., Any], x: dict[str, Any]) -> Any:
    """Call an operator; `reverse=True` runs it from the last token of each sequence to the first."""
    op = getattr(target, "__chunkwise_op__", None)
    if op is not None and "scale" in x and x["scale"] is None and op.scale is not None:
        x["scale"] = x[op.query].shape[-1] ** -0.5  # fla's default, whatever the member's own
    if not x.pop("reverse", False):
        return target(**x)
    cu = x.get("cu_seqlens")
    for n, t in x.items():
        if t is not None and op is not None and n in op.args and op.args[n].per_token:
            x[n] = t.flip(1)
    if cu is not None:
        x["cu_seqlens"] = cu[-1] - cu.flip(0)
        x["initial_state"] = None if x["initial_state"] is None else x["initial_state"].flip(0)
    o, S = target(**x)
    return o.flip(1), S if S is None or cu is None else S.flip(0)
