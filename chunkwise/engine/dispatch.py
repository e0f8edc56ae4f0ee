"""Form x device -> plan: the only place that decides, and it says so. Explicit requests never fall back."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..spec import BY_CHUNKS, Form, Gate, Output, Rule, Streams
from .problem import given
from .prologue import check_prologue, prologue

if TYPE_CHECKING:
    from ..spec import Op

CHUNKS = (16, 32, 64)
DIGITS = {"ieee": 24, "tf32x3": 22, "bf16x3": 16, "tf32": 11, "bf16": 8}  # binary ones of an inverse's factors: spec.InverseOptions
INVERSES = ("auto", *DIGITS)
WIDEST = 512  # key channels that the chunk kernels take; value channels where gates are per value
WIDEST_FLOAT32 = 256  # and those of float32
RECURRENT_WIDEST = 1024  # and the recurrent one
TRITON = importlib.util.find_spec("triton") is not None
RECURRENT_BELOW = 4  # tokens: up to so many go token by token; on a GPU without gradients


class Choice(NamedTuple):
    """What a call will run, and why."""

    form: Form
    backend: str
    plan: str
    chunk: int  # tokens; 0: the whole row
    reason: str


class Cell(NamedTuple):
    """What decides whether there are kernels for a pass."""

    gate: Gate
    rule: Rule
    dtype: torch.dtype
    K: int
    C: int
    bonus: bool = False
    erase: bool = False  # delta: a key of its own erases, after the token forgets
    before: bool = False  # delta: before it forgets
    V: int = 0  # decides as K does where gates are per value channel


def _no_kernels(cell: Cell, device: str, form: Form) -> str | None:
    """Why a pass cannot run on the Triton kernels, or None."""
    if device != "cuda":
        return f"the tensors are on {device}, not on a GPU"
    if not TRITON:
        return "triton is not installed"
    if form is Form.PARALLEL and cell.rule is not Rule.ADD:
        return f"the {form} form has none for rule {cell.rule.value!r} in this version"
    if cell.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"none for {cell.dtype}"
    if form is Form.RECURRENT:
        return None if cell.K <= RECURRENT_WIDEST else f"none for K={cell.K} above {RECURRENT_WIDEST} in this version"
    if cell.gate is Gate.VALUE and (cell.rule is not Rule.ADD or cell.bonus):
        return f"none for rule {cell.rule.value!r}{' and a bonus' if cell.bonus else ''} with gate {cell.gate.value!r} in this version"
    if cell.before and cell.gate is Gate.KEY:
        return "none for gates per key and an erase key that reads before the token forgets in this version"
    widest = WIDEST_FLOAT32 if cell.dtype == torch.float32 else WIDEST
    for name, wide in (("K", cell.K), ("V", cell.V if cell.gate is Gate.VALUE else 0)):
        if wide > widest:
            return f"none for {name}={wide} above {widest} in {cell.dtype} in this version"
    return None


def choose(
    op: Op, cell: Cell, *, T: int, device: str, grad: bool, packed: bool = False, form: str = "auto", backend: str = "auto"
) -> Choice:
    """Decide form, backend and chunk; of packed sequences T is the sum. Raises ValueError where an explicit request cannot be met."""
    try:
        wanted = Form(form)
    except ValueError:
        raise ValueError(f"{op.name}: form must be one of {', '.join(('auto', *op.forms))}, got {form!r}") from None
    if wanted not in (Form.AUTO, *op.forms):
        raise ValueError(f"{op.name}: has no {form} form; it has {', '.join(op.forms)}")
    if cell.C not in CHUNKS or not isinstance(cell.C, int):
        raise ValueError(f"{op.name}: chunk_size must be one of {', '.join(map(str, CHUNKS))}, got {cell.C}")
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"{op.name}: backend must be 'auto', 'torch' or 'triton', got {backend!r}")
    reason = "asked for"
    short = wanted is Form.AUTO and not (grad and device == "cuda")  # whether few tokens go one by one
    each = short and packed  # by its own length, where the host knows that, never by those beside it
    if wanted is Form.AUTO:
        few = short and T <= RECURRENT_BELOW and not packed
        wanted, reason = (Form.RECURRENT, f"{RECURRENT_BELOW} tokens or fewer") if few else (Form.CHUNK, "the general form")
    missing = "asked for torch" if backend == "torch" else _no_kernels(cell, device, wanted)
    if backend == "triton" and missing is not None:
        raise ValueError(f"{op.name}: backend='triton' cannot serve this call: {missing}")
    if missing is None and wanted is Form.RECURRENT:
        back = _no_kernels(cell, device, Form.CHUNK)
        if grad and back is not None:
            reason = f"{reason}; gradient by the torch backend: {back}"
        return Choice(wanted, "triton", "triton_recurrent" if back is None else "triton_recurrent_torch", cell.C, reason)
    if missing is None:
        pairs = wanted is Form.PARALLEL and cell.gate not in (Gate.KEY, Gate.VALUE) and not cell.bonus
        reason = f"{reason}; {BY_CHUNKS}" if wanted is Form.PARALLEL and not pairs else reason
        return Choice(wanted, "triton", "triton_parallel" if pairs else "triton", cell.C, reason)
    plan, chunk = ("recurrent", 1) if wanted is Form.RECURRENT else ("chunk", 0 if wanted is Form.PARALLEL else cell.C)
    plan = "mixed" if each else plan
    return Choice(wanted, "torch", plan, chunk, reason if device == "cpu" else f"{reason}; Triton kernels: {missing}")


def check_offsets(name: str, cu: Tensor, cpu: Tensor | None, B: int, T: int, device: torch.device) -> None:
    """cu_seqlens must be offsets of a packed row; values are read only where that needs no synchronisation."""
    for label, t, where in (("cu_seqlens", cu, device), ("cu_seqlens_cpu", cpu, torch.device("cpu"))):
        if t is None:
            continue
        if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: {label} must be an int32 or int64 tensor [N + 1], got {getattr(t, 'dtype', type(t).__name__)}")
        if t.ndim != 1 or t.shape[0] < 1 or t.shape != cu.shape:
            raise ValueError(f"{name}: {label} must be [N + 1], got {list(t.shape)}")
        if t.device != where:
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


def _check_state(op: Op, S0: Any, shape: tuple[int, ...], v_first: bool, device: torch.device) -> None:
    if not isinstance(S0, Tensor) or not S0.is_floating_point():
        raise TypeError(f"{op.name}: initial_state must be a floating tensor, got {getattr(S0, 'dtype', type(S0).__name__)}")
    if S0.device != device:
        raise ValueError(f"{op.name}: initial_state is on {S0.device}, {op.query} is on {device}")
    N, HV, K, V = op.state.split()
    axes, want = (f"[{N}, {HV}, {V}, {K}]", (*shape[:2], shape[3], shape[2])) if v_first else (f"[{N}, {HV}, {K}, {V}]", shape)
    if tuple(S0.shape) != want:
        raise ValueError(f"{op.name}: initial_state must be {axes} = {list(want)}, got {list(S0.shape)}")


def run(
    op: Op, inputs: Mapping[str, Tensor | None], sizes: Mapping[str, int], o: Mapping[str, Any], choose: Any = choose,
    slots: Sequence[int] | None = None, passes: list[Any] | None = None,
) -> Output:  # fmt: skip
    """A public call: options checked, prologue, lowering, the member's passes, and the pair the caller gets.

    slots: the initial state is a pool of states, which move on in place. passes: is told what was decided.
    """
    from .raw import asks, raw_form
    from .scan import Scan

    op.check_settings(o)
    check_prologue(op.name, inputs, o)
    B, T, device = sizes["B"], sizes["T"], given(inputs[op.query]).device
    cu, cpu, S0 = o["cu_seqlens"], o["cu_seqlens_cpu"], o["initial_state"]
    if cu is not None:
        check_offsets(op.name, cu, cpu, B, T, device)
    elif cpu is not None:
        raise ValueError(f"{op.name}: cu_seqlens_cpu needs cu_seqlens")
    if o["precision"] not in ("ieee", "tf32"):
        raise ValueError(f"{op.name}: precision must be 'ieee' or 'tf32', got {o['precision']!r}")
    inverse = o.get("inverse_precision", "auto")
    if inverse not in INVERSES:
        raise ValueError(f"{op.name}: inverse_precision must be one of {', '.join(INVERSES)}, got {inverse!r}")
    if S0 is not None:
        if slots is None:
            _check_state(op, S0, op.state_shape(sizes, B if cu is None else cu.shape[0] - 1), o["state_v_first"], device)
        S0 = S0.mT if o["state_v_first"] else S0
    asked = (o["form"], o["backend"], o["chunk_size"], o["precision"], inverse, o["scale"], bool(o["output_final_state"]))
    scan = Scan(op, choose, *asked, cu, cpu, slots, passes)
    made = raw_form(scan, inputs, S0, o) if device.type != "cpu" else None
    if made is None:
        ready = prologue(op.name, inputs, o) if any(asks(o)) else inputs
        x = {**ready, **{n: o[n] for n in op.settings}}
        made = op.passes(scan, S0, **x) if op.passes is not None else scan((op.lower or Streams)(**x), S0)
    out, ST = made
    return out, ST.mT if ST is not None and o["state_v_first"] else ST
