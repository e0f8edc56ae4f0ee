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

from .tile import (
    chunk_rows,
    decay_sums,
    load_chunk,
    load_gate,
    load_rows,
    load_strength,
    pair_decay,
    shared_strength,
    start,
    store_chunk,
    whole,
)


@triton.jit
def load_state(S, i_slot, i_hv, HV, i_v, i_k, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr):
    """Values i_v * BV.., keys i_k * BK.. of one chunk's S' [BV, BK]."""
    if TMA:
        b_S = tl.reshape(S.load([i_slot, i_hv, i_v * BV, i_k * BK]), [BV, BK])
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
    sk, sv, sy,  # rows of q, k, of v, do and of y, D are so far apart
    T, HV, scale, rest,  # rest: what dS lacks, where the rule adds
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr, IP: tl.constexpr,
    LEARNS: tl.constexpr,  # the gate has a gradient
    TMA: tl.constexpr,  # q, k, y, D, do, dq, dk are descriptors of [B, heads, T, columns], S, dS of their shape, not pointers
):  # fmt: skip
    """One program a (chunk, value head), block of keys by block of keys. All V values at once: BV >= V.

    D (delta) is dv, as the reverse scan left it: U times the first of `shared_strength`. dq may be where y is: y is read first.
    """
    DECAY: tl.constexpr = GATE != "none"
    GRAD: tl.constexpr = DECAY and LEARNS
    TYPE: tl.constexpr = v.dtype.element_ty
    OUT: tl.constexpr = dq.dtype if TMA else dq.dtype.element_ty
    pid = tl.program_id(0)
    i_slot = pid // HV
    i_hv = pid - i_slot * HV
    i_h = i_hv // GROUP
    row, L = chunk_rows(chunks, i_slot.to(tl.int64), T, C, PACKED)
    if L <= 0:
        return
    NC = tl.cdiv(T, C)
    i_b = i_slot // NC
    t = (i_slot - i_b * NC) * C
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
    b_A = b_A.to(TYPE)
    b_At = tl.trans(b_A)  # [j, i]
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
        b_B = b_B.to(TYPE)
        b_Bt = tl.trans(b_B)  # [j, i]
        if not GRAD:
            b_Bt += b_B  # one of them is 0
        b_f *= b_start
    b_start *= scale
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
        if GRAD:
            b_sums += tl.sum(b_q.to(tl.float32) * b_x, 1)
            b_x += b_own[:, None] * b_k.to(tl.float32)
        store_chunk(dq, tl.trans(b_x.to(OUT)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)

        if DELTA:
            b_x = tl.dot(b_D, b_S, input_precision=IP) * -b_f[:, None]
            if GRAD:
                b_x = tl.dot(b_B, b_k, b_x, input_precision=IP)  # R
                b_kr = tl.sum(b_k.to(tl.float32) * b_x, 1)
                b_sums += b_kr + b_kr  # once for R, once against what follows
            b_x = tl.dot(b_Bt, b_k, b_x, input_precision=IP)
            b_x = tl.dot(b_At, b_q, b_x, input_precision=IP)
        else:
            b_x = tl.dot(b_At, b_q, input_precision=IP)
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
        b_dg += b_all * tl.sum(tl.sum(b_through, 1), 0)
        tl.store(dg + o_h, b_dg.to(dg.dtype.element_ty), mask=o_c < L)


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
