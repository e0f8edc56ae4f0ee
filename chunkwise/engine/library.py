"""The library's two torch operators, chunkwise::forward and chunkwise::backward, with shapes for tracing, and the functions that join them.

One boundary per call: whatever plan runs inside, torch.compile sees one node. Absent tensors come back as empty ones.
Where nobody looks, the plan is called directly: crossing the dispatcher twice costs more than the rest of a call's Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from ..spec import Gate, Output, Rule, Streams
from .derivative import Tensors, gradients, many
from .plan import PLANS
from .problem import Problem, compute_dtype, given, partition, problem

STREAM_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? a, Tensor? b, Tensor? e, Tensor? u"
_INPUTS = f"{STREAM_INPUTS}, Tensor? S0"
_SWITCHES = "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, str gate, str rule, str plan, int chunk, float scale, str precision, str inverse"
_LIBRARY = torch.library.Library("chunkwise", "DEF")
_LIBRARY.define(f"forward({_INPUTS}, {_SWITCHES}, bool final, bool save) -> (Tensor o, Tensor ST, Tensor saved)")
_LIBRARY.define(
    f"backward({_INPUTS}, {_SWITCHES}, Tensor saved, Tensor do, Tensor? dST, bool fixed=False) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor da, Tensor db, Tensor de, Tensor du, Tensor dS0)"
)
STREAMS = len(Streams._fields)
GATE = Streams._fields.index("g")
BESIDE = len(_SWITCHES.split(","))  # arguments between the initial state and what is the pass's own


PLAIN = {Tensor, Parameter}


def resolve(
    streams: tuple[Any, ...],
    cu: Tensor | None,
    cu_cpu: Tensor | None,
    gate: str,
    rule: str,
    plan: str,
    chunk: int,
    scale: float,
    precision: str,
    inverse: str,
) -> tuple[Any, Problem, Streams]:
    """The plan, the problem and the streams that an operator's arguments stand for."""
    x, ways = Streams(*streams), PLANS[plan]()
    own = hasattr(ways, "chunk")  # kernels choose the chunk's length, and no row is too short for it
    chunk = ways.chunk(x.q.dtype, x.q.shape[-1], chunk) if own else chunk
    switches: dict[str, Any] = dict(chunk=chunk, exact=own, scale=scale, precision=precision, inverse=inverse)
    p = problem(x, cu, cu_cpu, gate=Gate(gate), rule=Rule(rule), **switches)
    return ways, p, x


def outside(x: Tensor) -> AbstractContextManager[object]:
    """Autocast changes nothing inside a plan."""
    device = x.device.type
    cast = device != "meta" and torch.is_autocast_enabled(device)  # tensors without contents have no autocast
    return torch.autocast(device, enabled=False) if cast else nullcontext()


BELOW: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", nullcontext)  # nothing is differentiated in there, and nobody asks whether
NOTHING = nullcontext()


def below(x: Tensor) -> AbstractContextManager[object]:
    """Operators on a CPU go past autograd; recipes have none, and note what autograd makes of the hosts'."""
    return BELOW() if x.is_cpu else NOTHING


def _gradients(
    plan: Any, p: Problem, tensors: Sequence[Tensor | None], saved: Tensor | None, do: Tensor, dST: Tensor | None, **how: Any
) -> tuple[Tensor | None, ...]:
    """Of every stream, and of the initial state."""
    with outside(given(tensors[0])):
        d, dS0 = plan.backward(p, Streams._make(tensors[:-1]), tensors[-1], saved, do, dST, **how)
    return *d, dS0


def _like(dS0: Tensor | None, S0: Tensor | None) -> Tensor | None:
    """A gradient of the initial state in its dtype."""
    return None if S0 is None or dS0 is None else dS0.to(S0.dtype)


def _present(t: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if t is None else t


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *streams, S0 = args[: STREAMS + 1]
    *switches, final, save = args[STREAMS + 1 :]
    plan, p, x = resolve(tuple(streams), *switches)
    with outside(x.q):
        o, ST, saved = plan.forward(p, x, S0, final=final, save=save)
    return o, _present(None if ST is None else ST.contiguous(), o), _present(saved, o)  # dense, as the shapes for tracing say


def _backward(*args: Any) -> tuple[Tensor, ...]:
    *streams, S0 = args[: STREAMS + 1]
    saved, do, dST, *fixed = args[STREAMS + 1 + BESIDE :]  # fixed: only where it is not the default
    plan, p, x = resolve(tuple(streams), *args[STREAMS + 1 : STREAMS + 1 + BESIDE])
    p = replace(p, fixed=any(fixed))
    d = list(_gradients(plan, p, (*x, S0), saved if saved.numel() else None, do, dST))
    d[GATE] = None if p.fixed else d[GATE]
    d[-1] = _like(d[-1], S0)
    return tuple(_present(None if t is None else t.contiguous(), do) for t in d)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Streams(*args[:STREAMS])
    *switches, final, save = args[STREAMS + 1 :]
    B, T, _, K = x.q.shape
    HV, V = x.v.shape[2:]
    N = B if switches[0] is None else switches[0].shape[0] - 1
    o = x.q.new_empty(B, T, HV, V)
    state = compute_dtype(x.q.dtype)
    ST = x.q.new_empty((N, HV, K, V) if final else (0,), dtype=state if final else o.dtype)
    plan, chunk = switches[4], switches[5]
    saved: tuple[int, ...] = (0,)
    if save and plan == "triton":
        ways, gate, rule = PLANS[plan](), Gate(switches[2]), Rule(switches[3])
        sizes = (B, T, HV, K, V, ways.chunk(x.q.dtype, K, chunk))
        entries = ways.saved_entries(gate, rule, x.q.dtype, *sizes, packed=switches[0] is not None, bonus=x.u is not None)
        return o, ST, x.q.new_empty(sum(entries))
    if save and plan in ("chunk", "mixed"):
        saved = (partition(Gate(switches[2]), N, T, HV, max(K, V), chunk)[1], N, HV, K, V)
    return o, ST, x.q.new_empty(saved, dtype=state if saved != (0,) else o.dtype)


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    _, do, _, *fixed = args[STREAMS + 1 + BESIDE :]
    of = [None if any(fixed) and i == GATE else t for i, t in enumerate(args[: STREAMS + 1])]
    return tuple(do.new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in of)


for _name, _impl, _fake in (("forward", _forward, _fake_forward), ("backward", _backward, _fake_backward)):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"chunkwise::{_name}", _fake, lib=_LIBRARY)


class Traced(torch.autograd.Function):
    """The two operators as one differentiable function; its arguments are those of chunkwise::forward."""

    generate_vmap_rule = True  # PyTorch calls the operators again and again

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.chunkwise.forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        cu, cu_cpu, *ctx.switches, ctx.final, _ = inputs[STREAMS + 1 :]
        ctx.save_for_backward(*inputs[: STREAMS + 1], cu, cu_cpu, output[2])
        ctx.mark_non_differentiable(output[2])
        if not torch.compiler.is_compiling():  # torch 2.13 cannot trace this; it spares zeros of the size of all that is saved
            ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dST: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        *inputs, cu, cu_cpu, saved = ctx.saved_tensors
        switches, need = ctx.switches, ctx.needs_input_grad[: STREAMS + 1]
        do = torch.zeros_like(inputs[2], memory_format=torch.contiguous_format) if do is None else do
        fixed = inputs[GATE] is not None and not need[GATE]

        def find(x: Tensors, dy: Tensors, beside: Tensors) -> tuple[Tensor | None, ...]:
            *places, states = beside
            return torch.ops.chunkwise.backward(*x, *places, *switches, states, *dy, fixed)

        def plain(*tensors: Any) -> Output:
            *x, S0, places, places_cpu, _ = tensors
            return formula(resolve(tuple(x), places, places_cpu, *switches)[1], x, S0)

        d = gradients(find, plain, need, inputs, (do, dST if ctx.final else None), (cu, cu_cpu, saved))
        return (*d, *[None] * (len(switches) + 4))


def formula(p: Problem, x: Sequence[Tensor | None], S0: Tensor | None) -> Output:
    """A pass as PyTorch differentiates it."""
    from .formula import forward

    with outside(given(x[0])):
        return forward(p, Streams._make(x), S0)


class Direct(torch.autograd.Function):
    """A pass as one differentiable function: what `Traced` computes, past the dispatcher."""

    @staticmethod
    def forward(ctx: Any, made: Pass, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """tensors: the streams and the initial state."""
        o, ST, saved = made.forward(tensors, save=True)
        ctx.made = made
        ctx.save_for_backward(*tensors, saved, made.p.cu_seqlens, made.p.cu_seqlens_cpu)
        ctx.set_materialize_grads(False)
        return o, ST

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dST: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, saved, cu, cu_cpu = ctx.saved_tensors  # read once: checkpointing hands them out once; refuses offsets refilled since
        made, p, need = ctx.made, ctx.made.p, ctx.needs_input_grad[1:]
        do = tensors[0].new_zeros(p.B, p.T, p.HV, p.V) if do is None else do.resolve_neg()  # an imaginary part's may be negatives in memory
        dST = None if dST is None else dST.resolve_neg()
        if not torch.is_grad_enabled() and not (many(do) or many(dST)):
            return None, *_back(made, tensors, (do, dST), (saved, cu, cu_cpu), need)
        find = partial(_back, made, need=need)
        return None, *gradients(find, lambda *x: formula(p, x[:STREAMS], x[STREAMS]), need, tensors, (do, dST), (saved, cu, cu_cpu))


def _back(made: Pass, tensors: Tensors, dy: Tensors, beside: Tensors, need: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of a pass that are needed."""
    (do, dST), (saved, cu, _) = dy, beside
    seats, every = made.how.get("seats"), (*tensors, saved, do, dST, cu)
    d = None if seats is None else seats.back(every)(every)
    if d is None:
        d = _gradients(made.plan, made.p, tensors, saved, given(do), dST, **made.how)
    wanted = [t if n else None for t, n in zip(d, need)]
    wanted[-1] = _like(wanted[-1], tensors[-1])
    return wanted


def tangents() -> bool:
    """Whether tangents may be carried along."""
    return forward_ad._current_level >= 0


def carried(*tensors: Tensor | None) -> bool:
    """Whether one of these brings a tangent, so far as can be told: inside transforms and what is compiled one may."""
    if not tangents():
        return False
    return is_compiling() or transformed() or any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def transformed() -> bool:
    """Whether one of torch.func's transforms is at work: an autograd.Function takes part, or refuses what an operator would drop."""
    return not is_compiling() and torch._C._are_functorch_transforms_active()


def unwrapped(t: Tensor) -> Tensor:
    """What torch.func's transforms at work have wrapped: all samples of a vmap at once, whose values can be read."""
    while is_functorch_wrapped_tensor(t):
        t = get_unwrapped(t)
    return t


def trim(kept: dict[Any, Any], most: int) -> None:
    """Let the oldest go until no more than `most` are left."""
    while len(kept) > most:
        kept.pop(next(iter(tuple(kept))), None)  # another thread may have been quicker


_modes, _tracing, _transforms = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state, torch._C._are_functorch_transforms_active


def busy() -> bool:
    """Whether somebody compiles, listens or carries tangents along: all of `watched` that a tensor does not show."""
    return is_compiling() or _modes() > 0 or forward_ad._current_level >= 0


def watched() -> bool:
    """Whether somebody traces, transforms or listens."""
    return busy() or _tracing() is not None or _transforms()


def direct(tensors: tuple[Tensor | None, ...]) -> bool:
    """Nobody traces, transforms or watches, and memory holds the numbers, not their negatives: the plan can be called as a function."""
    if watched():
        return False
    for t in tensors:
        if t is not None and (type(t) not in PLAIN or t.is_meta or t.is_neg()):
            return False
    return True


class Pass(NamedTuple):
    """A pass of the engine that nobody watches, all decided: nine streams and a state are what it takes."""

    plan: Any
    p: Problem
    final: bool
    grad: bool
    how: dict[str, Any]  # what the plan takes beside

    def __call__(self, *tensors: Tensor | None) -> Output:
        if self.grad:
            return APPLY(self, *tensors)
        o, ST, _ = self.forward(tensors, save=False)
        return o, ST

    def forward(self, tensors: tuple[Tensor | None, ...], save: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Output, last state, what is saved; by what a plan keeps for such calls, if it does."""
        seats = self.how.get("seats")
        made = None if seats is None else seats.forward((*tensors, self.p.cu_seqlens))
        if made is not None:
            return made
        q = given(tensors[0])
        with outside(q), below(q):
            return self.plan.forward(self.p, Streams._make(tensors[:-1]), tensors[-1], final=self.final, save=save, **self.how)

    def seated(self) -> Pass:
        """The same for calls that are alike in all but numbers, which find by themselves what a plan keeps for them."""
        return self._replace(how={**self.how, "seats": self.plan.seats()}) if hasattr(self.plan, "seats") else self


APPLY = super(torch.autograd.Function, Direct).apply  # that of Function looks for what is left of transforms, which `direct` has seen to


def apart(*args: Any) -> tuple[Any, ...]:
    """One tensor twice as two: torch 2.13 compiles no autograd.Function that is handed one twice."""
    if not is_compiling():
        return args
    return tuple(t.view_as(t) if isinstance(t, Tensor) and any(t is s for s in args[:i]) else t for i, t in enumerate(args))


def recurrence(
    x: Streams,
    S0: Tensor | None,
    cu: Tensor | None,
    cu_cpu: Tensor | None,
    *,
    gate: Gate,
    rule: Rule,
    plan: str,
    chunk: int,
    scale: float,
    precision: str,
    inverse: str,
    final: bool,
    grad: bool,
    slots: Sequence[int] | None = None,
    passes: list[Any] | None = None,
) -> Output:
    """A pass of the engine: o [B, T, HV, V], and the last state [N, HV, K, V] if `final`; differentiable if `grad`.

    slots: S0 is a pool that the recurrent plan works in, for calls nobody watches. passes: is told what such a call does.
    """
    if not direct((*x, S0, cu, cu_cpu)):
        if slots is not None:
            raise ValueError("chunkwise engine: a call that is traced or watched cannot work in a pool")
        if carried(*x, S0):  # tangents go along with PyTorch's own operators
            p = problem(x, cu, cu_cpu, gate=gate, rule=rule, chunk=chunk, scale=scale, precision=precision, inverse=inverse)
            o, ST = formula(p, x, S0)
            return o, ST if final else None
        call = Traced.apply if grad or transformed() else torch.ops.chunkwise.forward
        o, ST, _ = call(*apart(*x, S0), cu, cu_cpu, gate.value, rule.value, plan, chunk, scale, precision, inverse, final, grad)
        return o, ST if final else None
    made, p, x = resolve(x, cu, cu_cpu, gate, rule, plan, chunk, scale, precision, inverse)
    if grad and x.g is not None and not x.g.requires_grad:
        p = replace(p, fixed=True)
    how: dict[str, Any] = {}
    if slots is not None:
        how, pool = {"slots": slots}, given(S0)
        if not pool.is_inference():
            torch.autograd.graph.increment_version(pool)  # it changes in place, which nothing below tells autograd
    decided = Pass(made, p, final, grad, how)
    if passes is not None:
        passes.append(decided)
    return decided(*x, S0)
