"""Packed sequences as each would be alone: in groups of those whose chunks are equally long, or that go token by token.

So a sequence's bits do not depend on what it is packed with, and short ones are not padded to the chunks of long ones. A group is a
packed call of its own, on a gathered copy of its tokens; where all sequences are of one kind nothing is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ..spec import Streams
from . import chunk as chunked
from . import recurrent
from .memory import room
from .problem import Problem, given, power_of_two


@dataclass(frozen=True)
class Group:
    """Some of a packed call's sequences."""

    p: Problem
    short: bool  # they go token by token, forwards
    members: Tensor | None  # [their number], which of the call's sequences; None: all
    tokens: Tensor | None  # [their tokens], which of the call's

    def streams(self, x: Streams) -> Streams:
        """Theirs; those that do not belong to tokens as they are."""
        return x if self.tokens is None else Streams._make(t if t is None or t.ndim < 3 else self.take(t) for t in x)

    def take(self, t: Tensor) -> Tensor:
        """[1, T, ...] -> theirs."""
        return t if self.tokens is None else t.index_select(1, self.tokens)

    def states(self, S: Tensor | None) -> Tensor | None:
        """[N, ...] -> theirs."""
        return S if S is None or self.members is None else S.index_select(0, self.members)


def groups(p: Problem, below: int) -> list[Group]:
    """Sequences by the chunk they would have alone; those of `below` tokens or fewer go token by token."""
    if p.cu_seqlens is None:
        return [Group(p, False, None, None)]
    device = p.cu_seqlens.device
    ends = (p.cu_seqlens if p.cu_seqlens_cpu is None else p.cu_seqlens_cpu).tolist()
    kinds: dict[int, list[int]] = {}
    for n, (a, b) in enumerate(zip(ends, ends[1:])):
        kinds.setdefault(0 if b - a <= below else min(p.C, power_of_two(b - a)), []).append(n)
    made = []
    for C, members in kinds.items():
        whole = len(members) == p.N
        lengths = [ends[n + 1] - ends[n] for n in members]
        cu = given(p.cu_seqlens_cpu if p.cu_seqlens_cpu is not None else p.cu_seqlens) if whole else torch.tensor([0, *accumulate(lengths)])
        own = replace(
            p, T=sum(lengths), N=len(members), C=max(1, C), ahead=min(max(1, C), p.ahead),
            parts=-(-max(lengths) // max(1, p.part)), cu_seqlens=cu, cu_seqlens_cpu=cu,
        )  # fmt: skip
        if whole:
            made.append(Group(own, not C, None, None))
            continue
        tokens = torch.cat([torch.arange(ends[n], ends[n + 1]) for n in members])
        made.append(Group(own, not C, torch.tensor(members, device=device), tokens.to(device)))
    return made


def _shares(made: list[Group], saved: Tensor | None) -> list[Tensor | None]:
    """Each group's share of the states that are kept."""
    if saved is None:
        return [None] * len(made)
    sizes = [torch.Size(group.p.saved).numel() for group in made]
    parts = saved.view(-1)[: sum(sizes)].split(sizes)
    return [part.view(group.p.saved) for group, part in zip(made, parts)]


def forward(
    p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool, below: int = -1
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `chunk.forward`, and as `recurrent.forward` for sequences of `below` tokens or fewer."""
    made = groups(p, below)
    saved = room(*p.saved, dtype=p.compute, device=x.q.device) if save else None
    shares = _shares(made, saved)
    o: Tensor | None = None
    ST: Tensor | None = None
    for group, share in zip(made, shares):
        here, states = group.streams(x), group.states(S0)
        if group.short:
            own, last, _ = recurrent.forward(group.p, here, states, final=final, save=False)
        else:
            own, last, _ = chunked.forward(group.p, here, states, final=final, save=save, saved=share)
        if group.members is None or group.tokens is None:
            return own, last, saved
        if o is None:
            o = room(1, p.T, p.HV, p.V, dtype=p.dtype, device=own.device)
            ST = room(p.N, p.HV, p.K, p.V, dtype=p.compute, device=own.device) if final else None
        o.index_copy_(1, group.tokens, own)
        if ST is not None:
            ST.index_copy_(0, group.members, given(last))
    if o is None:  # no sequences
        return chunked.forward(p, x, S0, final=final, save=save, saved=saved)
    return o, ST, saved


def backward(
    p: Problem, x: Streams, S0: Tensor | None, saved: Tensor | None, do: Tensor, dST: Tensor | None, below: int = -1
) -> tuple[Streams, Tensor | None]:
    """As `chunk.backward`; below: what the forward pass was given."""
    made = groups(p, below)
    shares = [None if group.short else share for group, share in zip(made, _shares(made, saved))]
    if len(made) < 2:
        return chunked.backward(made[0].p if made else p, x, S0, shares[0] if shares else None, do, dST)
    d: dict[str, Tensor] = {}
    dS0 = room(p.N, p.HV, p.K, p.V, dtype=p.compute, device=do.device)
    for group, share in zip(made, shares):
        dx, dS = chunked.backward(group.p, group.streams(x), group.states(S0), share, group.take(do), group.states(dST))
        for name, t, whole in zip(Streams._fields, dx, x):
            if t is None or whole is None:
                continue
            if whole.ndim < 3:
                d[name] = t if name not in d else d[name] + t
            else:
                if name not in d:
                    d[name] = room(*whole.shape, dtype=t.dtype, device=t.device)
                d[name].index_copy_(1, given(group.tokens), t)
        dS0.index_copy_(0, given(group.members), given(dS))
    return Streams(**{n: d.get(n) for n in Streams._fields}), dS0  # type: ignore[arg-type]
