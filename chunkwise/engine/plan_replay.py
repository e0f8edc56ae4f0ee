"""The plans of kernels, replayed: a call's hosts run once for its sizes and switches, later calls go by the recipe."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from ..spec import Streams
from .problem import Problem, bare, placed
from .recipe import Made, Seat, replay

STREAMS = len(Streams._fields)


class Seats:
    """Of calls alike in streams and state: the recipe of their forward pass, and of their backward passes by what these are given.

    Both take the pass's tensors, in the order in which it is replayed below, and make what it makes: None where they do not know it yet.
    """

    def __init__(self) -> None:
        self.forward, self.backward = Seat(), dict[Any, Seat]()

    def back(self, tensors: Made) -> Seat:
        """Who keeps saved tensors elsewhere, on the host say, may hand them back with other strides than the forward pass had."""
        return self.backward.setdefault(tuple([None if t is None else (t.dtype, t.stride()) for t in tensors]), Seat())


def replayed(plan: ModuleType) -> SimpleNamespace:
    """A plan of chunks. Nothing is kept of calls without tokens."""

    def ahead_of(p: Problem, final: bool, save: bool) -> Callable[..., Made]:
        p = bare(p)
        return lambda *t: plan.forward(placed(p, t[-1]), Streams._make(t[:STREAMS]), t[STREAMS], final=final, save=save)

    def back_key(p: Problem) -> tuple[Any, ...]:
        return plan.backward, p.key, p.fixed  # a gate that nobody asks for has no gradient

    def back_of(p: Problem) -> Callable[..., Made]:
        p = bare(p)

        def hosts(*t: Tensor | None) -> Made:
            d, dS0 = plan.backward(placed(p, t[-1]), Streams._make(t[:STREAMS]), *t[STREAMS:-1])
            return *d, dS0

        return hosts

    def forward(
        p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool, seats: Seats | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        seat = None if seats is None else seats.forward

        def gradient(given: Made, made: Made) -> tuple[tuple[Any, ...], Made, Callable[..., Made]]:
            """The backward pass that most often follows."""
            o, _, saved = made
            return back_key(p), (*given[:-1], saved, o, None, given[-1]), back_of(p)

        tensors, hosts = (*x, S0, p.cu_seqlens), ahead_of(p, final, save)
        if not p.T or not p.N:
            return hosts(*tensors)  # type: ignore[return-value]
        return replay((plan.forward, final, save, p.key), tensors, hosts, gradient if save else None, seat)  # type: ignore[return-value]

    def backward(
        p: Problem, x: Streams, S0: Tensor | None, saved: Tensor | None, do: Tensor, dST: Tensor | None, seats: Seats | None = None
    ) -> tuple[Streams, Tensor | None]:
        tensors, hosts = (*x, S0, saved, do, dST, p.cu_seqlens), back_of(p)
        seat = None if seats is None else seats.back(tensors)
        made = replay(back_key(p), tensors, hosts, seat=seat) if p.T and p.N else hosts(*tensors)
        return Streams._make(made[:-1]), made[-1]

    own = {n: getattr(plan, n) for n in ("saved_entries",) if hasattr(plan, n)}
    return SimpleNamespace(forward=forward, backward=backward, chunk=plan.chunk, seats=Seats, **own)
