"""Stage `grads`: all gradients of a chunk, chunk-parallel, each written once. What does not fit: grad_blocks.py; gates per key:
grad_key.py

Readers are q (of o's gradient) and, for the delta rule, r = -beta k (of U); writers are k with v, or k with X. With y = v | X,
A = dM_qk = scale do y' e^(G_i - G_j) for j <= i and B = -beta U X' e^(G_i - G_j) for j < i, inside the chunk:

    dq = scale e^G (do S') + A k
    dk = e^(G_C - G) (y dS') + A' q        delta: + B' k + R,  R = -beta e^G (U S') + B k: beta k's part of r's gradient
    add    dv is made by the reverse scan
    delta  dv = beta U is made there too; X = beta (v - S k) of every token's own state S, so dbeta = U.(v - S k) = U.X / beta
    dg_t = the sum of all x dx that decay across token t

Across t decay readers of the first state from t on, writers into the last one before t, and pairs j < t <= i. Of the pairs between
different tokens, those of readers from t on are all but the ones whose writers are from t on too: q dq + k R - k (A' q + B' k), summed from
the end. A token's own pair decays nowhere; it is added to dq and dk apart, so nothing large is added to be subtracted again.

What is per token lies along rows throughout, so that it takes few registers; A, B and their transposes stay in registers, as left operands.
"""

import triton
import triton.language as tl

from .score import fitting
from .tile import (
    FLOOR,
    chunk_place,
    chunk_rows,
    decay_sums,
    dense_place,
    load_chunk,
    load_gate,
    load_rows,
    load_strength,
    pair_decay,
    sequence_of,
    shared_strength,
    start,
    store_chunk,
    whole,
)

PASSED = tl.constexpr(0)  # of a chunk's parts
READ = tl.constexpr(1)  # q dq of readers of its first state
WRITTEN = tl.constexpr(2)  # k dk of writers into its last
FORGOTTEN = tl.constexpr(3)  # G_C


@triton.jit
def load_state(S, i_slot, i_hv, HV, i_v, i_k, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr):
    """Values i_v * BV.., keys i_k * BK.. of one chunk's S' [BV, BK]."""
    if TMA:
        b_S = tl.reshape(S.load([i_slot.to(tl.int32), i_hv, i_v * BV, i_k * BK]), [BV, BK])
    else:
        o_v, o_k = i_v * BV + tl.arange(0, BV), i_k * BK + tl.arange(0, BK)
        b_S = load_rows(S + (i_slot.to(tl.int64) * HV + i_hv) * V * K, 0, K, o_v, o_k, V, K, BK)
    return b_S


@triton.jit
def before(b_x, o_c):
    """[C] -> [C]: for every token the sum over the tokens before it."""
    b_x = tl.cumsum(b_x, 0)
    return tl.where(o_c > 0, tl.gather(b_x, tl.maximum(o_c - 1, 0), 0), 0.0)


@triton.jit(do_not_specialize=["T", "HV"])
def grad_kernel(
    q, k, v, y, D, do, S, dS, g, beta, chunks,  # q, k, v, do: token rows; y (v or X), D: [B*T, HV, V]; g [HV] | [B*T, HV]; beta [B*T, HV]
    dq, dk, dv, dg, dbeta,  # dq, dk [B*T, HV, K]; dv (delta) [B*T, HV, V]; dg, dbeta [B*T, HV]; S, dS [slots, HV, V, K]
    parts,  # [slots, HV, 4] fp32, written with PARTS: see passed_kernel
    sk, sv, sy,  # rows of q, k, of v, do and of y, D are so far apart
    T, HV, scale, rest,  # rest: what dS lacks, where the rule adds
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr, IP: tl.constexpr,
    LEARNS: tl.constexpr,  # the gate has a gradient
    PARTS: tl.constexpr,
    TMA: tl.constexpr,  # q, k, y, D, do, dq, dk are descriptors of [B, heads, T, columns], S, dS of their shape, not pointers
):  # fmt: skip
    """One program a (chunk, value head), block of keys by block of keys. All V values at once: BV >= V.

    D (delta) is dv, as the reverse scan left it: U times the first of `shared_strength`. dq may be where y is: y is read first.
    """
    DECAY: tl.constexpr = GATE != "none"
    GRAD: tl.constexpr = DECAY and LEARNS
    FIT: tl.constexpr = v.dtype.element_ty == tl.float16  # whose range gradients of pairs may leave
    TYPE: tl.constexpr = v.dtype.element_ty
    OUT: tl.constexpr = dq.dtype if TMA else dq.dtype.element_ty
    _, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED)
    i_h = i_hv // GROUP
    if L <= 0:
        return
    i_b, t = dense_place(i_slot, T, C)
    o_c, o_v = tl.arange(0, C), tl.arange(0, BV)
    i, j = o_c[:, None], o_c[None, :]
    o_h = (row + o_c) * HV + i_hv  # [C]
    b_g = load_gate(g, row, HV, i_hv, o_c, L, GATE)
    b_beta = load_strength(beta, row, HV, i_hv, o_c, L, USE_BETA).to(tl.float32)  # [C]
    b_do = load_chunk(do, row, sv, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]
    b_y = load_chunk(y, row, sy, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]
    if DELTA:
        b_D = load_chunk(D, row, sy, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]

    b_G, b_F = decay_sums(b_g, o_c, L, GATE, False)  # [C]
    b_all, b_end = whole(b_G, b_F, o_c, C, False)
    b_start = start(b_G, b_F, False)
    b_P = tl.dot(b_do, tl.trans(b_y), input_precision=IP)  # [i, j]
    if DECAY:
        m = (j < i) if GRAD or DELTA else (j <= i)
        b_low = pair_decay(b_G[:, None], b_G[:, None], b_G[None, :], b_G[None, :], m, False)
    if GRAD:
        b_own = tl.sum(tl.where(i == j, b_P, 0.0), 1) * scale  # A of a token and itself, [C]
        b_A = b_P * b_low * scale
    elif DECAY and DELTA:
        b_A = b_P * tl.where(i == j, 1.0, b_low) * scale
    elif DECAY:
        b_A = b_P * b_low * scale
    else:
        b_A = tl.where(j <= i, b_P, 0.0) * scale
    if DELTA:
        b_P = tl.dot(b_D, tl.trans(b_y), input_precision=IP)  # [i, j]
        b_f = b_beta
        if USE_BETA:
            b_unit, b_f = shared_strength(b_beta, TYPE)  # D times b_f is beta U
            m_small = (b_unit != b_beta) & (o_c < L)
            b_dbeta = tl.sum(tl.where(i == j, b_P, 0.0), 1) / (b_unit * b_unit)
            tl.store(dbeta + o_h, b_dbeta.to(dbeta.dtype.element_ty), mask=(b_unit == b_beta) & (o_c < L))
            if tl.max(m_small.to(tl.int32), 0) > 0:
                b_u = load_rows(dv + i_hv * V, row, HV * V, o_c, o_v, L, V, BV).to(tl.float32)  # [C, BV]
                o_out = o_c[:, None] * (HV * V) + o_v[None, :]
                m_out = m_small[:, None] & (o_v < V)[None, :]
                tl.store(dv + (row * HV + i_hv) * V + o_out, (b_u * b_beta[:, None]).to(TYPE), mask=m_out)
        if DECAY:
            b_B = b_P * b_low * -b_f[:, None]
        else:
            b_B = tl.where(j < i, b_P, 0.0) * -b_f[:, None]
    if FIT:  # what is made with A and B is so many times too small until it is whole
        fit, back = fitting(tl.maximum(tl.abs(b_A), tl.abs(b_B)) if DELTA else tl.abs(b_A))
        b_A *= fit
        if DELTA:
            b_B *= fit
    b_A = b_A.to(TYPE)
    b_At = tl.trans(b_A)  # [j, i]
    if DELTA:
        b_B = b_B.to(TYPE)
        b_Bt = tl.trans(b_B)  # [j, i]
        if not GRAD:
            b_Bt += b_B  # one of them is 0
        b_f *= b_start * fit if FIT else b_start
    b_start *= scale * fit if FIT else scale
    if not DELTA:
        b_all *= rest
        b_end *= rest
    if GRAD:
        b_sums = tl.zeros([C], tl.float32)  # of pairs of tokens and of readers of the state
        b_ends = tl.zeros([C], tl.float32)  # k dk of writers into the state
        FEW: tl.constexpr = min(BV, 32)
        b_through = tl.zeros([FEW, BK], tl.float32)  # S dS
    for i_k in range((K + BK - 1) // BK):
        b_q = load_chunk(q, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
        b_k = load_chunk(k, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
        b_S = load_state(S, i_slot, i_hv, HV, 0, i_k, K, V, BK, BV, TMA)  # [BV, BK]
        b_dS = load_state(dS, i_slot, i_hv, HV, 0, i_k, K, V, BK, BV, TMA)  # [BV, BK]
        if GRAD:
            b_through += tl.sum(tl.reshape(b_S.to(tl.float32) * b_dS.to(tl.float32), [BV // FEW, FEW, BK]), 0)
        b_x = tl.dot(b_do, b_S, input_precision=IP) * b_start[:, None]  # dq [C, BK]
        b_x = tl.dot(b_A, b_k, b_x, input_precision=IP)
        if FIT:
            b_x *= back
        if GRAD:
            b_sums += tl.sum(b_q.to(tl.float32) * b_x, 1)
            b_x += b_own[:, None] * b_k.to(tl.float32)
        store_chunk(dq, tl.trans(b_x.to(OUT)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)

        if DELTA:
            b_x = tl.dot(b_D, b_S, input_precision=IP) * -b_f[:, None]
            if GRAD:
                b_x = tl.dot(b_B, b_k, b_x, input_precision=IP)  # R
                b_kr = tl.sum(b_k.to(tl.float32) * b_x, 1)
                if FIT:
                    b_kr *= back
                b_sums += b_kr + b_kr  # once for R, once against what follows
            b_x = tl.dot(b_Bt, b_k, b_x, input_precision=IP)
            b_x = tl.dot(b_At, b_q, b_x, input_precision=IP)
        else:
            b_x = tl.dot(b_At, b_q, input_precision=IP)
        if FIT:
            b_x *= back
        if GRAD:
            b_sums -= tl.sum(b_k.to(tl.float32) * b_x, 1)
            b_x += b_own[:, None] * b_q.to(tl.float32)
        b_z = tl.dot(b_y, b_dS, input_precision=IP)  # dk [C, BK]
        if GRAD:
            b_ends += tl.sum(b_k.to(tl.float32) * b_z, 1)
        b_x += b_z * b_end[:, None]
        store_chunk(dk, tl.trans(b_x.to(OUT)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)

    if GRAD:
        b_dg = tl.cumsum(b_sums, 0, reverse=True) + before(b_ends * b_end, o_c)
        passed = b_all * tl.sum(tl.sum(b_through, 1), 0)
        b_dg += passed
        if PARTS:
            p_part = parts + (i_slot * HV + i_hv) * 4
            tl.store(p_part + PASSED, passed)
            tl.store(p_part + READ, tl.sum(b_sums, 0))
            tl.store(p_part + WRITTEN, tl.sum(b_ends * b_end, 0))
            tl.store(p_part + FORGOTTEN, tl.maximum(tl.sum(tl.where(o_c == C - 1, b_G, 0.0), 0), FLOOR))
        tl.store(dg + o_h, b_dg.to(dg.dtype.element_ty), mask=o_c < L)


@triton.jit(do_not_specialize=["T", "HV", "N"])
def passed_kernel(
    parts, chunks, first, dg, T, HV, N,  # parts [slots, HV, 4]; first [N + 1], packed: first slot of each sequence; dg [B*T, HV] fp32
    C: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What passes a chunk, PASSED = e^(G_C) S.dS of rounded states, is better known from several; dg is mended. One program a chunk.

    S.dS between two chunks is what passes the first and what it writes, and what passes the second and what it reads: PASSED + WRITTEN of
    one is PASSED + READ of the next. These are sums over a chunk's own tokens, PASSED of all before it with all after: where little is
    forgotten it is much larger, and so is its error, every chunk's another. So each of GROUP chunks says what passes all of them, and one
    takes the mean, in which another's weight is the square of what both and those between them keep.
    """
    GROUP: tl.constexpr = 8
    _, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED)
    if L <= 0:
        return
    i_slot = i_slot.to(tl.int32)
    if PACKED:
        low = sequence_of(first, i_slot, N)
        start_slot = tl.load(first + low).to(tl.int32)
        n = (tl.load(first + low + 1) - start_slot).to(tl.int32)
    else:
        n = tl.cdiv(T, C)
        start_slot = i_slot // n * n
    i_c = i_slot - start_slot
    o = tl.arange(0, GROUP)
    c_0 = i_c // GROUP * GROUP
    m = c_0 + o < n
    p = parts + ((start_slot + c_0 + o).to(tl.int64) * HV + i_hv) * 4
    b_passed = tl.load(p + PASSED, mask=m, other=0.0)  # [GROUP]
    b_step = tl.load(p + WRITTEN, mask=m, other=0.0) - tl.load(p + HV * 4 + READ, mask=c_0 + o + 1 < n, other=0.0)
    b_decay = tl.load(p + FORGOTTEN, mask=m, other=0.0)
    i_own = i_c - c_0
    own = o == i_own
    i, j = o[None, :], o[:, None]  # only chunks between own and j count for j: sums from elsewhere may be large, and cancel
    b_since = tl.sum(tl.where((i >= i_own) & (i < j), b_step[None, :], 0.0), 1)  # of PASSED, [GROUP]
    b_since -= tl.sum(tl.where((i >= j) & (i < i_own), b_step[None, :], 0.0), 1)
    b_vote = b_passed - b_since
    m_lost = ((i >= i_own) | (i >= j)) & ((i <= i_own) | (i <= j))  # both chunks' and those between
    b_lost = tl.sum(tl.where(m_lost, b_decay[None, :], 0.0), 1)
    b_weight = tl.where(m & (tl.abs(b_vote) < float("inf")), tl.exp2(tl.minimum(2.0 * b_lost, 0.0)), 0.0)
    b_weight = tl.where(own, 1.0, b_weight)
    was = tl.sum(tl.where(own, b_passed, 0.0), 0)
    now = tl.sum(tl.where(b_weight > 0, b_weight * b_vote, 0.0), 0) / tl.sum(b_weight, 0)
    o_c = tl.arange(0, C)
    p_dg = dg + (row + o_c) * HV + i_hv
    b_dg = tl.load(p_dg, mask=o_c < L, other=0.0)
    tl.store(p_dg, b_dg + (now - was), mask=o_c < L)


@triton.jit(do_not_specialize=["T", "HV"])
def small_strength_kernel(
    k, v, y, D, S, g, beta, chunks, dbeta,  # as grad_kernel, but all are pointers
    sk, sv, sy, T, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, PACKED: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """dbeta where beta is too small to divide by: U.v - k.(e^G (U S') + the pairs' sum). D is U there. One program a chunk; BH >= HV."""
    TYPE: tl.constexpr = v.dtype.element_ty
    i_slot = tl.program_id(0).to(tl.int64)
    row, L = chunk_rows(chunks, i_slot, T, C, PACKED)
    o_c, o_v, o_hv = tl.arange(0, C), tl.arange(0, BV), tl.arange(0, BH)
    o_all = (row + o_c)[:, None] * HV + o_hv[None, :]
    b_all = tl.load(beta + o_all, mask=(o_c < L)[:, None] & (o_hv < HV)[None, :], other=1.0).to(tl.float32)  # [C, BH]
    b_ones, _ = shared_strength(b_all, TYPE)
    if tl.max(tl.max((b_ones != b_all).to(tl.int32), 1), 0) == 0:
        return
    for i_hv in range(HV):
        o_h = (row + o_c) * HV + i_hv  # [C]
        b_beta = tl.load(beta + o_h, mask=o_c < L, other=1.0).to(tl.float32)  # [C]
        b_unit, b_rest = shared_strength(b_beta, TYPE)
        m_small = b_unit != b_beta  # [C]
        if tl.max(m_small.to(tl.int32), 0) > 0:
            b_G, b_F = decay_sums(load_gate(g, row, HV, i_hv, o_c, L, GATE), o_c, L, GATE, False)  # [C]
            b_u = load_rows(D + i_hv * V, row, sy, o_c, o_v, L, V, BV)  # [C, BV]
            b_v = load_rows(v + i_hv * V, row, sv, o_c, o_v, L, V, BV)  # [C, BV]
            b_dbeta = tl.sum(b_u.to(tl.float32) * b_v.to(tl.float32), 1)  # [C]
            b_M = tl.dot(b_u, tl.trans(load_rows(y + i_hv * V, row, sy, o_c, o_v, L, V, BV)), input_precision=IP)  # [i, j]
            if GATE != "none":
                b_M *= pair_decay(b_G[:, None], b_G[:, None], b_G[None, :], b_G[None, :], o_c[:, None] > o_c[None, :], False)
            else:
                b_M = tl.where(o_c[:, None] > o_c[None, :], b_M, 0.0)
            b_M = b_M.to(TYPE)
            for i_k in range((K + BK - 1) // BK):
                o_k = i_k * BK + tl.arange(0, BK)
                b_k = load_rows(k + i_hv // GROUP * K, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
                b_S = load_rows(S + (i_slot * HV + i_hv) * V * K, 0, K, o_v, o_k, V, K, BK)  # [BV, BK]
                b_r = tl.dot(b_u, b_S, input_precision=IP) * tl.exp2(b_G)[:, None]  # r's gradient [C, BK]
                b_r = tl.dot(b_M, b_k, b_r, input_precision=IP)
                b_dbeta -= tl.sum(b_k.to(tl.float32) * b_r, 1)
            tl.store(dbeta + o_h, b_dbeta.to(dbeta.dtype.element_ty), mask=m_small & (o_c < L))
