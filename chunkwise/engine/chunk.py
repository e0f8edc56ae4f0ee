"""The chunkwise pipeline and its mirror, written once.

    forward     cumsum -> scores -> inverse -> state pass -> output
    backward    the same up to the state pass, whose states are recomputed rather than kept;
                the state pass reversed on the state's gradient: X <-> U, M_qw' do <-> base, w <-> r, k <-> q, v <-> do;
                then one `grads` stage in which q reads do and the erase reader r reads U

docs/derivation.md derives it. The parallel form is these stages with one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..spec import Gate, Streams
from . import stages_torch as stages
from .decay import ScalarDecay
from .gradient import grads
from .layout import Layout, layout
from .memory import room
from .problem import Problem, given


@dataclass
class Plan:
    """A problem cut into chunks, up to the state pass."""

    p: Problem
    c: stages.Chunks
    M: stages.Scores
    T: Tensor | None  # the inverse

    def start(self, x: Tensor, before: bool = False) -> stages.Met:
        """A reader, and what it decays by from the chunk's start."""
        return stages.Met(x, self.c.key.starts(before))

    def end(self, y: Tensor) -> stages.Met:
        """A writer, and what it decays by to the chunk's end."""
        return stages.Met(y, self.c.key.ends())

    def state(self, S: Tensor | None) -> Tensor:
        """[N, HV, K, V] or zeros -> [N, H, n, K, V] in the layout's order and the compute dtype; what is so already stays."""
        p = self.p
        if S is not None and S.ndim == 5:
            return S
        shape = (p.N, p.H, p.HV // p.H, p.K, p.V)
        return self.c.q.new_zeros(shape) if S is None else self.c.layout.sort(S.to(p.compute).reshape(shape)).contiguous()

    def states(self, S0: Tensor | None, *, o: Tensor | None = None, keep: bool = False, ours: bool = False) -> stages.Pass:
        """The state pass over states. o: where the outputs go, if they are wanted; ours: S0 may be changed."""
        p, c, M, T, S, solve = self.p, self.c, self.M, self.T, self.state(S0), None
        if c.e is not None and T is not None:
            T = T if c.beta is None else T * c.beta.mT
            solve = stages.Solve(self.start(c.e, p.before), T, M.rk, -1 if c.delta else 1)
        return stages.state_pass(
            c.layout, S, c.key, c.value, c.layout.reader(c.values),
            look=None if o is None else stages.output(c, M, self.start(c.q, p.bonus), c.layout.writer(o), S.shape[1:3]),
            solve=solve, k=None if M.qk is None else self.end(c.k), w=None if c.w is None else self.end(c.w), beyond=c.value.ends(),
            keep=keep, ours=ours,
        )  # fmt: skip

    def gradients(self, dST: Tensor | None, do: Tensor) -> stages.Pass:
        """The state pass over the states' gradients, backwards: its mirror. do: [B, T, HV, V]."""
        p, c, M, T, solve = self.p, self.c, self.M, self.T, None
        if c.w is not None and T is not None:
            solve = stages.Solve(self.end(c.w), T.mT, given(M.qw).mT)
        return stages.state_pass(
            c.layout, self.state(dST), c.key, c.value, c.layout.reader(do), solve=solve, k=self.start(c.q, p.bonus),
            w=None if c.r is None else self.start(c.r, p.before), beyond=c.value.starts(), keep=True, reverse=True,
        )  # fmt: skip


def prepare(p: Problem, x: Streams, to: Layout | None = None, whole: ScalarDecay | None = None) -> Plan:
    """Cut into chunks, and the stages that need no state. to: the steps wanted, or all; whole: what `small` made of all."""
    c = stages.enter(p, x, to or layout(p, x.q.device), whole)
    M = stages.scores(p, c)
    return Plan(p, c, M, None if M.rw is None else stages.inverse(M.rw))


def small(p: Problem, x: Streams, to: Layout) -> ScalarDecay | None:
    """A decay of one number a token is cumulated for all parts at once: it is small, and many small operations long."""
    decay = stages.decays(p, x, to)[0] if p.gate in (Gate.HEAD, Gate.SCALAR) and to.slots else None
    return decay if isinstance(decay, ScalarDecay) else None


def forward(
    p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool, saved: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o [B, T, HV, V], the last state [N, HV, K, V] if `final`, and if `save` the state before every part, [parts, N, HV, K, V].

    saved: where those go.

    Part after part, so that what is computed on the way takes the room of a part, and stays in the caches.
    """
    p = p if p.ahead == p.C else replace(p, C=p.ahead)
    to = layout(p, x.q.device)
    o = to.empty(p.HV, p.V, dtype=p.dtype)
    saved = room(*p.saved, dtype=p.compute, device=x.q.device) if save and saved is None else saved
    S = _walk(p, x, S0, to, saved, o)
    return to.trim(o), _state_out(p, to, S) if final else None, saved


def _walk(p: Problem, x: Streams, S: Tensor | None, to: Layout, saved: Tensor | None, o: Tensor | None = None) -> Tensor | None:
    """The last state [N, H, n, K, V], S where there are no tokens. Outputs go to `o`, the states before parts to `saved`."""
    whole, ours = small(p, x, to), S is None
    for i, part in enumerate(to.parts(p.part)):
        plan = prepare(p, x, part, whole)
        S = plan.state(S)
        if saved is not None:
            saved[i] = to.unsort(S).view(p.saved[1:])
        S, ours = plan.states(S, o=o, ours=ours).last, True
        del plan  # before the next part is made
    return S


def _state_out(p: Problem, to: Layout, S: Tensor | None) -> Tensor:
    """The last state for the caller; None, or what the caller gave, where there were no tokens."""
    shape = (p.N, p.HV, p.K, p.V)
    if S is None:
        return torch.zeros(shape, dtype=p.compute, device=to.device)
    return S.to(p.compute, copy=True) if S.ndim == 4 else to.unsort(S).view(shape)


def backward(
    p: Problem, x: Streams, S0: Tensor | None, saved: Tensor | None, do: Tensor, dST: Tensor | None
) -> tuple[Streams, Tensor | None]:
    """Gradients of every stream, in its dtype and shape, and of the initial state. Last part first; a part's states are recomputed."""
    to = layout(p, x.q.device)
    if saved is None:
        saved = room(*p.saved, dtype=p.compute, device=x.q.device)
        _walk(p, x, S0, to, saved)
    streams = {n: t for n, t in x._asdict().items() if t is not None}
    out = {n: to.empty(*t.shape[2:], dtype=t.dtype) for n, t in streams.items() if t.ndim > 2}
    if p.gate is Gate.HEAD:
        out["g"] = to.empty(p.HV, dtype=p.compute)  # summed over tokens in the end
    du = None if x.u is None else torch.zeros(p.HV, p.K, dtype=p.compute, device=to.device)
    dS, parts, whole = dST, to.parts(p.part), small(p, x, to)
    for i, part in reversed(list(enumerate(parts))):
        plan = prepare(p, x, part, whole)
        c, do_part = plan.c, part.split(do, p.compute)
        ahead = plan.states(saved[i], keep=True)
        back = plan.gradients(dS, do)
        dS = back.last
        d, dg = grads(p, c, plan.M, ahead.X, back.X, given(ahead.met), given(back.met), do_part)
        if dg is not None and p.gate in (Gate.HEAD, Gate.SCALAR):
            dg = dg.squeeze(-1)
        for name, t in d._replace(g=dg)._asdict().items():
            if name in out:
                part.put(given(t).contiguous(), out[name])
        if du is not None:
            du += given(d.u).view(p.HV, p.K)
    out = {n: to.trim(t) for n, t in out.items()}
    if x.g is not None and p.gate is Gate.HEAD:
        out["g"] = out["g"].sum((0, 1)).to(x.g.dtype)
    if x.u is not None and du is not None:
        out["u"] = du.to(x.u.dtype)
    return Streams(**{n: out.get(n) for n in Streams._fields}), _state_out(p, to, dS)  # type: ignore[arg-type]
