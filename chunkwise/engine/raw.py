"""Raw streams: keys not yet normalised, gates and write strengths as a layer's projections make them.

The recurrent kernel prepares them itself, and so does the first kernel of the delta rules' chunk form (`prepares`). What else kernels of
chunks need ready is launched by their own hosts: a call without gradients has no prologue beside it, and goes by one recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..spec import NOTHING, RAW_TENSORS, Gate, Raw, Rule, Streams
from .library import STREAM_INPUTS, STREAMS, direct, outside
from .problem import Problem, bare, given, placed, problem
from .prologue import NORMALIZED, prologue

if TYPE_CHECKING:
    from ..spec import Op, Output
    from .scan import Scan


RAW = (  # in schemas
    "bool norm, bool norm_erase, Tensor? A_log, Tensor? dt_bias, float? lower_bound, bool sigmoid, float strength, Tensor? rate, "
    "bool softplus, Tensor? skip, bool keys, bool erases, Tensor? writes, str memory, Tensor? g_seen, Tensor? beta_seen, Tensor? centre, "
    "float middle, float most, float eps"
)

_LIBRARY = torch.library.Library("chunkwise", "FRAGMENT")
_CALL = "Tensor? S0, Tensor? cu_seqlens, str gate, str rule, int chunk, float scale, str precision, str inverse, bool final"
_LIBRARY.define(f"raw({STREAM_INPUTS}, {_CALL}, {RAW}) -> (Tensor o, Tensor ST)")


class Prepared(NamedTuple):
    """A call by kernels that prepare what is raw, all decided but its tensors."""

    p: Problem
    final: bool
    chunk: int  # 1: the recurrent form
    seat: Any = None  # of calls that are alike

    def __call__(self, *given: Any) -> tuple[Tensor, Tensor | None]:
        """given: the streams, the initial state, and what is to be done to them."""
        from . import plan_recurrent_triton, plan_triton

        *tensors, raw = given
        made = None if self.seat is None else self.seat((*tensors, *raw.tensors, self.p.cu_seqlens))
        if made is not None:
            return made
        *streams, S0 = tensors
        x, plan = Streams._make(streams), plan_recurrent_triton if self.chunk == 1 else plan_triton
        with outside(x.q):
            return again(plan.whole, replace(self.p, raw=raw), x, S0, self.final, self.seat)

    def known(self, x: Streams, S0: Tensor | None, own: tuple[Tensor | None, ...]) -> Any:
        """The call of what `lower` hands on and the gate's own tensors, by its recipe; None where that is not known yet."""
        return None if self.seat is None else self.seat((*x, S0, *own, *[None] * (len(RAW_TENSORS) - len(own)), self.p.cu_seqlens))

    def seated(self) -> Prepared:
        """The same for calls that are alike in all but numbers, which find their recipe by themselves."""
        from .recipe import Seat

        return self._replace(seat=Seat())


def prepared(
    x: Streams, cu: Tensor | None, gate: str, rule: str, chunk: int, scale: float, precision: str, inverse: str, final: bool
) -> Prepared:  # fmt: skip
    """The same from an operator's arguments."""
    from . import plan_triton

    own = 16 if chunk == 1 else plan_triton.chunk(x.q.dtype, x.q.shape[-1], chunk)
    switches: dict[str, Any] = dict(chunk=own, exact=chunk != 1, scale=scale, precision=precision, inverse=inverse)
    return Prepared(problem(x, cu, None, gate=Gate(gate), rule=Rule(rule), **switches), final, chunk)


def made(*args: Any) -> tuple[Tensor, Tensor]:
    """chunkwise::raw on a GPU."""
    x = Streams(*args[:STREAMS])
    S0, *switches = args[STREAMS : STREAMS + 9]
    o, ST = prepared(x, *switches)(*x, S0, Raw(*args[STREAMS + 9 :]))
    return o, o.new_empty(0) if ST is None else ST


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[:3]
    cu, final = args[STREAMS + 1], args[STREAMS + 8]
    B, _, HV, V = v.shape
    state = (B if cu is None else cu.shape[0] - 1, HV, q.shape[-1], V)
    return q.new_empty(*v.shape), q.new_empty(state, dtype=torch.float32) if final else q.new_empty(0)


_LIBRARY.impl("raw", made, "CompositeExplicitAutograd")
torch.library.register_fake("chunkwise::raw", _fake, lib=_LIBRARY)


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


def raw_form(scan: Scan, x: Mapping[str, Tensor | None], S0: Tensor | None, o: Mapping[str, Any]) -> Output | None:
    """The call by kernels that prepare what is raw, or None where there are none: with gradients, elsewhere than on a GPU, of other members
    and forms."""
    op = scan.op
    if op.passes is not None or op.lower is None or not any(asks(o)):
        return None
    tensors = (*x.values(), S0, o.get("A_log"), o.get("dt_bias"))
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        return None
    found = handed(op, x, o)
    if found is None:
        return None
    s, raw = found
    cell, scale = scan.cell(s), scan.scaled(s)
    packed = scan.cu_seqlens is not None
    choice = scan.choose(
        op, cell, T=s.q.shape[1], device=s.q.device.type, grad=False, packed=packed, form=scan.form, backend=scan.backend
    )  # fmt: skip
    if choice.plan.startswith("triton_recurrent"):
        chunk = 1
    elif choice.plan == "triton" and plain(raw):
        chunk = choice.chunk
    else:
        return None
    switches = scan.cu_seqlens, cell.gate.value, cell.rule.value, chunk, scale, scan.precision, scan.inverse, scan.final
    if scan.slots is None and direct((*s, S0, scan.cu_seqlens, *raw.tensors)):
        whole = prepared(s, *switches)
        if scan.passes is not None:
            scan.passes.append(whole)
        return whole(*s, S0, raw)
    with outside(s.q):
        out, ST = torch.ops.chunkwise.raw(*s, S0, *switches, *raw)
    return out, ST if scan.final else None


def plain(raw: Raw) -> bool:
    """Whether nothing is asked for but the prologue."""
    here = Raw(raw.norm, raw.norm_erase, raw.A_log, raw.dt_bias, raw.lower_bound, raw.sigmoid, raw.strength)
    return all(mine is other or mine == other for mine, other in zip(raw, here))


def prepares(p: Problem) -> bool:
    """Whether the first kernel of the chunk form prepares all that is raw. Raw keys need bfloat16's range. Under gates per key its kernels
    are bound by what they compute: KDA, H200, S1, 0.32 ms more for what launches of their own do in 0.29."""
    gate = p.gate in (Gate.NONE, Gate.SCALAR)
    return gate and p.rule is Rule.DELTA and not (p.erase or p.before or p.bonus) and p.dtype == torch.bfloat16


def readied(p: Problem, x: Streams) -> tuple[Problem, Streams]:
    """What is raw made ready by launches, but for what the chunk form's first kernel prepares."""
    from ..nn.launch import gate, norm

    raw = p.raw
    if raw == NOTHING or prepares(p):
        return p, x
    unit = lambda t: norm.forward(t, None, None, None, None, 1e-6, 1, "l2", "silu", None)[0]
    if raw.norm:
        x = x._replace(q=unit(x.q), k=unit(x.k))
    if raw.norm_erase:
        x = x._replace(**{n: unit(t) for n, t in (("a", x.a), ("e", x.e)) if t is not None})
    if raw.A_log is not None:
        bias = None if raw.dt_bias is None else raw.dt_bias.contiguous()
        x = x._replace(g=gate.forward(given(x.g), raw.A_log.contiguous(), bias, raw.activation, raw.lower_bound or 0.0))
    if raw.sigmoid:
        x = x._replace(beta=gate.forward(given(x.beta), None, None, "sigmoid", raw.strength))
    return replace(p, raw=NOTHING), x


def again(
    forward: Callable[..., Any], p: Problem, x: Streams, S0: Tensor | None, final: bool, seat: Any = None
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What a plan makes of streams, raw or not, without gradients, by its recipe. forward(p, x, S0, final) -> o, last state or None."""
    from .recipe import replay

    if p.T == 0 or p.N == 0:
        return forward(p, x, S0, final)
    alike = p.raw.place((None,) * len(RAW_TENSORS))

    def hosts(*t: Tensor | None) -> tuple[Tensor | None, ...]:
        streams, S0, own, cu = t[:STREAMS], t[STREAMS], t[STREAMS + 1 : -1], t[-1]
        return forward(replace(placed(bare(p), cu), raw=alike.place(own)), Streams._make(streams), S0, final)

    o, ST = replay((forward, final, p.key, alike), (*x, S0, *p.raw.tensors, p.cu_seqlens), hosts, seat=seat)
    return given(o), ST
