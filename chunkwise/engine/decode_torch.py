"""A decode step composed of the member's own recurrent form: on CPUs, where states are worked on inside the pool, and for members of
several passes. Elsewhere than on a CPU the host reads no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..spec import Form, Op
from .dispatch import run
from .library import direct
from .pool import Where, sequences, store
from .problem import compute_dtype


@torch.no_grad()
def composed(op: Op, x: Mapping[str, Tensor | None], pool: Tensor, sizes: Mapping[str, int], w: Where, o: Mapping[str, Any]) -> Tensor:
    """o [B, T, HV, V]; the pool is updated as `w` says. On a CPU the states of a member of one pass never leave it."""
    if w.into is None and op.passes is None and pool.device.type == "cpu" and direct((*x.values(), pool, w.index)):
        places = w.slots(pool).tolist()
        own = dict(form=Form.RECURRENT.value, initial_state=pool, state_v_first=w.v_first, cu_seqlens=w.cu_seqlens)
        return run(op, x, sizes, {**op.defaults, **o, **own}, slots=places)[0]
    slots = w.slots(pool)
    live = slots >= 0
    S = pool[slots.clamp(min=0)].to(compute_dtype(pool.dtype))
    options = dict(form=Form.RECURRENT.value, output_final_state=True, state_v_first=w.v_first, **o)
    if w.into is None:
        out, S = op(x, initial_state=S, cu_seqlens=w.cu_seqlens, **options)  # type: ignore[assignment]
        store(pool, slots, S)
    else:
        out = _each(op, x, pool, w, w.into, S, live, options)
    return torch.where(w.alive(pool, out.shape[1]), out, 0.0)


def _each(
    op: Op, x: Mapping[str, Tensor | None], pool: Tensor, w: Where, into: Tensor, S: Tensor, live: Tensor, options: dict[str, Any]
) -> Tensor:
    """Token by token, the state after each kept where `into` says."""
    cu = w.cu_seqlens
    tokens = {n: t for n, t in x.items() if t is not None and op.args[n].per_token}
    T = next(iter(tokens.values())).shape[1]
    rows = torch.arange(w.N, device=pool.device)
    made, outs = [S], []
    for t in range(T if cu is None else w.columns):
        here = {n: z[:, t : t + 1] for n, z in tokens.items()}
        there = live
        if cu is not None:
            at = cu.long()[:-1] + t
            there = live & (at < cu[1:])
            here = {n: z[0, at.clamp(max=T - 1)][:, None] for n, z in tokens.items()}
        S = made[-1]
        if w.parents is not None:
            S = torch.stack(made)[w.parents[:, t].long() + 1, rows]
        o, ST = op({**x, **here}, initial_state=S, **options)
        if ST is None:
            raise RuntimeError(f"decode {op.name}: its recurrent form gave no last state")
        ST = ST.to(pool.dtype)
        store(pool, torch.where(there, into[:, t].long(), -1), ST)
        made.append(ST.to(S.dtype))
        outs.append(o[:, 0])
    if cu is None:
        return torch.stack(outs, 1)
    sequence = sequences(cu, T)
    return torch.stack(outs)[torch.arange(T, device=pool.device) - cu.long()[sequence], sequence][None]
