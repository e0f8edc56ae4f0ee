"""A decode step composed of the member's own recurrent form: on CPUs, and for members of several passes. The host reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..spec import Form, Op
from .problem import compute_dtype

if TYPE_CHECKING:
    from .decode import Where


def composed(op: Op, x: Mapping[str, Tensor | None], pool: Tensor, w: Where, o: Mapping[str, Any]) -> Tensor:
    """o [B, T, HV, V]; the pool is updated as `w` says."""
    slots = _slots(pool, w)
    live = slots >= 0
    S = pool[slots.clamp(min=0)].to(compute_dtype(pool.dtype))
    options = dict(form=Form.RECURRENT.value, output_final_state=True, state_v_first=w.v_first, **o)
    if w.into is None:
        out, S = op(x, initial_state=S, cu_seqlens=w.cu_seqlens, **options)  # type: ignore[assignment]
        _store(pool, slots, S)
    else:
        out = _each(op, x, pool, w, w.into, S, live, options)
    alive = live.view(-1, 1, 1, 1) if w.cu_seqlens is None else live[_sequence(w.cu_seqlens, out.shape[1])].view(1, -1, 1, 1)
    return torch.where(alive, out, 0.0)


def _slots(pool: Tensor, w: Where) -> Tensor:
    """[N] int64: where each sequence's first state is, or -1."""
    if w.index is None:
        return torch.arange(w.N, device=pool.device)
    if w.accepted is None:
        return w.index.long()
    column = w.accepted.long() - 1
    known = (column >= 0) & (column < w.index.shape[1])
    found = w.index.long().gather(1, column.clamp(0, w.index.shape[1] - 1)[:, None])[:, 0]
    return torch.where(known, found, -1)


def _store(pool: Tensor, slots: Tensor, S: Tensor) -> None:
    """pool[slots] = S where a slot is not negative. Those that are do what the first live one does: the same write once more."""
    if not len(slots):
        return
    live = slots >= 0
    row = torch.where(live, torch.arange(len(slots), device=slots.device), live.int().argmax())
    to = slots[row].clamp(min=0)
    pool.index_copy_(0, to, torch.where(live.any(), S[row].to(pool.dtype), pool[to]))


def _sequence(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T]: each packed token's sequence."""
    return torch.searchsorted(cu_seqlens.long(), torch.arange(T, device=cu_seqlens.device), right=True) - 1


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
        _store(pool, torch.where(there, into[:, t].long(), -1), ST)
        made.append(ST.to(S.dtype))
        outs.append(o[:, 0])
    if cu is None:
        return torch.stack(outs, 1)
    sequence = _sequence(cu, T)
    return torch.stack(outs)[torch.arange(T, device=pool.device) - cu.long()[sequence], sequence][None]
