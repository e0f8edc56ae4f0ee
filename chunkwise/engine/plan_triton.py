"""The plan on a GPU: inverse (or score), then a scan that also makes the output; backward: the scan twice, then one kernel of gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..spec import Gate, Rule, Streams
from . import cuda
from . import stages_triton as stages
from . import stages_triton_inverse as inverse
from . import stages_triton_output as rows
from .cut import longest, side_by_side
from .problem import Problem, given
from .raw import readied
from .stages_triton_split import carried_entries, carried_room


def on_device(t: Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the device of their tensors, whichever is the current one; a thread of autograd's may have none yet."""
    if not t.is_cuda:
        return nullcontext()
    if t.get_device() not in cuda.ENTERED.devices and cuda.library() is not None:
        cuda.enter(t.get_device())
    return torch.cuda.device(t.device)


def chunk(dtype: torch.dtype, K: int, asked: int) -> int:
    """Tokens of a chunk: as asked, or what the kernels' registers can hold. It does not depend on T, so neither do the compiled kernels."""
    return 16 if dtype == torch.float32 or K > 256 else asked


def initial(p: Problem, S: Tensor | None, device: torch.device) -> Tensor:
    """The state when there are no tokens."""
    if S is None:
        return torch.zeros(p.N, p.HV, p.K, p.V, dtype=torch.float32, device=device)
    return S.to(torch.float32, copy=True)


def kept(gate: str, rule: str, bonus: bool) -> int:
    """How many [B, T, HV, C] the forward pass leaves to the backward: scores under gates per key, the delta rule's inverse, or what the
    affine stage makes: M and, dplr, T, A and M_qw."""
    if _is_affine(rule, bonus):
        return 4 if rule == Rule.DPLR else 1
    return (gate == Gate.KEY) + (rule == Rule.DELTA)


def _is_affine(rule: str, bonus: bool) -> bool:
    """Whether the affine stage serves the rule."""
    return rule == Rule.DPLR or bonus


def saved_entries(
    gate: Gate, rule: Rule, dtype: torch.dtype, B: int, T: int, HV: int, K: int, V: int, C: int, *, packed: bool, bonus: bool
) -> tuple[int, int]:
    """What the forward pass leaves to the backward, in numbers of q's dtype: matrices of chunks, and states and maps of pieces (fp32)."""
    aside = gate is not Gate.VALUE and side_by_side(gate, rule, dtype, B, HV, K, V, packed=packed)
    cut = stages.split(gate, rule, T, HV, K, V) if aside else stages.WHOLE
    pieces = sum(carried_entries(cut, rule, longest(rule, B, T, HV, K, V, packed=packed), HV, K, V))
    return kept(gate, rule, bonus) * B * T * HV * C, pieces * 4 // dtype.itemsize


def _parts(p: Problem, saved: Tensor | None, device: torch.device | None = None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What is saved (new with a device), flat, and in it the matrices [kept, B, T, HV, C], and states and maps, flat, fp32."""
    switches = dict(packed=p.cu_seqlens is not None, bonus=p.bonus)
    many, carried = saved_entries(p.gate, p.rule, p.dtype, p.B, p.T, p.HV, p.K, p.V, p.C, **switches)
    if device is not None and many + carried:
        saved = torch.empty(many + carried, dtype=p.dtype, device=device)
    if saved is None:
        return None, None, None
    matrices = saved[:many].view(-1, p.B, p.T, p.HV, p.C) if many else None
    return saved, matrices, saved[many:].view(torch.float32) if carried else None


def scores_of(
    p: Problem, x: Streams, at: stages.Index, saved: Tensor | None, into: Tensor | None = None, tokens: Tensor | None = None
) -> tuple[Tensor | None, stages.Decayed | None]:
    """What can be saved, [kept, B, T, HV, C], and for gates per key the decayed operands of the scan. into: where what is saved goes;
    tokens: as of `inverse.inverse`."""
    if _is_affine(p.rule, p.bonus):
        from .stages_triton_affine import affine

        return affine(p, x, at, saved, into)[:2]
    if p.gate is Gate.KEY and x.g is not None:
        from .stages_triton_score import scores

        return scores(p, x, at, saved, into, tokens)
    if saved is None and p.rule is Rule.DELTA:
        saved = inverse.inverse(p, x, at, None if into is None else into[0], tokens)[None]
    return saved, None


def _inverse(p: Problem, saved: Tensor | None) -> Tensor | None:
    return saved[-1] if saved is not None and p.rule is Rule.DELTA else None


def _spread(p: Problem, x: Streams) -> tuple[Problem, Streams]:
    """What has no kernels of its own as what has them: erase keys in e, whenever they read; keys of their own for every value head where
    only the erase key has them; under the affine stage's rules a token's or a head's gate as one a key channel."""
    if _is_affine(p.rule, p.bonus) and p.gate in (Gate.HEAD, Gate.SCALAR):
        g = given(x.g).float()[..., None].expand(p.B, p.T, p.HV, p.K)
        p, x = replace(p, gate=Gate.KEY), x._replace(g=g.contiguous())
    if p.rule is Rule.DELTA and p.before:
        x = x._replace(e=x.a, a=None)
    if x.e is None or x.e.shape[2] == p.H:
        return p, x
    n = p.HV // p.H
    return replace(p, H=p.HV), x._replace(q=x.q.repeat_interleave(n, 2), k=x.k.repeat_interleave(n, 2))


def forward(p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o [B, T, HV, V] in q's dtype, the last state [N, HV, K, V] fp32 if `final`, what to save if `save`."""
    if p.T == 0 or p.N == 0:
        saved = torch.empty(0, dtype=p.dtype, device=x.q.device) if save else None
        return torch.empty_like(x.v), initial(p, S0, x.q.device) if final else None, saved
    with on_device(x.q):
        if p.gate is Gate.VALUE:
            from . import plan_triton_value

            return *plan_triton_value.forward(p, x, S0, final), None
        p, x = _spread(p, x)
        at = stages.index(p)
        saved, into, room = _parts(p, None, x.q.device if save else None)
        if stages.by_chunks(p):
            return *rows.forward(p, x, S0, final=final, room=room), saved
        tokens = inverse.token_room(p, at, x.q.device)
        part, rest = stages.binary(p) if p.gate is Gate.KEY else (p, 1.0)
        matrices, decayed = scores_of(part, x, at, None, into, tokens)
        T = _inverse(p, matrices)
        made = stages.state_pass(part, x, at, S0, T=T, decayed=decayed, final=final, output=True, room=room, tokens=tokens, rest=rest)
    return given(made.o), made.ST, saved


def whole(p: Problem, x: Streams, S0: Tensor | None, final: bool) -> tuple[Tensor, Tensor | None]:
    """`forward` of streams that may be raw, which keeps nothing."""
    with on_device(x.q):
        p, x = readied(p, x)
    return forward(p, x, S0, final=final, save=False)[:2]


def backward(
    p: Problem, x: Streams, S0: Tensor | None, saved: Tensor | None, do: Tensor, dST: Tensor | None
) -> tuple[Streams, Tensor | None]:
    """Gradients of every stream, in its dtype and shape, and of the initial state (fp32) if there is one."""
    from .stages_triton_grad import by_scans, grads, scanned

    if p.T == 0 or p.N == 0:
        zeros = Streams._make(None if t is None else torch.zeros_like(t) for t in x)
        return zeros, None if S0 is None else initial(p, dST, x.q.device)
    with on_device(x.q):
        if p.gate is Gate.VALUE:
            from . import plan_triton_value

            return plan_triton_value.backward(p, x, S0, do, dST)
        asked, g = p, x.g
        p, x = _spread(p, x)
        at, apart, (part, rest) = stages.index(p), None, stages.binary(p)
        decayed: stages.Decayed | None
        _, matrices, room = _parts(p, saved)
        if matrices is None:
            matrices, _ = scores_of(part, x, at, None)
        if _is_affine(p.rule, p.bonus):
            from .stages_triton_affine import affine

            matrices, decayed, apart = affine(p, x, at, given(matrices))
        else:
            matrices, decayed = scores_of(part, x, at, matrices)
        carried = None if room is None else carried_room(p, stages.cut(p), at.most, x.q.device, room)
        if by_scans(p, x):
            return scanned(p, x, at, S0, do, dST, carried)
        T, add, chunked, wide = _inverse(p, matrices), p.rule is Rule.ADD, stages.by_chunks(p, back=True), stages.gathered(p, x)
        if stages.by_chunks(p):
            p = part = replace(p, C=stages.SCANNED)
        tokens = inverse.tokens(p, x, at)
        at, every = at if wide is p else stages.index(wide), wide.C // p.C
        there = stages.state_pass(p, x, at, S0, T=T, decayed=decayed, store=every, carried=carried, tokens=tokens)
        back = stages.state_pass(
            part, x, at, dST, T=T, decayed=decayed, do=do, store=every, output=add and not chunked, final=S0 is not None,
            carried=there.carried, tokens=tokens, rest=rest,
        )  # fmt: skip
        if chunked:
            each = replace(wide, scale=part.scale)
            if x.g is None or p.fixed:
                return rows.grads(each, x, at, do, S=given(there.S), dS=given(back.S), rest=rest), back.ST
            U: Tensor | None = rows.values(each, x, at, do, given(back.S), rest=rest)
        else:
            U = back.o if add else back.X
        d = grads(wide, x, at, do, S=given(there.S), dS=given(back.S), X=there.X, U=U, decayed=decayed, apart=apart, rest=rest)
        if p.rule is Rule.DELTA and p.before:
            d = d._replace(a=d.e, e=None)
        if p.H != asked.H:
            d = d._replace(q=given(d.q).unflatten(2, (asked.H, -1)).sum(3), k=given(d.k).unflatten(2, (asked.H, -1)).sum(3))
        if p.gate is not asked.gate and g is not None and d.g is not None:
            d = d._replace(g=d.g.sum((0, 1, 3) if asked.gate is Gate.HEAD else 3).to(g.dtype))
    return d, back.ST
