"""Prompts into a pool: the member's own function from the states in slots, and the states after it back into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..spec import Op
from .dispatch import check_offsets
from .pool import Where, check, check_apart, member, sequences, store
from .problem import compute_dtype, given
from .snapshot import snapshots

NOT_HERE = ("initial_state", "output_final_state")


def prefill(
    op: Op | str, inputs: Mapping[str, Tensor | None], pool: Tensor, index: Tensor | None = None, *, fresh: Tensor | None = None,
    into: Tensor | None = None, every: int | None = None, cu_seqlens: Tensor | None = None, state_v_first: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Many tokens of N sequences: o [N, T, HV, V] in q's dtype; their states in `pool` move on, in place. There is no gradient.

    op, inputs (no "qkv"), pool, index, cu_seqlens, state_v_first: as for `chunkwise.decode`. options: all others of the member's function.
    fresh: [N] bool, sequences that begin from nothing, whatever their slots hold; None: all go on from there.
    every, into: snapshots for caching prefixes: the state after each `every` tokens goes to slot into[n, i] too, i = 0, 1, ... (negative:
    not kept); into is [N, T // every]. Not for packed calls.

    Raises TypeError or ValueError naming the op and the argument that does not fit.

    >>> import torch, chunkwise
    >>> x = dict(q=torch.randn(1, 6, 2, 4), k=torch.randn(1, 6, 2, 4), v=torch.randn(1, 6, 2, 4), g=-torch.rand(1, 6, 2, 4))
    >>> pool = torch.full((4, 2, 4, 4), float("nan"))  # junk of sequences that are gone
    >>> o = chunkwise.prefill("gla", x, pool, torch.tensor([3]), fresh=torch.tensor([True]), every=4, into=torch.tensor([[0]]))
    >>> rest = chunkwise.prefill("gla", {n: t[:, 4:] for n, t in x.items()}, pool, torch.tensor([0]))  # from the snapshot
    >>> bool((rest - o[:, 4:]).norm() < 1e-5 * o.norm())
    True
    """
    op = member("prefill", op)
    who = f"prefill {op.name}"
    for name in NOT_HERE:
        if name in options:
            raise TypeError(f"{who}: unexpected keyword {name!r}: states come from and go to the pool")
    op.check_settings(op.whole({**options, "state_v_first": state_v_first}))
    sizes = op.check(inputs)
    B, T, query = sizes["B"], sizes["T"], given(inputs[op.query])
    if cu_seqlens is not None:
        check_offsets(who, cu_seqlens, None, B, T, query.device)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    w = Where(N, index, None, None, None, cu_seqlens, state_v_first)
    check(who, op, inputs, pool, sizes, w)
    _check_fresh(who, pool, w, fresh)
    _check_snapshots(who, pool, w, into, every, T)
    if T == 0 and fresh is None:
        return query.new_empty(B, T, sizes.get("HV", sizes.get("H", 1)), sizes["V"])
    with torch.no_grad():
        slots, axes = w.slots(pool), (-1, 1, 1, 1)
        S = pool[slots.clamp(min=0)].to(compute_dtype(pool.dtype))
        if fresh is not None:
            empty = op.empty_state(sizes, 1, dtype=S.dtype, device=S.device)
            S = torch.where(fresh.view(axes), empty.mT if state_v_first else empty, S)
        options |= dict(initial_state=S, cu_seqlens=cu_seqlens, state_v_first=state_v_first)
        if every is None or into is None:
            out, ST = op(inputs, output_final_state=True, **options)
        else:
            out, ST, met = snapshots(op, inputs, every=every, **options)
            before = met.unflatten(0, (N, -(-T // every)))  # each piece; the state after one is that before the next
            after = torch.cat((before[:, 1:], given(ST)[:, None]), 1)[:, : T // every]
            store(pool, into.flatten().long(), after.flatten(0, 1))
        store(pool, slots, given(ST))
        live = slots >= 0
        return torch.where(live.view(axes) if cu_seqlens is None else live[sequences(cu_seqlens, T)].view(1, -1, 1, 1), out, 0.0)


def _check_fresh(who: str, pool: Tensor, w: Where, fresh: Tensor | None) -> None:
    if fresh is None:
        return
    if not isinstance(fresh, Tensor) or fresh.dtype != torch.bool:
        raise TypeError(f"{who}: fresh must be a bool tensor, got {getattr(fresh, 'dtype', type(fresh).__name__)}")
    if fresh.device != pool.device:
        raise ValueError(f"{who}: fresh is on {fresh.device}, pool is on {pool.device}")
    if fresh.shape != (w.N,):
        raise ValueError(f"{who}: fresh must be [N] = [{w.N}], got {list(fresh.shape)}")


def _check_snapshots(who: str, pool: Tensor, w: Where, into: Tensor | None, every: int | None, T: int) -> None:
    if (into is None) != (every is None):
        raise ValueError(f"{who}: every and into go together, got every={every} and {'no ' if into is None else ''}into")
    if into is None or every is None:
        return
    if w.cu_seqlens is not None:
        raise ValueError(f"{who}: no snapshots of packed sequences: leave every and into out")
    if every < 1:
        raise ValueError(f"{who}: every must be at least 1, got {every}")
    if not isinstance(into, Tensor) or into.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{who}: into must be an int32 or int64 tensor, got {getattr(into, 'dtype', type(into).__name__)}")
    if into.device != pool.device or tuple(into.shape) != (w.N, T // every):
        want = f"[N, T // every] = [{w.N}, {T // every}] on {pool.device}"
        raise ValueError(f"{who}: into must be {want}, got {list(into.shape)} on {into.device}")
    if into.device.type == "cpu" and not torch.compiler.is_compiling() and into.numel():
        if int(into.max()) >= len(pool):
            raise ValueError(f"{who}: into must name slots below {len(pool)}, got {int(into.max())}")
        check_apart(who, "into", into)
