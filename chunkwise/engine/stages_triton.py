"""The stages on a GPU: allocate, choose a config, launch. Names as in stages_torch; formulas in the kernels."""

from __future__ import annotations

from dataclasses import replace
from math import frexp, isfinite, ldexp
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..kernels.index import index_kernel
from ..kernels.state_pass import state_pass_kernel
from ..spec import Gate, Rule, Streams
from .cut import WHOLE, Cut, long, longest, parted, side_by_side, split
from .launch import descriptor, launch
from .problem import Problem
from .stages_triton_split import Carried, carried_room, carry
from .tune import card, config


class Index(NamedTuple):
    """Where the chunks lie among all B * T rows. A slot is a chunk of a sequence, sequence by sequence."""

    slots: int  # of all sequences; packed: an upper bound, known without asking the device
    chunks: Tensor | None  # packed: [slots, 2] int64, first row and valid rows of each slot (0: not used)
    first: Tensor | None  # packed: [N + 1] int64, first slot of each sequence
    most: int  # sequences that are cut into pieces, at most
    cuts: Tensor | None  # packed: [most + N] int32, which these are (-1: none), and of each sequence how many such lie before it
    long: int = 0  # packed: tokens from which one is cut


def index(p: Problem) -> Index:
    """Stage `index`: nothing for dense calls, a table made on the device for packed ones."""
    if p.cu_seqlens is None:
        return Index(p.B * -(-p.T // p.C), None, None, p.B, None)
    sizes = p.HV, p.K, p.V
    most = longest(p.rule, p.B, p.T, *sizes, packed=True) if cut(p) != WHOLE else 0
    tokens = long(p.rule, *sizes)
    slots = p.T // p.C + p.N
    first = torch.empty(p.N + 1, dtype=torch.int64, device=p.cu_seqlens.device)
    chunks = torch.empty(slots, 2, dtype=torch.int64, device=p.cu_seqlens.device)
    cuts = torch.empty(most + p.N, dtype=torch.int32, device=p.cu_seqlens.device)
    launch(
        index_kernel, p.N + 1, p.cu_seqlens.contiguous(), first, chunks, cuts, p.N, slots, most, tokens, C=p.C, BLOCK=256,
        config=config("index", p),
    )  # fmt: skip
    return Index(slots, chunks, first, most, cuts, tokens)


def distance(x: Tensor) -> int | None:
    """Elements between neighbouring rows of [B, T, heads, D], or None where the B * T rows are not even or not dense inside."""
    B, T, H, D = x.shape
    row = H * D if B == T == 1 else x.stride(1) if T > 1 else x.stride(0)
    even = (D == 1 or x.stride(3) == 1) and (H == 1 or x.stride(2) == D) and (B == 1 or x.stride(0) == T * row)
    return row if even and H * D <= row < 2**24 else None  # kernels add up to 64 of them in 32 bits


def rows(x: Tensor) -> tuple[Tensor, int]:
    """[B, T, heads, D] with even rows, and their distance. A copy only where they are not."""
    d = distance(x)
    return (x, d) if d is not None else (x.contiguous(), x.shape[2] * x.shape[3])


def alike(*xs: Tensor) -> tuple[tuple[Tensor, ...], int]:
    """Tensors of one shape with even rows, equally far apart in all of them, and the distance. Copies only where that is not so."""
    d = distance(xs[0])
    if d is None or any(distance(x) != d for x in xs):
        return tuple(x.contiguous() for x in xs), xs[0].shape[2] * xs[0].shape[3]
    return xs, d


def exact(parts: int) -> str:
    """fp32 products from so many bf16 parts of each operand: 3 keep all 24 bits, 2 keep 16. The interpreter has plain fp32 products."""
    return "ieee" if triton.knobs.runtime.interpret else {2: "bf16x3", 3: "bf16x6"}[parts]


def products(p: Problem) -> str:
    """input_precision of products whose operands have q's dtype (16-bit ones have only one)."""
    return "tf32" if p.dtype != torch.float32 else exact(3) if p.precision == "ieee" else p.precision


def sums(p: Problem) -> str:
    """input_precision of fp32 products that no caller chooses: of maps between pieces, and what the inverse's are unless one does."""
    return products(p) if p.dtype == torch.float32 else exact(2)


def solves(p: Problem) -> str:
    """How the fp32 products inside the inverse are made, see kernels/inverse.py."""
    chosen = {"auto": sums(p), "ieee": exact(3), "bf16x3": exact(2), "bf16": "bf16x1"}  # Triton takes "bf16" for a type, where it preloads
    return chosen.get(p.inverse, p.inverse)


def switches(p: Problem) -> dict[str, object]:
    """constexpr arguments that every stage's kernel has."""
    scalar = p.gate in (Gate.HEAD, Gate.SCALAR)
    split = scalar and p.dtype == torch.float32
    return dict(K=p.K, C=p.C, GATE=p.gate.value, PACKED=p.cu_seqlens is not None, SPLIT=split, IP=products(p))


def dense(x: Tensor | None, unused: Tensor) -> Tensor:
    """The contiguous tensor; any pointer in place of None, which the kernel's switches leave unread."""
    return unused if x is None else x.contiguous()


def chunks(at: Index, unused: Tensor) -> Tensor:
    return unused if at.chunks is None else at.chunks


def described(x: Tensor, d: int, C: int, block: int) -> TensorDescriptor:
    """[B, T, heads, D], rows d apart, as a descriptor of [B, heads, T, D] for blocks of C rows: zeros beyond T and D, no writes there."""
    B, T, H, D = x.shape
    return descriptor(x, [B, H, T, D], [T * d, D, d, 1], [1, 1, C, block])


def can_describe(p: Problem, *xs: tuple[Tensor, int]) -> bool:
    """Whether the copy engine can move these: 16-byte rows and starts, sequences that all begin at row 0, a card that has one."""
    if p.cu_seqlens is not None or p.dtype == torch.float32 or p.K % 8 or p.V % 8:
        return False
    return card().engine and not any(d % 8 or x.data_ptr() % 16 for x, d in xs)


def gathered(p: Problem, x: Streams) -> Problem:
    """The problem in the chunks that states are stored for and gradients made of: two of the scans' where a gate learns in 16 bits; in
    float32 as many tokens as the kernels' registers hold.

    Two halve the states. A rule that corrects could do as well: DeltaNet, H200, 1.37 ms and 833 MiB, else 1.32 and 1089.
    """
    learns = p.rule is Rule.ADD and x.g is not None and not p.fixed
    if by_chunks(p):
        return replace(p, C=32 if learns else 64)
    wide = learns and max(p.K, p.V) > 64 and (p.V <= 128 or p.V <= AT_ONCE and p.HV == p.H)  # no room for sums over heads, in fp32
    return replace(p, C=2 * p.C) if wide and at_once(p) and p.C == 64 else p


SCANNED = 32  # tokens of a chunk of scans that store states alone, in float32


def by_chunks(p: Problem, *, back: bool = False) -> bool:
    """Whether a scan leaves rows to chunks side by side (kernels/output.py): outputs and, with `back`, gradients. In float32 products cost
    so much that a scan, few programs one chunk after the other, should have as few as it can. In 16 bits states of more than 128 keys fill
    the registers: simple GLA, H200, 512 values, B=1, reversed with dv 0.478 ms, states alone 0.163 forwards; up to 256 values are scanned,
    and all under a head's own gates, of which it was not proved on a card."""
    scalar = p.gate in (Gate.NONE, Gate.HEAD, Gate.SCALAR)
    if p.rule is not Rule.ADD or not scalar or p.bonus or card().arch != "sm_90":
        return False
    return p.dtype == torch.float32 or back and p.gate is not Gate.HEAD and p.C == 64 and p.K > 128 and p.V > AT_ONCE


def at_once(p: Problem) -> bool:
    """Whether gradients are made of all values of a chunk at once (kernels/grad.py), or of AT_ONCE at a time, on sm_90. Packed rows as
    dense ones: sums in another order have other bits.

    Two programs of 128 values fit a multiprocessor, of 256 one. K=V=256, B=2, T=4096, H=16: DeltaNet 0.40 ms (in blocks 1.00), GDN 0.57;
    256 keys, 512 values, B=1: simple GLA 0.385 and 0.08 to sum (0.99), where no gate learns 0.35 and 0.08 (0.374).
    """
    if p.rule is Rule.DPLR or p.bonus or p.erase or p.gate not in (Gate.NONE, Gate.HEAD, Gate.SCALAR):
        return False
    fits = p.V <= 128 or p.rule is Rule.ADD and p.V <= AT_ONCE
    if not fits and p.K <= 256 and p.C == 64 and (p.rule is Rule.DELTA or p.gate is not Gate.NONE and not p.fixed):
        fits = p.K % 8 == p.V % 8 == 0 and (p.V <= AT_ONCE or p.V % AT_ONCE == 0)  # others spill 500 bytes a thread
    return p.dtype != torch.float32 and fits and card().arch == "sm_90"


AT_ONCE = 256  # values


def scaled(p: Problem) -> bool:
    """Whether the reversed scan leaves beta U, which is dv, in U's place (delta): but for rows of a beta too small to divide by."""
    return p.rule is Rule.DELTA and (p.gate is Gate.KEY or at_once(p))


class Decayed(NamedTuple):
    """What the state pass reads in place of q, k and g: made by the score stage where gates are per key, or by the affine stage (dplr)."""

    M: Tensor  # [B, T, HV, C] scale M_qk
    qd: Tensor  # [B, T, HV, K] scale q e^G
    kd: Tensor | None  # delta: [B, T, HV, K] e e^G, e = k unless another key erases; affine: w~
    kr: Tensor  # [B, T, HV, K] k e^(G_C - G)
    decay: Tensor  # [slots, HV, K] G_C, log2 units, fp32
    near: Tensor | None = None  # for the gradients: [slots, HV] uint8, whether a chunk's decays are in reach
    w: Tensor | None = None  # dplr: [B, T, HV, K] b
    A: Tensor | None = None  # dplr: [B, T, HV, C]
    Mqw: Tensor | None = None  # dplr: [B, T, HV, C]


class Scan(NamedTuple):
    """What one state pass made; None where it was not asked for."""

    o: Tensor | None = None  # [B, T, HV, V]; reversed, where the rule adds: dv
    X: Tensor | None = None  # [B, T, HV, V]; reversed: U = T' dX, or dv where gradients are made at once
    S: Tensor | None = None  # [slots, HV, V, K]: the state each chunk met; reversed: the gradient of the state it left
    ST: Tensor | None = None  # [N, HV, K, V] fp32: the state after the last token; reversed: the gradient of the initial one
    carried: Carried | None = None  # where sequences are cut into pieces: the states between them


def cut(p: Problem) -> Cut:
    """The pieces that the problem's long sequences are scanned in."""
    return split(p.gate, p.rule, p.T, p.HV, p.K, p.V)


def binary(p: Problem) -> tuple[Problem, float]:
    """p with the scale's power of two for a scale, and the rest of it, in [1, 2).

    Where a rule adds, operands of products take the first, which costs none of their digits, and results, in fp32, the second.
    """
    m, e = frexp(p.scale)
    if p.rule is not Rule.ADD or p.bonus or by_chunks(p) or not m or not isfinite(m):
        return p, 1.0
    return replace(p, scale=ldexp(1.0, e - 1)), 2 * m


def state_pass(
    p: Problem, x: Streams, at: Index, S0: Tensor | None, *, T: Tensor | None = None, decayed: Decayed | None = None,
    do: Tensor | None = None, final: bool = False, output: bool = False, store: int = 0, carried: Carried | None = None,
    room: Tensor | None = None, tokens: Tensor | None = None, rest: float = 1.0,
) -> Scan:  # fmt: skip
    """Stage `state pass`. Forwards from S0 with `output` and/or `store`; with `do` reversed, from the last state's gradient in S0's place.

    store: the states that every so many chunks meet, in reverse the gradients of those they leave; `at` is of so many chunks a slot.
    decayed: of the score or the affine stage, in place of q, k and g.
    carried: what an earlier scan forwards has left of the pieces; room: where this one leaves it, flat.
    tokens: of the stage `inverse` or `scores`, in place of g and beta.
    rest: of `binary`; reversed, where the rule adds, states' gradients lack it.
    """
    reverse, early = do is not None, None
    made = scan_room(p, at, x.q.device, final=final, output=output, store=store)
    if reverse or carried is None:
        early = made if reverse and p.rule is not Rule.ADD else None  # the first scan does a whole one's work, and may keep a first piece
        carried = starts(
            p, x, at, S0, T=T, decayed=decayed, do=do, carried=carried, room=room, made=early, store=store, tokens=tokens, rest=rest
        )
    made = made._replace(carried=carried)
    later = carried is not None and early is not None
    return scan(p, x, at, S0, T=T, decayed=decayed, do=do, made=made, store=store, later=later, tokens=tokens, rest=rest)


def starts(
    p: Problem, x: Streams, at: Index, S0: Tensor | None, *, T: Tensor | None = None, decayed: Decayed | None = None,
    do: Tensor | None = None, carried: Carried | None = None, room: Tensor | None = None, made: Scan | None = None, store: int = 0,
    tokens: Tensor | None = None, rest: float = 1.0,
) -> Carried | None:  # fmt: skip
    """Where pieces begin: the states between them, in reverse the gradients of those; None where sequences go whole.

    carried, room: of `state_pass`. made: what is scanned for good of what comes first in reverse. rest: of `scan`.
    """
    by, reverse = cut(p), do is not None
    if by == WHOLE or not side_by_side(p.gate, p.rule, p.dtype, p.B, p.HV, p.K, p.V, packed=p.cu_seqlens is not None):
        return None
    if reverse and p.rule is not Rule.ADD and (carried is None or carried.maps is None):
        raise ValueError("chunkwise engine: a scan backwards was asked for before the one forwards that finds the pieces' maps")
    found = carried_room(p, by, at.most, x.q.device, room, None if carried is None else carried.maps)
    made = (made or Scan())._replace(carried=found)
    scan(p, x, at, S0, T=T, decayed=decayed, do=do, made=made, store=store, ends=True, tokens=tokens, rest=rest)
    carry(p, by, found, at.cuts, sums(p), reverse=reverse)
    return found


def scan_room(p: Problem, at: Index, device: torch.device, *, final: bool, output: bool, store: int, turned: bool = False) -> Scan:
    """Memory for what a scan makes."""
    heads = (p.B, p.T, p.HV, p.V)
    return Scan(
        torch.empty(heads, dtype=torch.float32 if turned and p.HV > p.H else p.dtype, device=device) if output else None,
        torch.empty(heads, dtype=p.dtype, device=device) if store and p.rule is not Rule.ADD else None,
        torch.empty(at.slots, p.HV, p.V, p.K, dtype=p.dtype, device=device) if store else None,
        torch.empty(p.N, p.HV, p.K, p.V, dtype=torch.float32, device=device) if final else None,
    )


def scan(
    p: Problem, x: Streams, at: Index, S0: Tensor | None, *, T: Tensor | None = None, decayed: Decayed | None = None,
    do: Tensor | None = None, made: Scan, store: int = 0, ends: bool = False, later: bool = False, turned: bool = False,
    tokens: Tensor | None = None, rest: float = 1.0,
) -> Scan:  # fmt: skip
    """One launch of the state pass over all pieces of each sequence, from the states that `made` carries; fills `made`.

    ends: over all but the last, to find what they make of any state; what is to be filled is of the first alone. later: over all but the
    first. turned: keys and values have changed places in p and x, but not in states: q and k have p.HV heads, v has p.H.
    rest: what of the scale multiplies results, not operands: see `binary`.
    """
    reverse, delta, key = do is not None, p.rule is Rule.DELTA, decayed is not None
    low_rank = p.rule is Rule.DPLR
    v, sv = rows(x.v if do is None else do)
    unused, Mqw = v, None
    if decayed is None:
        (q, k, e), sk = alike(x.q, x.k, x.k if x.e is None else x.e)
        M = decay = unused
        w = k
    else:
        M, q, kd, k, decay, _, b, A, Mqw = decayed
        e, w, sk, T = k if kd is None else kd, k if b is None else b, p.HV * p.K, A if low_rank else T
    by, parts = cut(replace(p, K=p.V, V=p.K) if turned else p), 0  # parts of a state: see PARTED
    same = parted(p.gate, p.rule, p.dtype, p.K, p.V)  # bits, side by side and one after the other
    if by != WHOLE and not ends and same:
        parts = 2 if made.carried is None else 1
    elif made.carried is None:
        by = WHOLE
    output, store = made.o is not None, store if made.S is not None else 0
    cuts = ends and at.cuts is not None and made.S is None  # nothing for good: all pieces of sequences that are cut, and those alone
    firsts = 0 if later or cuts else p.N  # sequences whose first pieces, or all, come
    others = 0 if parts == 2 else by.pieces - ends - (not cuts)  # pieces of those cut
    kind = "" if ends or output else "_states"
    kind = ("_reverse" if reverse and (ends or output or p.rule is not Rule.ADD) else kind) + ("_ends" if ends else "")
    c = config("state_pass" + kind, p if not others else replace(p, N=firsts + at.most * others))
    blocks = -(-p.V // c.BV) + (-(-p.K // c.BV) if ends and (delta or low_rank) and not reverse else 0)
    out = [unused if t is None else t for t in made[:4]]
    between = [unused if t is None else t for t in made.carried or (None, None, None)]
    T, Mqw, y = (unused if t is None else t for t in (T, Mqw, tokens))
    tma = c.tma and can_describe(p, (q, sk), (k, sk), (e, sk), (w, sk), (v, sv))
    if tma:
        q, k, e, w = (described(x, sk, p.C, c.BK) for x in (q, k, e, w))
        v = described(v, sv, p.C, c.BV)
        out[:2] = (described(x, p.HV * p.V, p.C, c.BV) for x in out[:2])
        if made.S is not None:
            out[2] = descriptor(made.S, made.S.shape, made.S.stride(), [1, 1, c.BV, c.BK])
        T, M, Mqw = (described(x, p.HV * p.C, p.C, p.C) if x is not unused else v for x in (T, M, Mqw))
    launch(
        state_pass_kernel, (firsts + at.most * others) * p.HV * blocks,
        q, e, k, w, v, dense(None if key else x.g, unused), dense(x.beta, unused), y, T, M, Mqw, decay,
        *(dense(t, unused) for t in (S0, p.cu_seqlens, at.first, at.cuts)), *out, *between,
        sk, sv, p.T, p.HV, p.scale, rest, by.pieces, by.code, sum(by.lengths), by.order(reverse, ends, cuts), firsts, at.most, at.long,
        V=p.V, BK=c.BK, BV=c.BV, GROUP=1 if key else p.HV // p.H,
        DELTA=delta, LOW_RANK=low_rank, ERASE=x.e is not None, BEFORE=p.before, USE_BETA=x.beta is not None, INITIAL=S0 is not None,
        SCALED=reverse and scaled(p), FINAL=made.ST is not None and (not ends or p.cu_seqlens is not None),
        OUTPUT=output, CARRIED=made.carried is not None and not ends, ENDS=ends, PARTED=parts, REVERSE=reverse, STORE=store, TURNED=turned,
        ACROSS=turned and p.gate is Gate.HEAD and same, TMA=tma, TOKENS=tokens is not None, NORM=p.raw.norm,
        **switches(p) | (dict(GATE="key") if key else {}), config=c,
    )  # fmt: skip
    return made
