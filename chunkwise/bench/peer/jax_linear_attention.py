"""jax-linear-attention's Pallas kernels for Hopper, package jax-linear-attention. Tensors go by DLPack, uncopied."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ...spec import Gate, Rule
from ..case import Case, Inputs, plain
from . import Work, installed

KINDS = {
    (Gate.SCALAR, Rule.ADD): "simple_gla", (Gate.KEY, Rule.ADD): "gla",
    (Gate.NONE, Rule.DELTA): "deltanet", (Gate.SCALAR, Rule.DELTA): "gated_deltanet", (Gate.KEY, Rule.DELTA): "kda",
}  # fmt: skip


def available() -> str:
    why = installed("jax-linear-attention", "jla") or installed("jax")
    if why:
        return why
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # before JAX starts: it would take three quarters of the GPU
    import jax

    return "" if jax.default_backend() == "gpu" else "jax-linear-attention needs JAX with a GPU"


def supports(c: Case) -> str:
    if not plain(c.member) or (c.member.gate, c.member.rule) not in KINDS:
        return f"has no kind for {c.op}"
    if c.N or c.decode or c.form not in ("auto", "chunk"):
        return "timed for whole, unpacked sequences in chunk form only"
    return ""


def work(c: Case, x: Inputs) -> Work:
    import jax
    from jla.ops import linear_attention

    kind = KINDS[c.member.gate, c.member.rule]
    given = [jax.dlpack.from_dlpack(t.contiguous()) for t in x.x.values()]
    do = jax.dlpack.from_dlpack(x.do.contiguous())

    def function(*tensors: Any) -> Any:
        t = dict(zip(x.x, tensors))
        o, _ = linear_attention(kind, t.pop("q"), t.pop("k"), t.pop("v"), **t)
        return o.astype(do.dtype)

    def both(do: Any, *tensors: Any) -> Any:
        o, back = jax.vjp(function, *tensors)
        return o, *back(do)

    forward, step = jax.jit(function), jax.jit(both)
    names = ("o", *(f"d{n}" for n in x.x))

    def read(made: Any) -> dict[str, Tensor]:
        made = made if isinstance(made, (tuple, list)) else (made,)
        return {n: torch.from_dlpack(t) for n, t in zip(names, made)}

    return Work(lambda: forward(*given), lambda: step(do, *given), read, jax.block_until_ready, capturable=False)
