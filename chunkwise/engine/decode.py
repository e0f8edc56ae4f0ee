"""Decoding: a few tokens of many sequences, their states updated in place in a pool of slots. One launch on a GPU, PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..spec import RAW_TENSORS, Gate, Op, Raw, Rule, Streams
from . import decode_torch as host
from .dispatch import RECURRENT_WIDEST, TRITON, check_offsets
from .library import STREAM_INPUTS, STREAMS, Pass, direct
from .pool import Where, check, member
from .problem import bare, given, placed, problem
from .prologue import check_prologue
from .raw import RAW, raw_streams

NOT_HERE = ("initial_state", "output_final_state", "cu_seqlens_cpu", "chunk_size", "precision", "inverse_precision", "form")

_LIBRARY = torch.library.Library("chunkwise", "FRAGMENT")
_WHERE = "Tensor? cu_seqlens, Tensor? index, Tensor? into, Tensor? accepted, Tensor? parents, bool v_first"
_LIBRARY.define(f"decode({STREAM_INPUTS}, Tensor(a!) pool, {_WHERE}, str gate, str rule, float scale, {RAW}) -> Tensor")


def step(*args: Any) -> Tensor:
    """chunkwise::decode on a GPU."""
    from .plan_triton import on_device
    from .recipe import Made, replay
    from .stages_triton_recurrent import States, recurrent

    x = Streams(*args[:STREAMS])
    pool, cu, *slots, v_first, gate, rule, scale = args[STREAMS : -len(Raw._fields)]
    raw = Raw(*args[-len(Raw._fields) :])
    if not pool.is_inference():
        torch.autograd.graph.increment_version(pool)  # it changes in place, which nothing below tells autograd
    p = bare(problem(x, cu, None, gate=Gate(gate), rule=Rule(rule), chunk=16, scale=scale, precision="ieee"))
    plain = raw.place((None,) * len(RAW_TENSORS))  # nothing of a call is kept

    def hosts(*t: Tensor | None) -> Made:
        streams, pool, where, own, cu = t[:STREAMS], t[STREAMS], t[STREAMS + 1 : STREAMS + 5], t[STREAMS + 5 : -1], t[-1]
        with on_device(given(pool)):
            return (recurrent(placed(p, cu), Streams._make(streams), States(pool, pool, v_first, *where), plain.place(own)),)

    what = (step, v_first, p.key, plain)
    return given(replay(what, (*x, pool, *slots, *raw.tensors, cu), hosts)[0])


def _fake(*args: Any) -> Tensor:
    q, _, v = args[:3]
    return q.new_empty(*q.shape[:2], *v.shape[2:])


_LIBRARY.impl("decode", step, "CompositeExplicitAutograd")
torch.library.register_fake("chunkwise::decode", _fake, lib=_LIBRARY)


def decode(
    op: Op | str, inputs: Mapping[str, Tensor | None], pool: Tensor, index: Tensor | None = None, *, into: Tensor | None = None,
    accepted: Tensor | None = None, parents: Tensor | None = None, cu_seqlens: Tensor | None = None, state_v_first: bool = False,
    backend: str = "auto", **options: Any,
) -> Tensor:  # fmt: skip
    """The next tokens of N sequences: o [N, T, HV, V] in q's dtype; their states in `pool` move on, in place. There is no gradient.

    op: a member or its name. inputs: its tensors by name, [N, T, ...] as for the member's own function, or packed [1, tokens, ...] with
    `cu_seqlens` [N + 1]; "qkv" [N, T, 2 H K + HV V], one projection, may stand for q, k and v.
    pool: [slots, HV, K, V], or [slots, HV, V, K] with state_v_first, of float32, bfloat16 or float16 (float64 with float64 inputs); slots
    may lie further apart than they are long. States are computed in float32 and rounded where they are stored. A new sequence begins with
    `chunkwise.prefill(..., fresh=...)`: zeros in a slot are no empty state for every member (not for abc).
    index: [N] int32 or int64, each sequence's slot; None: sequence i is in slot i. A negative slot: the sequence is skipped, its output
    is 0. No two sequences may write one slot.

    Several tokens of which some may be rejected: `into` [N, columns], columns >= T, names the slot for the state after each token
    (negative: not kept); nothing else is stored. With `accepted` [N], index is [N, columns] too: a sequence goes on from slot
    index[n, accepted[n] - 1], the one its last accepted token left (accepted < 1: skipped), and `into` is `index` unless given.
    A tree of tokens: `parents` [N, columns], token t goes on from the state after token parents[n, t] < t, which must be kept, or with -1
    from the sequence's first state.

    options: the member's settings and options that fit here: scale, use_qk_l2norm_in_kernel, use_gate_in_kernel with A_log, dt_bias and
    lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval. Nothing is read on the host on a GPU: a step can be captured in a CUDA graph.
    On a GPU it is one kernel, for every member.

    Raises TypeError or ValueError naming the op and the argument whose shape, dtype, device or value does not fit; values of tensors on a
    GPU are not looked at.

    >>> import torch, chunkwise
    >>> pool = torch.zeros(8, 2, 4, 4)  # 8 slots of [HV, K, V]
    >>> x = dict(qkv=torch.randn(3, 1, 24), g=torch.zeros(3, 1, 2), beta=torch.ones(3, 1, 2))
    >>> chunkwise.decode("gated_delta_rule", x, pool, torch.tensor([5, 2, -1]), use_qk_l2norm_in_kernel=True).shape
    torch.Size([3, 1, 2, 4])
    >>> pool.flatten(1).any(1).nonzero().flatten().tolist()
    [2, 5]
    """
    op = member("decode", op)
    alone = backend != "triton" and into is accepted is parents is cu_seqlens is None
    kept, key = host.known(op, (state_v_first, backend), inputs, pool, index, options) if alone else (None, None)
    if kept is not None and (done := kept(inputs, pool, index, options)) is not None:
        return done
    known = {n: d for n, d in op.defaults.items() if n not in (*NOT_HERE, "cu_seqlens", "state_v_first", "backend")}
    for name in options:
        if name not in known:
            raise TypeError(f"decode {op.name}: unexpected keyword {name!r}; it takes {', '.join(known) or 'none'}")
    o = {**known, **options}
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"decode {op.name}: backend must be 'auto', 'torch' or 'triton', got {backend!r}")
    op.check_settings({**o, "state_v_first": state_v_first})
    x, who = _split(op, inputs, pool, state_v_first), f"decode {op.name}"
    sizes = op.check(x)
    check_prologue(op.name, x, o)
    query, B, T = given(x[op.query]), sizes["B"], sizes["T"]
    if cu_seqlens is not None:
        check_offsets(who, cu_seqlens, None, B, T, query.device)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    into = index if into is None and accepted is not None else into
    w = Where(N, index, into, accepted, parents, cu_seqlens, state_v_first)
    check(who, op, x, pool, sizes, w)
    if T == 0 or N == 0:
        return query.new_empty(B, T, sizes.get("HV", sizes.get("H", 1)), sizes["V"])
    scale = op.scale if o.get("scale") is None else float(o["scale"])
    missing = "asked for torch" if backend == "torch" else _no_kernel(op, query, sizes)
    if backend == "triton" and missing is not None:
        raise ValueError(f"decode {op.name}: backend='triton' cannot serve this call: {missing}")
    if missing is not None:
        passes: list[Pass] | None = [] if key is not None else None
        out = host.composed(op, x, pool, sizes, w, {**o, "backend": backend}, passes)
        if passes:
            host.keep(key, host.Step(_split, op, tuple(inputs), {**op.defaults, **o, "state_v_first": state_v_first}, passes[0]))
        return out
    s, raw = raw_streams(op, x, o)
    return _call(Gate.NONE if s.g is None else op.gate, op.rule, s, raw, pool, w, scale)


def _call(gate: Gate, rule: Rule, s: Streams, raw: Raw, pool: Tensor, w: Where, scale: float | None) -> Tensor:
    scale = s.q.shape[-1] ** -0.5 if scale is None else scale
    where = (w.cu_seqlens, w.index, w.into, w.accepted, w.parents)
    watched = not direct((*s, pool, *where, *raw.tensors))
    call = torch.ops.chunkwise.decode if watched else step  # the dispatcher costs as much as the rest
    return call(*s, pool, *where, w.v_first, gate.value, rule.value, scale, *raw)


def _split(op: Op, inputs: Mapping[str, Tensor | None], pool: Tensor, v_first: bool) -> dict[str, Tensor | None]:
    """The member's inputs; views of a projection where it is whole."""
    x = dict(inputs)
    if "qkv" in x:
        qkv = x.pop("qkv")
        if not {"q", "k", "v"} <= set(op.args):
            raise ValueError(f"decode {op.name}: takes no qkv: its inputs are {', '.join(op.args)}")
        if any(n in x for n in ("q", "k", "v")):
            raise ValueError(f"decode {op.name}: give qkv, or q, k and v, not both")
        if not isinstance(pool, Tensor) or pool.ndim != 4 or op.state != "N HV K V":
            raise ValueError(f"decode {op.name}: qkv needs a pool [slots, HV, K, V], got {list(getattr(pool, 'shape', []))}")
        HV, K, V = (pool.shape[i] for i in ((1, 3, 2) if v_first else (1, 2, 3)))
        if not isinstance(qkv, Tensor) or qkv.ndim != 3 or qkv.shape[2] <= HV * V or (qkv.shape[2] - HV * V) % (2 * K):
            want = f"[B, T, 2 H K + HV V] with K={K}, HV={HV}, V={V} (from pool)"
            raise ValueError(f"decode {op.name}: qkv must be {want}, got {list(getattr(qkv, 'shape', []))}")
        half = (qkv.shape[2] - HV * V) // 2
        parts = qkv.split((half, half, HV * V), 2)
        x |= {n: t.unflatten(2, (-1, d)) for n, t, d in zip("qkv", parts, (K, K, V))}
    for name in x:
        if name not in op.args:
            raise TypeError(f"decode {op.name}: unexpected input {name!r}; it takes {', '.join(op.args)}")
    return {n: x.get(n) for n in op.args}


def _no_kernel(op: Op, query: Tensor, sizes: Mapping[str, int]) -> str | None:
    """Why the one kernel cannot serve, or None."""
    if query.device.type not in ("cuda", "meta"):  # tensors without contents stand for a GPU's
        return f"the tensors are on {query.device.type}, not on a GPU"
    if not TRITON:
        return "triton is not installed"
    if query.dtype == torch.float64:
        return f"none for {query.dtype}"
    if op.passes is not None and op.raw is None:
        return "its passes are several kernels"
    widest = max(sizes["K"], sizes.get("M", 1))
    return None if widest <= RECURRENT_WIDEST else f"none for {widest} keys above {RECURRENT_WIDEST} in this version"
