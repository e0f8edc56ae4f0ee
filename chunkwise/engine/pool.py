"""A pool of states: slots that sequences of a step read and write in place. Who may call what with it, said by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..spec import Op, all_ops
from .library import direct
from .problem import given


def member(who: str, op: Op | str) -> Op:
    """A member, or the one of that name. Raises ValueError."""
    if isinstance(op, Op):
        return op
    if op not in all_ops():
        raise ValueError(f"{who}: op must be a member, one of {', '.join(all_ops())}, got {op!r}")
    return all_ops()[op]


@dataclass(frozen=True)
class Where:
    """The slots of a step; see `decode`."""

    N: int
    index: Tensor | None
    into: Tensor | None
    accepted: Tensor | None
    parents: Tensor | None
    cu_seqlens: Tensor | None
    v_first: bool

    def slots(self, pool: Tensor) -> Tensor:
        """[N] int64: where each sequence's first state is, or -1."""
        if self.index is None:
            return torch.arange(self.N, device=pool.device)
        if self.accepted is None:
            return self.index.long()
        column = self.accepted.long() - 1
        known = (column >= 0) & (column < self.index.shape[1])
        found = self.index.long().gather(1, column.clamp(0, self.index.shape[1] - 1)[:, None])[:, 0]
        return torch.where(known, found, -1)

    def alive(self, pool: Tensor, T: int) -> Tensor:
        """Which of T tokens have a slot: [N, 1, 1, 1], packed [1, T, 1, 1]."""
        live = self.slots(pool) >= 0
        return live.view(-1, 1, 1, 1) if self.cu_seqlens is None else live[sequences(self.cu_seqlens, T)].view(1, -1, 1, 1)

    @property
    def columns(self) -> int:
        return 0 if self.into is None else self.into.shape[1]


def store(pool: Tensor, slots: Tensor, S: Tensor) -> None:
    """pool[slots] = S where a slot is not negative. Those that are do what the first live one does: the same write once more."""
    if not len(slots):
        return
    live = slots >= 0
    if direct((pool, slots, S)) and pool.device.type == "cpu":  # the host may look
        rows = slice(None) if live.all() else live
        pool.index_copy_(0, slots[rows], S[rows].to(pool.dtype))
        return
    row = torch.where(live, torch.arange(len(slots), device=slots.device), live.int().argmax())
    to = slots[row].clamp(min=0)
    pool.index_copy_(0, to, torch.where(live.any(), S[row].to(pool.dtype), pool[to]))


def sequences(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T]: each packed token's sequence."""
    return torch.searchsorted(cu_seqlens.long(), torch.arange(T, device=cu_seqlens.device), right=True) - 1


def check(who: str, op: Op, x: Mapping[str, Tensor | None], pool: Tensor, sizes: Mapping[str, int], w: Where) -> None:
    """Raises TypeError or ValueError naming what does not fit: a gradient, the pool, a table; values of tensors on the host only."""
    _check_gradient(who, x, pool)
    _check_pool(who, op, pool, op.state_shape(sizes, 1)[1:], w, given(x[op.query]))
    _check_slots(who, pool, w, sizes["T"])


def _check_gradient(who: str, x: Mapping[str, Tensor | None], pool: Tensor) -> None:
    for name, t in (*x.items(), ("pool", pool)):
        if torch.is_grad_enabled() and isinstance(t, Tensor) and t.requires_grad:
            raise ValueError(f"{who}: has no gradient, and {name} requires one: call it under torch.no_grad()")


def _check_pool(who: str, op: Op, pool: Any, shape: tuple[int, ...], w: Where, query: Tensor) -> None:
    if not isinstance(pool, Tensor) or not pool.is_floating_point():
        raise TypeError(f"{who}: pool must be a floating tensor, got {getattr(pool, 'dtype', type(pool).__name__)}")
    if (pool.dtype == torch.float64) != (query.dtype == torch.float64):
        raise TypeError(f"{who}: pool must be float64 where {op.query} is, and not elsewhere, got {pool.dtype}")
    if pool.device != query.device:
        raise ValueError(f"{who}: pool is on {pool.device}, {op.query} is on {query.device}")
    axes = op.state.split()[1:]
    if w.v_first:
        axes, shape = [axes[0], axes[2], axes[1]], (shape[0], shape[2], shape[1])
    if tuple(pool.shape[1:]) != shape or pool.ndim != 4:
        raise ValueError(f"{who}: pool must be [slots, {', '.join(axes)}] = [slots, {str(shape)[1:-1]}], got {list(pool.shape)}")
    if not pool[:1].is_contiguous():
        raise ValueError(f"{who}: pool must be dense inside a slot, got strides {list(pool.stride())}")
    if len(pool) > 1 and pool.stride(0) < pool[0].numel():
        raise ValueError(f"{who}: pool's slots must not share memory, got strides {list(pool.stride())}")
    if w.index is None and pool.shape[0] != w.N:
        raise ValueError(f"{who}: pool must have a slot for each of {w.N} sequences without an index, got {pool.shape[0]}")


def _check_slots(who: str, pool: Tensor, w: Where, T: int) -> None:
    tables = {"index": w.index, "into": w.into, "accepted": w.accepted, "parents": w.parents}
    for name, t in tables.items():
        if t is None:
            continue
        if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{who}: {name} must be an int32 or int64 tensor, got {getattr(t, 'dtype', type(t).__name__)}")
        if t.device != pool.device:
            raise ValueError(f"{who}: {name} is on {t.device}, pool is on {pool.device}")
        wide = name in ("into", "parents") or (name == "index" and w.accepted is not None)
        if t.ndim != 1 + wide or t.shape[0] != w.N:
            want = f"[N, columns] with N={w.N}" if wide else f"[N] = [{w.N}]"
            raise ValueError(f"{who}: {name} must be {want}, got {list(t.shape)}")
        if wide and w.into is not None and t.shape != w.into.shape:
            raise ValueError(f"{who}: {name} must have into's shape {list(w.into.shape)}, got {list(t.shape)}")
    if w.accepted is not None and w.index is None:
        raise ValueError(f"{who}: accepted needs index [N, columns]")
    if w.parents is not None and w.into is None:
        raise ValueError(f"{who}: parents needs into [N, columns]: children go on from states that are kept")
    if w.into is not None and w.cu_seqlens is None and w.columns < T:
        raise ValueError(f"{who}: into must have a column for each of T={T} tokens, got {w.columns}")
    if pool.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(who, pool, w, T)


def check_apart(who: str, name: str, slots: Tensor) -> None:
    """Raises ValueError where two states would be written into one slot; of slots on the host."""
    live = sorted(s for s in slots.flatten().tolist() if s >= 0)
    shared = [a for a, b in zip(live, live[1:]) if a == b]
    if shared:
        raise ValueError(f"{who}: {name} must name every slot once, got {shared[0]} twice")


def _check_values(who: str, pool: Tensor, w: Where, T: int) -> None:
    """What only the host can tell."""
    for name, t in (("index", w.index), ("into", w.into)):
        if t is not None and t.numel() and int(t.max()) >= len(pool):
            raise ValueError(f"{who}: {name} must name slots below {len(pool)}, got {int(t.max())}")
    if w.accepted is not None and w.index is not None and w.N and int(w.accepted.max()) > w.index.shape[1]:
        raise ValueError(f"{who}: accepted must be at most index's {w.index.shape[1]} columns, got {int(w.accepted.max())}")
    if w.cu_seqlens is not None and w.into is not None and w.N and int(w.cu_seqlens.diff().max()) > w.columns:
        longest = int(w.cu_seqlens.diff().max())
        raise ValueError(f"{who}: into must have a column for each of a sequence's {longest} tokens, got {w.columns}")
    if w.parents is not None:
        tokens = w.parents if w.cu_seqlens is not None else w.parents[:, :T]
        if (tokens >= torch.arange(tokens.shape[1])).any():
            raise ValueError(f"{who}: parents must name earlier tokens, got {tokens.tolist()}")
    if w.into is not None and w.cu_seqlens is None:
        check_apart(who, "into", w.into[:, :T])
    elif w.into is None and w.index is not None:
        check_apart(who, "index", w.index)
