"""A decode step composed of the member's own recurrent form: on CPUs, where states are worked on inside the pool, and for members of
several passes. Elsewhere than on a CPU the host reads no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..spec import Form, Op
from .call import TENSORS, Decided, Decision, Kept
from .dispatch import run
from .library import Pass, busy, direct
from .pool import Where, sequences, store
from .problem import compute_dtype, given
from .tape import Made, Taped


class Step(Decision):
    """A step of one token on states side by side in a pool, of few states: decided once, then taped."""

    def __init__(
        self, split: Callable[..., dict[str, Tensor | None]], op: Op, names: Sequence[str], o: Mapping[str, Any], made: Pass
    ) -> None:
        self.split, self.op, self.names, self.N, self.turn = split, op, names, made.p.N, bool(o["state_v_first"])
        self.decided = Decided(op, op.args, o, made._replace(how={"slots": range(made.p.N)}))
        self.taped = Taped(self.run)

    def run(self, *tensors: Any) -> Made:
        """Inputs, the states in their slots, and what the options bring."""
        n = len(self.names)
        x = self.split(self.op, dict(zip(self.names, tensors)), tensors[n], self.turn)
        return self.decided.run(*x.values(), *tensors[n:])[:1]

    def __call__(
        self, inputs: Mapping[str, Tensor | None], pool: Tensor, index: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor | None:
        """o; None where the slots do not lie side by side."""
        first = 0
        if index is not None:
            slots = index.tolist()
            first = slots[0]
            if first < 0 or slots != list(range(first, first + self.N)) or slots[-1] >= len(pool):
                return None
        if not pool.is_inference():
            torch.autograd.graph.increment_version(pool)
        states = pool if self.N == len(pool) else pool.narrow(0, first, self.N)
        return self.taped(*inputs.values(), states, *map(options.get, TENSORS[1:]))[0]


STEPS = Kept[Step](256)
LATEST, forget = STEPS.latest, STEPS.forget


def known(
    op: Op, names: tuple[Any, ...], inputs: Mapping[str, Any], pool: Any, index: Any, options: Mapping[str, Any]
) -> tuple[Step | None, tuple[Any, ...] | None]:
    """What does such a step on a CPU that nobody watches, if there was one; what it is kept under, None where it is not to be kept."""
    if busy():
        return None, None
    names, values = (*names, *inputs, *options), (*inputs.values(), pool, index, *options.values())
    latest = LATEST.get(op)
    if latest is not None and latest.alike(names, values):  # type: ignore[misc]
        return latest, None
    if not isinstance(pool, Tensor) or not pool.is_cpu or torch.is_autocast_enabled("cpu"):
        return None, None
    if any(isinstance(x, Tensor) and n not in TENSORS for n, x in options.items()):
        return None, None
    return STEPS.find(op, names, values)


def keep(key: Any, step: Step) -> None:
    """For later calls alike."""
    if step.decided.taped is not None:
        STEPS.keep(key, step)


@torch.no_grad()
def composed(
    op: Op, x: Mapping[str, Tensor | None], pool: Tensor, sizes: Mapping[str, int], w: Where, o: Mapping[str, Any],
    passes: list[Pass] | None = None,
) -> Tensor:  # fmt: skip
    """o [B, T, HV, V]; the pool is updated as `w` says. On a CPU the states of a member of one pass never leave it; passes: is told."""
    if w.into is None and op.passes is None and pool.device.type == "cpu" and direct((*x.values(), pool, w.index)):
        places = w.slots(pool).tolist()
        own = dict(form=Form.RECURRENT.value, initial_state=pool, state_v_first=w.v_first, cu_seqlens=w.cu_seqlens)
        return run(op, x, sizes, {**op.defaults, **o, **own}, slots=places, passes=passes)[0]
    options = dict(form=Form.RECURRENT.value, output_final_state=True, state_v_first=w.v_first, **o)
    if w.into is not None:

        def step(x: Mapping[str, Tensor | None], S: Tensor) -> Tensor:
            out, ST = op(x, initial_state=S.to(compute_dtype(S.dtype)), **options)
            S.copy_(given(ST))
            return out

        return drafts(op, x, pool, w, step)
    slots = w.slots(pool)
    out, ST = op(x, initial_state=pool[slots.clamp(min=0)].to(compute_dtype(pool.dtype)), cu_seqlens=w.cu_seqlens, **options)
    store(pool, slots, given(ST))
    return torch.where(w.alive(pool, out.shape[1]), out, 0.0)


def drafts(
    op: Op, x: Mapping[str, Tensor | None], pool: Tensor, w: Where, step: Callable[[Mapping[str, Tensor | None], Tensor], Tensor]
) -> Tensor:
    """Token by token, the state after each kept where `w.into` says. step(x, S): o [N, 1, HV, V]; S [N, ...] moves on in place."""
    cu, into, slots = w.cu_seqlens, given(w.into), w.slots(pool)
    live = slots >= 0
    tokens = {n: t for n, t in x.items() if t is not None and op.args[n].per_token}
    T = next(iter(tokens.values())).shape[1]
    rows = torch.arange(w.N, device=pool.device)
    made, outs = [pool[slots.clamp(min=0)]], []
    for t in range(T if cu is None else w.columns):
        here = {n: z[:, t : t + 1] for n, z in tokens.items()}
        there = live
        if cu is not None:
            at = cu.long()[:-1] + t
            there = live & (at < cu[1:])
            here = {n: z[0, at.clamp(max=T - 1)][:, None] for n, z in tokens.items()}
        S = made[-1].clone() if w.parents is None else torch.stack(made)[w.parents[:, t].long() + 1, rows]
        outs.append(step({**x, **here}, S)[:, 0])
        store(pool, torch.where(there, into[:, t].long(), -1), S)
        made.append(S)
    if cu is None:
        out = torch.stack(outs, 1)
    else:
        sequence = sequences(cu, T)
        out = torch.stack(outs)[torch.arange(T, device=pool.device) - cu.long()[sequence], sequence][None]
    return torch.where(w.alive(pool, out.shape[1]), out, 0.0)
