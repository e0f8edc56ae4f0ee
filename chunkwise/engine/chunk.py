"""The chunkwise pipeline and its mirror, written once.

    forward     cumsum -> scores -> inverse -> state pass -> output
    backward    the same up to the state pass, whose states are recomputed rather than kept;
                the state pass reversed on the state's gradient: X <-> U, M_qw' do <-> base, w <-> r, k <-> q, v <-> do;
                then one `grads` stage in which q reads do and the erase reader r reads U

docs/derivation.md derives it. The parallel form is these stages with one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..spec import Gate, Streams
from . import stages_torch as stages
from .gradient import grads
from .problem import Problem


@dataclass
class Plan:
    """A problem cut into chunks, up to the state pass."""

    p: Problem
    c: stages.Chunks
    M: stages.Scores
    T: Tensor | None  # the inverse
    start: dict[str, Tensor | None]  # readers as the state at a chunk's start meets them
    end: dict[str, Tensor | None]  # writers as the state at its end sees them

    def state(self, S: Tensor | None) -> Tensor:
        """[N, HV, K, V] or zeros -> [N, H, n, K, V] in the layout's order and the compute dtype."""
        p = self.p
        shape = (p.N, p.H, p.HV // p.H, p.K, p.V)
        return self.c.q.new_zeros(shape) if S is None else self.c.layout.sort(S.to(p.compute).reshape(shape)).contiguous()

    def states(self, S0: Tensor | None, **want: bool) -> stages.Pass:
        """The state pass over states."""
        c, additive = self.c, self.M.qk is not None
        return stages.state_pass(
            c.layout, self.state(S0), c.key, c.value,
            read=self.start["r"], T=self.T, base=stages.base(self.p, c, self.M), write=self.end["w"],
            xk=self.end["k"] if additive else None, xv=self.end["v"] if additive else None, query=self.start["q"], **want,
        )  # fmt: skip

    def gradients(self, dST: Tensor | None, do: Tensor) -> stages.Pass:
        """The state pass over the states' gradients, backwards: its mirror."""
        c, M, T = self.c, self.M, self.T
        return stages.state_pass(
            c.layout, self.state(dST), c.key, c.value,
            read=self.end["w"], T=None if T is None else T.mT, base=None if M.qw is None else M.qw.mT @ do,
            write=self.start["r"], xk=self.start["q"], xv=c.value.start(do), keep=True, reverse=True,
        )  # fmt: skip


def prepare(p: Problem, x: Streams) -> Plan:
    """Cut into chunks, and the stages that need no state."""
    c = stages.enter(p, x)
    M = stages.scores(p, c)
    start = dict(q=c.key.start(c.q, before=p.bonus), r=None if c.r is None else c.key.start(c.r, before=p.before))
    end = dict(k=c.key.end(c.k) if M.qk is not None else None, w=None if c.w is None else c.key.end(c.w), v=c.value.end(c.v))
    return Plan(p, c, M, None if M.rw is None else stages.inverse(M.rw), start, end)


def forward(p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o [B, T, HV, V], the last state [N, HV, K, V] if `final`, and nothing to save: the backward recomputes."""
    plan = prepare(p, x)
    out = plan.states(S0)
    o = stages.output(plan.c, plan.M, out)
    to = plan.c.layout
    return to.join(o, p.dtype), to.unsort(out.last).view(p.N, p.HV, p.K, p.V) if final else None, None


def backward(
    p: Problem, x: Streams, S0: Tensor | None, saved: Tensor | None, do: Tensor, dST: Tensor | None
) -> tuple[Streams, Tensor | None]:
    """Gradients of every stream, in its dtype and shape, and of the initial state."""
    plan = prepare(p, x)
    c, to = plan.c, plan.c.layout
    do = to.split(do, p.compute)
    ahead, back = plan.states(S0, keep=True, read_out=False), plan.gradients(dST, do)
    d, dg = grads(p, c, plan.M, ahead.X, back.X, stages.given(ahead.met), stages.given(back.met), do)

    def leave(dx: Tensor | None, x: Tensor | None) -> Tensor | None:
        return None if dx is None or x is None else to.join(dx, x.dtype)

    if dg is not None and p.gate in (Gate.HEAD, Gate.SCALAR):
        dg = dg.squeeze(-1)
    if p.gate is Gate.HEAD and dg is not None and x.g is not None:
        dg = to.join(dg, p.compute).sum((0, 1)).to(x.g.dtype)
    else:
        dg = leave(dg, x.g)
    out = Streams(
        to.join(d.q, x.q.dtype), to.join(d.k, x.k.dtype), to.join(d.v, x.v.dtype), dg, leave(d.beta, x.beta), leave(d.a, x.a),
        leave(d.b, x.b), leave(d.e, x.e), None if d.u is None or x.u is None else d.u.reshape(p.HV, p.K).to(x.u.dtype),
    )  # fmt: skip
    return out, to.unsort(back.last).view(p.N, p.HV, p.K, p.V)
