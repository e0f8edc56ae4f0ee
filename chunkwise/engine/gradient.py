"""Stage `grads` in PyTorch: the gradients of every stream from the states and their gradients, all chunks at once.

q is a reader of o's gradient, the erase reader r one of U's (U = T' dX, the solve's adjoint): both are differentiated alike, so the
stage is a list of (reader, writer) pairs. T's own gradient is never formed.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..spec import Gate, Rule, Streams
from .decay import Between, ChannelDecay, Decay, NoDecay, ScalarDecay
from .problem import Problem
from .stages_torch import Chunks, Scores


class Adjoint:
    """Gradients being added up on one side of the state, and what the gate's gradient on that side is summed from.

    A decay inside a chunk enters only through what it lies between: at token t, what readers i >= t (i > t where they read before their
    own token forgets) draw from writers j < t and from the state at the chunk's start, what writers j < t leave at its end, and what
    passes it whole. `starts`, `ends` and `through` are those sums' terms. Pairs are added up only where t lies between them, so that
    nothing large is added to be subtracted again: a scalar decay has every pair's share in a matrix, `across`; a decay per channel
    would need one a channel, and leaves what its levels add up to in `between`.
    """

    def __init__(self, decay: Decay, per_channel: bool, **streams: Tensor | None):
        self.decay, self.per_channel, self.streams = decay, per_channel, streams
        self.d: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.between: Between = {}

    def add(self, name: str, d: Tensor, kind: str | None = None, before: bool = False) -> None:
        """A further part of a stream's gradient, which is ours; `kind` is the sum of the gate's gradient that it enters."""
        self.d[name] = d if name not in self.d else self.d[name].add_(d)
        if kind is not None and not isinstance(self.decay, NoDecay):
            z = self.stream(name) * d
            z = z if self.per_channel else z.sum(-1, keepdim=True)
            self.sum(kind, F.pad(z[..., 1:, :], (0, 0, 0, 1)) if before else z)

    def sum(self, kind: str, z: Tensor) -> None:
        self.sums[kind] = z if kind not in self.sums else self.sums[kind] + z

    def stream(self, name: str) -> Tensor:
        x = self.streams[name]
        if x is None:
            raise ValueError(f"chunkwise engine: this rule has no stream {name}")
        return x

    def pairs(self, reader: str, writer: str, M: Tensor | None, dM: Tensor, before: bool = False) -> None:
        """The decayed scores M of two streams, from dM, zero on and above the diagonal; after their `start` and `end`."""
        self.decay.pairs_(dM, self.stream(reader), self.stream(writer), self.d[reader], self.d[writer], self.between, before)
        if M is not None and isinstance(self.decay, ScalarDecay):
            P = M * dM
            self.sum("across", F.pad(P[..., 1:, :], (0, 0, 0, 1)) if before else P)

    def same(self, reader: str, writer: str, dM: Tensor, weight: Tensor | None = None) -> None:
        """The pairs i = j: dM [S, H, n, C, 1] is their scores' gradient, `weight` the bonus on them."""
        dM = dM if weight is None else dM * weight
        self.add(reader, dM * self.stream(writer))
        self.add(writer, dM * self.stream(reader))

    def start(self, reader: str, d: Tensor, before: bool = False) -> None:
        """d: gradient of the reader as it meets the state at the chunk's start."""
        self.add(reader, self.decay.start(d, before=before), "starts", before)

    def end(self, writer: str, d: Tensor) -> None:
        """d: gradient of the writer as the state at the chunk's end sees it."""
        self.add(writer, self.decay.end(d), "ends")

    def gate(self, through: Tensor) -> Tensor | None:
        """dg [S, H, n, C, D or 1]; through: [S, H, n, D], S dS summed over the other side."""
        total = self.decay.total()
        if total is None:
            return None
        dg = self.sums["starts"].flip(-2).cumsum(-2).flip(-2)
        if isinstance(self.decay, ChannelDecay) and self.between:
            dg += self.decay.across(self.between)
        if "across" in self.sums:  # P_ij summed over j < t <= i
            dg = dg + F.pad(self.sums["across"].cumsum(-1)[..., :-1], (1, 0)).tril().sum(-2)[..., None]
        if "ends" in self.sums:
            dg = dg + F.pad(self.sums["ends"].cumsum(-2)[..., :-1, :], (0, 0, 1, 0))
        through = (through if self.per_channel else through.sum(-1, keepdim=True)) * total
        return dg + through[..., None, :]


def grads(
    p: Problem, c: Chunks, M: Scores, X: Tensor | None, U: Tensor | None, S: Tensor, dS: Tensor, do: Tensor
) -> tuple[Streams, Tensor | None]:
    """Gradients of the streams in chunks, and dg.

    S: [slots, H, n, K, V] the state each chunk met; dS the gradient of the state it left; do: [S, H, n, C, V].
    """
    key = Adjoint(c.key, p.gate is Gate.KEY, q=c.q, k=c.k, r=c.r, w=c.w)
    value = Adjoint(c.value, True, v=c.v, o=do)
    lower = NoDecay()
    do_start = c.value.start(do)
    key.start("q", do_start @ S.mT, before=p.bonus)
    du = None
    if M.qk is not None:
        key.end("k", c.value.end(c.v) @ dS.mT)
        key.pairs("q", "k", M.qk, c.value.scores(do, c.v, strict=True), before=p.bonus)
        met = (do * c.v).sum(-1, keepdim=True)
        key.same("q", "k", met, c.u)
        if c.u is not None:
            du = (met * c.q * c.k).sum((0, 3))  # [H, n, K]
        strictly = M.qk.tril(-1)
        value.end("v", c.key.end(c.k) @ dS)
        value.add("v", M.qk.diagonal(0, -2, -1)[..., None] * do)
        if p.gate is not Gate.VALUE:
            value.add("v", strictly.mT @ do)
        else:  # o in the part of its own gradient's stream: o_i sums what lies before i
            value.start("o", c.key.start(c.q, before=p.bonus) @ S)
            value.pairs("o", "v", None, strictly)
    if X is not None and U is not None:
        key.start("r", U @ S.mT, before=p.before)
        key.end("w", X @ dS.mT)
        key.pairs("q", "w", M.qw, lower.scores(do, X, strict=True))
        key.pairs("r", "w", M.rw, lower.scores(U, X, strict=True), before=p.before)
        key.same("q", "w", (do * X).sum(-1, keepdim=True))
        if M.rk is not None:
            key.pairs("r", "k", M.rk, lower.scores(U, c.v, strict=True), before=True)
            value.add("v", M.rk.mT @ U)
    dg = key.gate((S * dS).sum(-1)) if p.gate is not Gate.VALUE else value.gate((S * dS).sum(-2))
    return _streams(p, c, key.d, value.d.get("v"), U, du), dg


def _streams(p: Problem, c: Chunks, d: dict[str, Tensor], dv: Tensor | None, U: Tensor | None, du: Tensor | None) -> Streams:
    """From readers and writers back to the rule's streams. Streams shared by value heads sum over them."""
    dq = _group(d["q"], c.q) * p.scale
    if p.rule is Rule.DELTA and U is not None and c.e is not None:
        dr, beta = d["r"], None if c.beta is None else c.beta
        de = -dr if beta is None else -beta * dr
        dbeta = None if beta is None else (U * c.v).sum(-1) - (dr * c.e).sum(-1)
        dk = d["w"] if p.erase else d["w"] + de
        erase = {("a" if p.before else "e"): _group(de, c.e)} if p.erase else {}
        return Streams(dq, _group(dk, c.k), U if beta is None else beta * U, beta=dbeta, **erase)
    if dv is None:
        raise ValueError("chunkwise engine: the rule's streams are incomplete")
    if c.r is not None and c.w is not None:
        return Streams(dq, _group(d["k"], c.k), dv, a=_group(d["r"], c.r), b=_group(d["w"], c.w), u=du)
    return Streams(dq, _group(d["k"], c.k), dv, u=du)


def _group(d: Tensor, x: Tensor) -> Tensor:
    return d.sum(2, keepdim=True) if d.shape[2] != x.shape[2] else d
