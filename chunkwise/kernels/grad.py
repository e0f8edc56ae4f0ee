"""Stage `grads`: all gradients of a chunk, chunk-parallel, each written once. What does not fit: grad_blocks.py; gates per key: grad_key.py

Readers are q (of o's gradient) and, for the delta rule, r = -beta k (of U); writers are k with v, or k with X. With y = v | X,
A = dM_qk = scale do y' e^(G_i - G_j) for j <= i and B = dM_rw = -beta U X' e^(G_i - G_j) for j < i, inside the chunk:

    dq = scale e^G (do S') + A k
    dk = e^(G_C - G) (y dS') + A' q        delta: + B' k, and r's gradient times -beta: -beta e^G (U S') + B k
    add    dv is made by the reverse scan
    delta  dv = beta U,  dbeta = U.v - (what r's gradient has along k)
    dg_t = the sum of all x dx that decay across token t: nothing is added only to be subtracted again

What is per token lies along rows throughout, so that it takes few registers; A and B stay in registers, as left operands.
"""

import triton
import triton.language as tl

from .state_pass import load_strength
from .tile import chunk_rows, decay_sums, load_chunk, load_gate, load_rows, mask2, pair_decay, start, store_chunk, whole


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
def decay_of_pairs(b_G, o_c, last, LOWER: tl.constexpr, DECAY: tl.constexpr):
    """e^(G_i - G_j) where j <= i, else 0: [i, j], or not LOWER [j, i]. last: any row from the last valid one on.

    The mask hangs on it, and so on the chunk: it is not moved out of loops, into registers. Other rows make other masks, not kept either.
    """
    o_l = tl.minimum(o_c, last)
    if LOWER:
        m = o_c[None, :] <= o_l[:, None]
    else:
        m = o_c[:, None] <= o_l[None, :]
    if DECAY and LOWER:
        b_d = pair_decay(b_G[:, None], b_G[:, None], b_G[None, :], b_G[None, :], m, False)
    elif DECAY:
        b_d = pair_decay(b_G[None, :], b_G[None, :], b_G[:, None], b_G[:, None], m, False)
    else:
        b_d = tl.where(m, 1.0, 0.0)
    return b_d


@triton.jit
def across(b_z, o_c):
    """[C, C] of pairs (writer j, reader i >= j) -> [C]: for every token t the sum over j < t <= i."""
    b_z = tl.cumsum(b_z, 1, reverse=True)  # [j, t] summed over i >= t
    return tl.sum(tl.where(o_c[:, None] < o_c[None, :], b_z, 0.0), 0)


@triton.jit(do_not_specialize=["T", "HV"])
def grad_kernel(
    q, k, v, y, U, do, S, dS, g, beta, chunks,  # q, k, v, do: token rows; y (v or X), U: [B*T, HV, V]; g [HV] | [B*T, HV]; beta [B*T, HV]
    dq, dk, dv, dg, dbeta,  # dq, dk [B*T, HV, K]; dv (delta) [B*T, HV, V]; dg, dbeta [B*T, HV]; S, dS [slots, HV, V, K]
    U_rows,  # U again, never as a descriptor
    sk, sv, sy,  # rows of q, k, of v, do and of y, U are so far apart
    T, HV, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr, IP: tl.constexpr,
    TMA: tl.constexpr,  # q, k, y, U, do, dq, dk are descriptors of [B, heads, T, columns], S, dS of their shape, not pointers
):  # fmt: skip
    """One program a (chunk, value head), block of keys by block of keys. All V values at once: BV >= V."""
    DECAY: tl.constexpr = GATE != "none"
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
    o_h = (row + o_c) * HV + i_hv  # [C]
    b_g = load_gate(g, row, HV, i_hv, o_c, L, GATE)
    b_beta = load_strength(beta, row, HV, i_hv, o_c, L, USE_BETA).to(tl.float32)  # [C]
    b_do = load_chunk(do, row, sv, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]
    b_y = load_chunk(y, row, sy, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]
    if DELTA:
        b_U = load_chunk(U, row, sy, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]

    b_G, b_F = decay_sums(b_g, o_c, L, GATE, False)  # [C]
    b_all, b_end = whole(b_G, b_F, o_c, C, False)
    b_start = start(b_G, b_F, False)
    b_A = tl.dot(b_do, tl.trans(b_y), input_precision=IP) * (decay_of_pairs(b_G, o_c, L - 1, True, DECAY) * scale)  # [i, j]
    b_A = b_A.to(TYPE)
    b_up = decay_of_pairs(b_G, o_c, L - 1, False, DECAY)  # [j, i]
    b_At = (tl.dot(b_y, tl.trans(b_do), input_precision=IP) * (b_up * scale)).to(TYPE)  # [j, i]
    if DELTA:
        b_W = tl.dot(b_y, tl.trans(b_U), input_precision=IP) * (b_up * -b_beta[None, :])  # B' in its upper half
        b_X = tl.dot(b_U, tl.trans(b_y), input_precision=IP) * (decay_of_pairs(b_G, o_c, L - 1, True, DECAY) * -b_beta[:, None])
        b_W = tl.where(o_c[:, None] == o_c[None, :], 0.0, b_W + b_X).to(TYPE)  # B + B': what k gets from k
        b_dbeta = tl.zeros([C], tl.float32)
    b_reads = tl.zeros([C], tl.float32)  # x dx of readers of the state, over channels
    b_ends = tl.zeros([C], tl.float32)  # y dy of writers into the state
    b_through = 0.0  # S dS
    for i_k in range((K + BK - 1) // BK):
        b_q = load_chunk(q, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
        b_k = load_chunk(k, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
        b_S = load_state(S, i_slot, i_hv, HV, 0, i_k, K, V, BK, BV, TMA)  # [BV, BK]
        b_dS = load_state(dS, i_slot, i_hv, HV, 0, i_k, K, V, BK, BV, TMA)  # [BV, BK]
        if DECAY:
            b_through += tl.sum(tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 1), 0)
        b_x = tl.dot(b_do, b_S, input_precision=IP)  # dq [C, BK]
        if DECAY:
            b_x *= (b_start * scale)[:, None]
            b_reads += tl.sum(b_q.to(tl.float32) * b_x, 1)
        else:
            b_x *= scale
        b_x = tl.dot(b_A, b_k, b_x, input_precision=IP)
        store_chunk(dq, tl.trans(b_x.to(OUT)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)

        b_x = tl.dot(b_y, b_dS, input_precision=IP)  # dk [C, BK]
        if DECAY:
            b_x *= b_end[:, None]
            b_ends += tl.sum(b_k.to(tl.float32) * b_x, 1)
        if DELTA:
            b_r = tl.dot(b_U, b_S, input_precision=IP)  # r's gradient from the state, [C, BK]
            if DECAY:
                b_r *= b_start[:, None]
            b_kr = tl.sum(b_k.to(tl.float32) * b_r, 1)  # [C]
            b_dbeta -= b_kr
            if DECAY:
                b_reads -= b_beta * b_kr
            b_x -= b_r * b_beta[:, None]
            b_x = tl.dot(b_W, b_k, b_x, input_precision=IP)
        b_x = tl.dot(b_At, b_q, b_x, input_precision=IP)
        store_chunk(dk, tl.trans(b_x.to(OUT)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)

    # Pairs of tokens once more, over all keys: made again, q and k from the cache, rather than kept in registers through the loop.
    if DECAY:
        b_G, b_F = decay_sums(load_gate(g, row, HV, i_hv, o_c, L, GATE), o_c, L, GATE, False)  # [C]
        b_kq = tl.zeros([C, C], tl.float32)
    if DECAY or DELTA:
        b_kk = tl.zeros([C, C], tl.float32)
        for i_k in range((K + BK - 1) // BK):
            b_k = load_chunk(k, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
            if DECAY:
                b_q = load_chunk(q, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
                b_kq = tl.dot(b_k, tl.trans(b_q), b_kq, input_precision=IP)  # [j, i]
            if DELTA:
                b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=IP)
    if DECAY:
        b_z = b_At.to(tl.float32) * b_kq  # [j, i]
    if DELTA:
        b_up = tl.where(o_c[:, None] < o_c[None, :], decay_of_pairs(b_G, o_c, L, False, DECAY), 0.0)  # [j, i]
        b_kk *= b_up * tl.dot(b_y, tl.trans(b_U), input_precision=IP)
        if DECAY:
            b_z -= b_kk * b_beta[None, :]
        b_u = load_rows(U_rows + i_hv * V, row, HV * V, o_c, o_v, L, V, BV).to(tl.float32)  # [C, BV]
        if USE_BETA:
            b_dbeta += tl.sum(b_u * load_rows(v + i_hv * V, row, sv, o_c, o_v, L, V, BV).to(tl.float32), 1)
            tl.store(dbeta + o_h, (b_dbeta - tl.sum(b_kk, 0)).to(dbeta.dtype.element_ty), mask=o_c < L)
        o_out = o_c[:, None] * (HV * V) + o_v[None, :]
        m_out = mask2(o_c < L, o_v, V, BV)
        tl.store(dv + (row * HV + i_hv) * V + o_out, (b_u * b_beta[:, None]).to(TYPE), mask=m_out)
    if DECAY:
        b_dg = across(b_z, o_c) + tl.sum(tl.where(o_c[:, None] >= o_c[None, :], b_reads[:, None], b_ends[:, None]), 0)
        tl.store(dg + o_h, (b_dg + b_all * b_through).to(dg.dtype.element_ty), mask=o_c < L)
