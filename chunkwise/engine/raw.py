"""Raw streams: keys not yet normalised, gates and write strengths as a layer's projections make them.

The recurrent kernel prepares them itself, so a call without gradients that runs it has no prologue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..spec import Gate, Raw, Rule, Streams
from .library import STREAM_INPUTS, STREAMS, outside
from .problem import problem
from .prologue import NORMALIZED, prologue

if TYPE_CHECKING:
    from ..spec import Op, Output
    from .scan import Scan


NOTHING = Raw()
RAW = (  # in schemas
    "bool norm, bool norm_erase, Tensor? A_log, Tensor? dt_bias, float? lower_bound, bool sigmoid, float strength, Tensor? rate, "
    "bool softplus, Tensor? skip, bool keys, bool erases, Tensor? writes, str memory, Tensor? g_seen, Tensor? beta_seen, Tensor? centre, "
    "float middle, float most, float eps"
)

_LIBRARY = torch.library.Library("chunkwise", "FRAGMENT")
_CALL = "Tensor? S0, Tensor? cu_seqlens, str gate, str rule, float scale, bool final"
_LIBRARY.define(f"recurrent({STREAM_INPUTS}, {_CALL}, {RAW}) -> (Tensor o, Tensor ST)")


def recurrent(*args: Any) -> tuple[Tensor, Tensor]:
    """chunkwise::recurrent on a GPU."""
    from .plan_recurrent_triton import forward

    x = Streams(*args[:STREAMS])
    S0, cu, gate, rule, scale, final, *raw = args[STREAMS:]
    p = problem(x, cu, None, gate=Gate(gate), rule=Rule(rule), chunk=16, scale=scale, precision="ieee")
    o, ST, _ = forward(p, x, S0, final=final, save=False, raw=Raw(*raw))
    return o, o.new_empty(0) if ST is None else ST


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[:3]
    cu, final = args[STREAMS + 1], args[STREAMS + 5]
    B, _, HV, V = v.shape
    state = (B if cu is None else cu.shape[0] - 1, HV, q.shape[-1], V)
    return q.new_empty(*v.shape), q.new_empty(state, dtype=torch.float32) if final else q.new_empty(0)


_LIBRARY.impl("recurrent", recurrent, "CompositeExplicitAutograd")
torch.library.register_fake("chunkwise::recurrent", _fake, lib=_LIBRARY)


def asks(o: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Which of q and k, the gate, the write strength are raw."""
    return bool(o.get("use_qk_l2norm_in_kernel")), bool(o.get("use_gate_in_kernel")), bool(o.get("use_beta_sigmoid_in_kernel"))


def handed(op: Op, x: Mapping[str, Tensor | None], o: Mapping[str, Any]) -> tuple[Streams, Raw] | None:
    """The streams and what is to be done to them; None where `lower` computes, so that its inputs must be ready, not only hands on."""
    norm, gate, sigmoid = asks(o)
    settings = {n: o[n] for n in op.settings}
    if op.raw is not None:
        s, raw = op.raw(**x, **settings)
        return s, _asked(raw, o, False)
    s = op.lower(**x, **settings)  # type: ignore[misc]
    if not (norm or gate or sigmoid):
        return s, NOTHING
    comes = {n: next((name for name, given in x.items() if given is t), None) for n, t in s._asdict().items() if t is not None}
    if not (all(comes.values()) and comes["q"] == "q" and comes["k"] == "k"):
        return None
    erase = comes.get("a") or comes.get("e")
    return s, _asked(NOTHING, o, erase in NORMALIZED)


def _asked(raw: Raw, o: Mapping[str, Any], erase: bool) -> Raw:
    """And what the options ask for; erase: the erase key is one of the inputs that are normalised."""
    norm, gate, sigmoid = asks(o)
    raw = raw._replace(norm=norm, norm_erase=norm and erase, sigmoid=sigmoid, strength=2.0 if sigmoid and o["allow_neg_eigval"] else 1.0)
    return raw._replace(A_log=o["A_log"], dt_bias=o["dt_bias"], lower_bound=o["lower_bound"]) if gate else raw


def raw_streams(op: Op, x: Mapping[str, Tensor | None], o: Mapping[str, Any]) -> tuple[Streams, Raw]:
    """The streams, prepared as far as `lower` needs it, and what is still to be done to them."""
    made = handed(op, x, o)
    return made or (op.lower(**{**prologue(op.name, x, o), **{n: o[n] for n in op.settings}}), NOTHING)  # type: ignore[misc]


def recurrent_form(scan: Scan, x: Mapping[str, Tensor | None], S0: Tensor | None, o: Mapping[str, Any]) -> Output | None:
    """The call in one kernel, or None where it is not one: with gradients, in another form, elsewhere than on a GPU, in several passes."""
    op = scan.op
    if op.passes is not None or op.lower is None or not any(asks(o)):
        return None
    tensors = (*x.values(), S0, o.get("A_log"), o.get("dt_bias"))
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        return None
    made = handed(op, x, o)
    if made is None:
        return None
    s, raw = made
    cell, scale = scan.cell(s), scan.scaled(s)
    packed = scan.cu_seqlens is not None
    choice = scan.choose(
        op, cell, T=s.q.shape[1], device=s.q.device.type, grad=False, packed=packed, form=scan.form, backend=scan.backend
    )  # fmt: skip
    if not choice.plan.startswith("triton_recurrent"):
        return None
    with outside(s.q):
        out, ST = torch.ops.chunkwise.recurrent(*s, S0, scan.cu_seqlens, cell.gate.value, cell.rule.value, scale, scan.final, *raw)
    return out, ST if scan.final else None
