"""The states on the way: what the memory held before every so many tokens, for every member, dense and packed, with gradients."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spec import Op
from .dispatch import check_offsets
from .pool import member
from .problem import compute_dtype, given


class Snapshots(NamedTuple):
    """What `snapshots` returns."""

    o: Tensor  # [B, T, HV, V]
    final_state: Tensor  # [N, HV, K, V], as the member's
    states: Tensor  # [M, HV, K, V], the state before tokens 0, every, 2 every, ... of each sequence, sequence after sequence


def snapshots(op: Op | str, inputs: Mapping[str, Tensor | None], *, every: int = 64, **options: Any) -> Snapshots:
    """A call of a member that also returns the states on the way: for caching prefixes, for looking inside, for a loss on the memory.

    op: a member or its name; inputs: its tensors by name, `[B, T, ...]`; every: tokens between two states; options: the member's own,
    without `output_final_state`. The B rows, or the packed sequences of `cu_seqlens`, have ceil(length / every) states each, so M is the
    sum; an empty one has none. The call is made in pieces of `every` tokens: the same function on any device, and differentiable.

    >>> import torch, chunkwise
    >>> x = chunkwise.all_ops()["gla"].draw(dict(B=2, T=10, H=1, HV=1, K=4, V=4))
    >>> seen = chunkwise.snapshots("gla", x, every=4)
    >>> list(seen.states.shape)  # of both rows before their tokens 0, 4 and 8
    [6, 1, 4, 4]
    >>> rest = chunkwise.gla(**{n: t[:1, 8:] for n, t in x.items()}, initial_state=seen.states[2:3])[0]  # the first row goes on from 8
    >>> bool((rest - seen.o[:1, 8:]).norm() < 1e-5)
    True

    Raises ValueError or TypeError as the member does, and ValueError where `every` is not a positive number.
    """
    op = member("snapshots", op)
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"{op.name}: every must be a positive number of tokens, got {every!r}")
    if "output_final_state" in options:
        raise TypeError(f"{op.name}: snapshots always return the final state; leave output_final_state out")
    sizes, cu, host = op.check(inputs), options.pop("cu_seqlens", None), options.pop("cu_seqlens_cpu", None)
    some = given(inputs[op.query])
    if cu is None:
        lengths = [sizes["T"]] * sizes["B"]
    else:
        check_offsets(op.name, cu, host, sizes["B"], sizes["T"], some.device)
        ends = (cu if host is None else host).tolist()
        lengths = [b - a for a, b in zip(ends, ends[1:])]
    S = options.pop("initial_state", None)
    if S is None:
        S = op.empty_state(sizes, len(lengths), dtype=compute_dtype(some.dtype), device=some.device)
        S = S.mT if options.get("state_v_first") else S
    counts = [-(-length // every) for length in lengths]
    if not any(counts):
        o, S = op(inputs, initial_state=S, output_final_state=True, cu_seqlens=cu, cu_seqlens_cpu=host, **options)
        return Snapshots(o, given(S), given(S)[:0])
    outs, states, rows, places = [], [], [], []
    for i in range(max(counts)):
        alive = [n for n, count in enumerate(counts) if i < count]
        states.append(S.to(compute_dtype(some.dtype))[alive])
        places += [(n, i) for n in alive]
        if cu is None:
            piece, packed = _part(op, inputs, slice(i * every, (i + 1) * every)), {}
        else:
            spans = [range(min(a + i * every, b), min(a + (i + 1) * every, b)) for a, b in zip(ends, ends[1:])]
            rows += [torch.tensor([r for span in spans for r in span], device=some.device)]
            piece = _part(op, inputs, rows[-1])
            offsets = torch.tensor([0, *accumulate(map(len, spans))], dtype=cu.dtype)
            packed = dict(cu_seqlens=offsets.to(some.device), cu_seqlens_cpu=offsets)
        o, S = op(piece, initial_state=S, output_final_state=True, **packed, **options)
        outs.append(o)
    order = sorted(range(len(places)), key=places.__getitem__)  # from piece after piece to sequence after sequence
    o = torch.cat(outs, 1)
    return Snapshots(o if cu is None else o[:, torch.cat(rows).argsort()], given(S), torch.cat(states)[order])


def _part(op: Op, inputs: Mapping[str, Tensor | None], at: slice | Tensor) -> dict[str, Tensor | None]:
    """Some of the tokens."""
    return {n: t[:, at] if t is not None and op.args[n].per_token else t for n, t in inputs.items()}
