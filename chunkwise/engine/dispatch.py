"""Form x device -> plan: the only place that decides, and it says so. Explicit requests never fall back."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..spec import Form, Gate, Output, Streams
from . import library  # noqa: F401  (registers the operators)
from .prologue import prologue

if TYPE_CHECKING:
    from ..spec import Op

CHUNKS = (16, 32, 64)
RECURRENT_BELOW = 4  # tokens: up to so many, without gradients, go token by token


class Choice(NamedTuple):
    """What a call will run, and why."""

    form: Form
    backend: str
    plan: str
    C: int
    reason: str


def _plan(name: str):
    return cache(lambda: importlib.import_module(f"chunkwise.engine.{name}"))


@cache
def _recurrent() -> ModuleType:
    """Forward token by token; the gradient is the chunk form's."""
    plan = ModuleType("chunkwise.engine.recurrent_plan")
    chunk, recurrent = _plan("chunk")(), _plan("recurrent")()
    plan.forward, plan.backward = recurrent.forward, chunk.backward  # type: ignore[attr-defined]
    return plan


PLANS = {"chunk": _plan("chunk"), "recurrent": _recurrent, "triton": _plan("plan_triton")}


def power_of_two(T: int) -> int:
    """The smallest power of two that is at least T."""
    return 1 << max(T - 1, 0).bit_length()


def choose(
    op: Op, *, T: int, device: str, dtype: torch.dtype, grad: bool, form: str = "auto", backend: str = "auto", chunk_size: int = 64
) -> Choice:
    """Decide form, backend and chunk. Raises ValueError where an explicit request cannot be met."""
    try:
        wanted = Form(form)
    except ValueError:
        raise ValueError(f"{op.name}: form must be one of {', '.join(('auto', *op.forms))}, got {form!r}") from None
    if wanted not in (Form.AUTO, *op.forms):
        raise ValueError(f"{op.name}: has no {form} form; it has {', '.join(op.forms)}")
    if chunk_size not in CHUNKS:
        raise ValueError(f"{op.name}: chunk_size must be one of {', '.join(map(str, CHUNKS))}, got {chunk_size}")
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"{op.name}: backend must be 'auto', 'torch' or 'triton', got {backend!r}")
    if backend == "triton":
        raise ValueError(f"{op.name}: backend='triton' has no kernels for {device} tensors of {dtype} in this version")
    reason = "asked for"
    if wanted is Form.AUTO:
        few = not grad and T <= RECURRENT_BELOW
        wanted, reason = (Form.RECURRENT, f"{RECURRENT_BELOW} tokens or fewer, no gradient") if few else (Form.CHUNK, "the general form")
    C = power_of_two(max(T, 16)) if wanted is Form.PARALLEL else min(chunk_size, power_of_two(max(T, 16)))
    return Choice(wanted, "torch", "recurrent" if wanted is Form.RECURRENT else "chunk", C, reason)


def explain(op: Op | str, *, T: int, device: str = "cpu", dtype: torch.dtype = torch.float32, grad: bool = False, **options: Any) -> str:
    """One line: what a call of `op` (a member or its name) on T tokens would run, and why.

    >>> import chunkwise
    >>> chunkwise.explain("gla", T=2048)
    'gla: chunk form, torch backend, chunks of 64 (the general form)'
    """
    from ..spec import all_ops

    op = all_ops()[op] if isinstance(op, str) else op
    c = choose(op, T=T, device=device, dtype=dtype, grad=grad, **options)
    return f"{op.name}: {c.form} form, {c.backend} backend, chunks of {1 if c.form is Form.RECURRENT else c.C} ({c.reason})"


def _check_offsets(name: str, cu: Tensor, cpu: Tensor | None, B: int, T: int, device: torch.device) -> None:
    """cu_seqlens must be offsets of a packed row; values are read only where that needs no synchronisation."""
    for label, t, where in (("cu_seqlens", cu, device.type), ("cu_seqlens_cpu", cpu, "cpu")):
        if t is None:
            continue
        if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: {label} must be an int32 or int64 tensor [N + 1], got {getattr(t, 'dtype', type(t).__name__)}")
        if t.ndim != 1 or t.shape[0] < 1 or t.shape != cu.shape:
            raise ValueError(f"{name}: {label} must be [N + 1], got {list(t.shape)}")
        if t.device.type != where:
            raise ValueError(f"{name}: {label} must be on {where}, got {t.device}")
    if B != 1:
        raise ValueError(f"{name}: cu_seqlens packs sequences into one row: flatten to B=1, got B={B}")
    host = cpu if cpu is not None else cu
    if host.device.type == "cpu" and not torch.compiler.is_compiling():
        ends = host.tolist()
        if ends[0] != 0 or ends[-1] != T or any(b < a for a, b in zip(ends, ends[1:])):
            raise ValueError(
                f"{name}: cu_seqlens must rise from 0 to T={T}, got {ends if len(ends) < 10 else [*ends[:4], '...', *ends[-3:]]}"
            )


def _check_state(name: str, S0: Any, shape: tuple[int, ...], v_first: bool, device: torch.device) -> None:
    if not isinstance(S0, Tensor) or not S0.is_floating_point():
        raise TypeError(f"{name}: initial_state must be a floating tensor, got {getattr(S0, 'dtype', type(S0).__name__)}")
    if S0.device != device:
        raise ValueError(f"{name}: initial_state is on {S0.device}, q is on {device}")
    axes, want = ("[N, HV, V, K]", (*shape[:2], shape[3], shape[2])) if v_first else ("[N, HV, K, V]", shape)
    if tuple(S0.shape) != want:
        raise ValueError(f"{name}: initial_state must be {axes} = {list(want)}, got {list(S0.shape)}")


def run(op: Op, inputs: Mapping[str, Tensor | None], sizes: Mapping[str, int], o: Mapping[str, Any]) -> Output:
    """A public call: options checked, prologue, lowering, choice, the operator, and the pair the caller gets."""
    x: Streams = op.lower(**prologue(op.name, inputs, o))
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    cu, cpu, S0 = o["cu_seqlens"], o["cu_seqlens_cpu"], o["initial_state"]
    if cu is not None:
        _check_offsets(op.name, cu, cpu, B, T // op.substeps, x.q.device)
    elif cpu is not None:
        raise ValueError(f"{op.name}: cu_seqlens_cpu needs cu_seqlens")
    if o["precision"] not in ("ieee", "tf32"):
        raise ValueError(f"{op.name}: precision must be 'ieee' or 'tf32', got {o['precision']!r}")
    N = B if cu is None else cu.shape[0] - 1
    if S0 is not None:
        _check_state(op.name, S0, (N, HV, K, V), o["state_v_first"], x.q.device)
        S0 = S0.mT if o["state_v_first"] else S0
    if op.substeps > 1:
        cu, cpu = (None if t is None else t * op.substeps for t in (cu, cpu))
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*x, S0))
    c = choose(
        op, T=T, device=x.q.device.type, dtype=x.q.dtype, grad=grad, form=o["form"], backend=o["backend"], chunk_size=o["chunk_size"]
    )
    scale = K**-0.5 if o["scale"] is None else float(o["scale"])
    gate = Gate.NONE if x.g is None else op.gate
    final = bool(o["output_final_state"])
    out, ST, _ = torch.ops.chunkwise.forward(*x, S0, cu, cpu, gate.value, op.rule.value, c.plan, c.C, scale, o["precision"], final, grad)
    out = out[:, op.substeps - 1 :: op.substeps] if op.substeps > 1 else out
    if not final:
        return out, None
    return out, ST.mT if o["state_v_first"] else ST
