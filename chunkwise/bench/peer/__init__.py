"""The other libraries. Each is a file here, found by its name: `fla_core.py` is the peer `fla-core`.

A peer's file has
    available() -> str              "" or why it cannot be used here
    supports(c: Case) -> str        "" or why it has no such function
    call(c, x: Inputs, tensors) -> (o [B, T, HV, V], state [N, HV, K, V] or None)     differentiable, on PyTorch's tensors
or, where its tensors are not PyTorch's, `work(c, x) -> Work` in call's place; and may have
    version() -> str
    RAW = True                                                                        it takes the options of raw streams
    prepare(dtype: str)                                                               before its kernels of that type are built
    truth(c, x, backward, dtype, part) -> results                                     when what it computes is another function
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...spec import Gate, Rule
from ..case import Case, Inputs, plain
from ..record import release


@dataclass(frozen=True)
class Work:
    """A side's two calls on fixed inputs. Results by name: o, S (the state), dq, ... `read` makes PyTorch tensors of a call's result."""

    forward: Callable[[], Any]
    step: Callable[[], Any] | None  # forward and backward; None: no backward
    read: Callable[[Any], dict[str, Tensor]] = dict
    wait: Callable[[Any], None] | None = None
    capturable: bool = True
    restore: Callable[[], None] | None = None  # what a call has changed in place, back to how it was; it is proved so, not timed


def torch_work(call: Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor | None]], x: Inputs) -> Work:
    """The two calls of a differentiable function of tensors by name."""
    plain = {n: t.detach() for n, t in x.x.items()}
    leaves = {n: t.detach().requires_grad_() for n, t in x.x.items()}  # the same memory

    def forward() -> dict[str, Tensor]:
        with torch.no_grad():
            o, S = call(plain)
        return {"o": o} if S is None or x.S0 is None else {"o": o, "S": S}

    def step() -> dict[str, Tensor]:
        with torch.enable_grad():
            o, _ = call(leaves)
            d = torch.autograd.grad(o, list(leaves.values()), x.do, allow_unused=True)
        return {"o": o.detach(), **{f"d{n}": g for n, g in zip(leaves, d) if g is not None}}

    return Work(forward, step)


@cache
def peers() -> dict[str, ModuleType]:
    """Every peer there is a file for, installed or not."""
    found = {m.name: importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)}
    return {name.replace("_", "-"): module for name, module in sorted(found.items())}


def work(peer: ModuleType, c: Case, x: Inputs) -> Work:
    if hasattr(peer, "work"):
        return peer.work(c, x)
    return torch_work(lambda tensors: peer.call(c, x, tensors), x)


def lacking(peer: ModuleType, c: Case) -> str:
    """Empty, or why a peer has no part in a case."""
    if c.gates == "raw" and not getattr(peer, "RAW", False):
        return "is not asked for raw streams"
    return peer.available() or peer.supports(c)


def installed(package: str, module: str | None = None) -> str:
    """Empty, or that a distribution is not there."""
    import importlib.util

    if importlib.util.find_spec(module or package) is None:
        return f"{package} is not installed"
    return ""


def one_cell(c: Case, gate: Gate, rule: Rule, cell: str) -> str:
    """Empty, or why kernels of one cell, of 16-bit streams in whole sequences, do not serve a case."""
    if not plain(c.member) or (c.member.gate, c.member.rule) != (gate, rule):
        return f"has {cell} only, not {c.op}"
    if c.dtype not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, not {c.dtype}"
    return "" if c.form in ("auto", "chunk") and not c.decode else "has the chunk form only"


def version(name: str) -> str:
    """A peer's version, where a distribution of its name tells it."""
    return release(getattr(peers()[name], "PACKAGE", name))
