"""Stage `grads` with values in blocks, for what grad.py does not hold at once: fp32, wide values, an erase key of its own, older cards.

Formulas and names as in grad.py.
"""

import triton
import triton.language as tl

from .score import add_sums, fitting
from .tile import chunk_place, decay_sums, early_sums, load_gate, load_rows, pair_decay, start, whole


@triton.jit
def products(x, y, row, sx, sy, o_c, L, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, IP: tl.constexpr):
    """x y' of a chunk's rows of D columns: [C, C] fp32."""
    b_M = tl.zeros([C, C], tl.float32)
    for i_d in range((D + BD - 1) // BD):
        o_d = i_d * BD + tl.arange(0, BD)
        b_x = load_rows(x, row, sx, o_c, o_d, L, D, BD)  # [C, BD]
        b_M = tl.dot(b_x, tl.trans(load_rows(y, row, sy, o_c, o_d, L, D, BD)), b_M, input_precision=IP)
    return b_M


@triton.jit(do_not_specialize=["T", "HV"])
def grad_blocks_kernel(
    q, e, k, v, g, beta, do, chunks,  # q, e, k, v, do: token rows; g [HV] | [B*T, HV]; beta [B*T, HV]
    X, U, S, dS,  # X, U [B*T, HV, V]; S, dS [slots, HV, V, K]
    dq, de, dk, dv, dg, dbeta,  # dq, de, dk [B*T, HV, K]; dv (delta) [B*T, HV, V]; dg, dbeta [B*T, HV]
    sk, sv,  # rows of q, e, k and of v, do are so far apart
    T, HV, scale, rest,  # rest: what dS lacks, where the rule adds
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, ERASE: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr,
    BEFORE: tl.constexpr,  # e reads before its token forgets
    LEARNS: tl.constexpr,  # the gate has a gradient
    SPLIT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head)."""
    DECAY: tl.constexpr = GATE != "none"
    TYPE: tl.constexpr = k.dtype.element_ty
    FIT: tl.constexpr = TYPE == tl.float16  # whose range gradients of pairs may leave
    _, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED)
    if L <= 0:
        return
    i_h = i_hv // GROUP
    q += i_h * K
    e += i_h * K
    k += i_h * K
    v += i_hv * V
    do += i_hv * V
    X += i_hv * V
    U += i_hv * V
    S += (i_slot * HV + i_hv) * V * K
    dS += (i_slot * HV + i_hv) * V * K
    o_c = tl.arange(0, C)
    m_c = o_c < L
    i, j = o_c[:, None], o_c[None, :]
    o_h = (row + o_c) * HV + i_hv  # [C]
    if USE_BETA:
        b_beta = tl.load(beta + o_h, mask=m_c, other=0.0).to(tl.float32)  # [C]
    else:
        b_beta = tl.where(m_c, 1.0, 0.0)
    b_g = load_gate(g, row, HV, i_hv, o_c, L, GATE)
    b_G, b_F = decay_sums(b_g, o_c, L, GATE, SPLIT)  # [C]
    b_Ge, b_Fe = b_G, b_F  # of e
    if BEFORE and DECAY:
        b_Ge, b_Fe = early_sums(b_G, b_F, b_g, GATE, SPLIT)
    b_all, b_end = whole(b_G, b_F, o_c, C, SPLIT)
    b_start = start(b_G, b_F, SPLIT)
    if not DELTA:
        b_all *= rest
        b_end *= rest

    # q: dM_qk by rows; the state's share of the gate's gradient
    b_reads = tl.zeros([C], tl.float32)  # x dx of readers of the state, over channels
    b_ends = tl.zeros([C], tl.float32)  # y dy of writers into the state
    b_early = tl.zeros([C], tl.float32)  # x dx of e
    b_through = tl.zeros([BK], tl.float32)  # S dS
    if DECAY:
        b_low = pair_decay(b_G[:, None], b_F[:, None], b_G[None, :], b_F[None, :], i >= j, SPLIT)
    else:
        b_low = tl.where(i >= j, 1.0, 0.0)
    if DELTA:
        b_A = products(do, X, row, sv, HV * V, o_c, L, V, BV, C, IP) * (b_low * scale)
        if BEFORE and DECAY:
            b_low = pair_decay(b_Ge[:, None], b_Fe[:, None], b_G[None, :], b_F[None, :], i > j, SPLIT)
        b_B = tl.where(i == j, 0.0, products(U, X, row, HV * V, HV * V, o_c, L, V, BV, C, IP) * b_low)
    else:
        b_A = products(do, v, row, sv, sv, o_c, L, V, BV, C, IP) * (b_low * scale)
    if FIT:  # strengths are at most 2
        fit, back = fitting(2.0 * (tl.maximum(tl.abs(b_A), tl.abs(b_B)) if DELTA else tl.abs(b_A)))
        b_A *= fit
        if DELTA:
            b_B *= fit
    b_A = b_A.to(TYPE)
    if DELTA:
        b_B = b_B.to(TYPE)
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_dq = tl.zeros([C, BK], tl.float32)
        for i_v in range((V + BV - 1) // BV):
            o_v = i_v * BV + tl.arange(0, BV)
            b_S = load_rows(S, 0, K, o_v, o_k, V, K, BK)  # [BV, BK]
            b_dq = tl.dot(load_rows(do, row, sv, o_c, o_v, L, V, BV), b_S, b_dq, input_precision=IP)
            if DECAY:
                b_through += tl.sum(b_S.to(tl.float32) * load_rows(dS, 0, K, o_v, o_k, V, K, BK).to(tl.float32), 0)
        b_dq *= (b_start * scale)[:, None]
        if DECAY:
            b_reads += tl.sum(load_rows(q, row, sk, o_c, o_k, L, K, BK) * b_dq, 1)
        if FIT:
            b_dq *= fit
        b_dq = tl.dot(b_A, load_rows(k, row, sk, o_c, o_k, L, K, BK), b_dq, input_precision=IP)
        if FIT:
            b_dq *= back
        m_out = m_c[:, None] & (o_k < K)[None, :]
        tl.store(dq + o_h[:, None] * K + o_k[None, :], b_dq.to(dq.dtype.element_ty), mask=m_out)

    # dM transposed (rows: the writer's tokens j, columns: the reader's i), and what decays between two tokens
    if DECAY:
        b_up = pair_decay(b_G[None, :], b_F[None, :], b_G[:, None], b_F[:, None], i <= j, SPLIT)
    else:
        b_up = tl.where(i <= j, 1.0, 0.0)
    if DELTA:
        b_At = products(X, do, row, HV * V, sv, o_c, L, V, BV, C, IP) * (b_up * scale)
    else:
        b_At = products(v, do, row, sv, sv, o_c, L, V, BV, C, IP) * (b_up * scale)
    b_z = b_At
    if DECAY:
        b_z = b_At * products(k, q, row, sk, sk, o_c, L, K, BK, C, IP)
    if FIT:
        b_At *= fit
    b_At = b_At.to(TYPE)
    b_zr = b_z  # of e, where it decays apart
    if DELTA:
        if BEFORE and DECAY:
            b_up = pair_decay(b_Ge[None, :], b_Fe[None, :], b_G[:, None], b_F[:, None], i < j, SPLIT)
        b_Bt = products(X, U, row, HV * V, HV * V, o_c, L, V, BV, C, IP) * tl.where(i == j, 0.0, b_up * -b_beta[None, :])
        if DECAY:
            b_zr = b_Bt * products(k, e, row, sk, sk, o_c, L, K, BK, C, IP)
            if not BEFORE:
                b_z += b_zr
        if FIT:
            b_Bt *= fit
        b_Bt = b_Bt.to(TYPE)
    b_dg = tl.zeros([C], tl.float32)
    if DECAY:
        b_z = add_sums((i >= j).to(tl.float32).to(TYPE), b_z, None, TYPE, True, False, IP)  # [j, t] summed over i >= t
        if BEFORE:
            b_z = add_sums((i > j).to(tl.float32).to(TYPE), b_zr, b_z, TYPE, True, False, IP)  # and over i > t
        b_dg = tl.sum(tl.where(i < j, b_z, 0.0), 0)

    # values
    if DELTA:
        b_dbeta = tl.zeros([C], tl.float32)
        for i_v in range((V + BV - 1) // BV):
            o_v = i_v * BV + tl.arange(0, BV)
            b_u = load_rows(U, row, HV * V, o_c, o_v, L, V, BV).to(tl.float32)  # [C, BV]
            if USE_BETA:
                b_dbeta += tl.sum(b_u * load_rows(v, row, sv, o_c, o_v, L, V, BV).to(tl.float32), 1)
            m_v = m_c[:, None] & (o_v < V)[None, :]
            tl.store(dv + o_h[:, None] * V + o_v[None, :], (b_u * b_beta[:, None]).to(dv.dtype.element_ty), mask=m_v)

    # k and r
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_dk = tl.zeros([C, BK], tl.float32)
        b_dr = tl.zeros([C, BK], tl.float32)
        for i_v in range((V + BV - 1) // BV):
            o_v = i_v * BV + tl.arange(0, BV)
            b_dS = load_rows(dS, 0, K, o_v, o_k, V, K, BK)  # [BV, BK]
            if DELTA:
                b_S = load_rows(S, 0, K, o_v, o_k, V, K, BK)  # [BV, BK]
                b_dr = tl.dot(load_rows(U, row, HV * V, o_c, o_v, L, V, BV), b_S, b_dr, input_precision=IP)
                b_dk = tl.dot(load_rows(X, row, HV * V, o_c, o_v, L, V, BV), b_dS, b_dk, input_precision=IP)
            else:
                b_dk = tl.dot(load_rows(v, row, sv, o_c, o_v, L, V, BV), b_dS, b_dk, input_precision=IP)
        b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        o_out = o_h[:, None] * K + o_k[None, :]
        m_out = m_c[:, None] & (o_k < K)[None, :]
        b_dk *= b_end[:, None]
        if DECAY:
            b_ends += tl.sum(b_k * b_dk, 1)
        if FIT:
            b_dk *= fit
        b_dk = tl.dot(b_At, load_rows(q, row, sk, o_c, o_k, L, K, BK), b_dk, input_precision=IP)
        if DELTA:
            b_e = b_k
            if ERASE:
                b_e = load_rows(e, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
            b_dk = tl.dot(b_Bt, b_e, b_dk, input_precision=IP)
        if FIT:
            b_dk *= back
        if DELTA:
            b_dr *= start(b_Ge, b_Fe, SPLIT)[:, None]
            if DECAY and BEFORE:
                b_early -= b_beta * tl.sum(b_e * b_dr, 1)
            elif DECAY:
                b_reads -= b_beta * tl.sum(b_e * b_dr, 1)
            if FIT:
                b_dr *= fit
            b_dr = tl.dot(b_B, b_k, b_dr, input_precision=IP)
            if FIT:
                b_dr *= back
            b_dbeta -= tl.sum(b_e * b_dr, 1)
            b_dr *= -b_beta[:, None]
            if ERASE:
                tl.store(de + o_out, b_dr.to(de.dtype.element_ty), mask=m_out)
            else:
                b_dk += b_dr
        tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=m_out)

    if DELTA and USE_BETA:
        tl.store(dbeta + o_h, b_dbeta.to(dbeta.dtype.element_ty), mask=m_c)
    if DECAY and LEARNS:
        b_dg += tl.sum(tl.where(i >= j, b_reads[:, None], b_ends[:, None]), 0) + b_all * tl.sum(b_through, 0)
        if BEFORE:
            b_dg += tl.sum(tl.where(i > j, b_early[:, None], 0.0), 0)
        tl.store(dg + o_h, b_dg.to(dg.dtype.element_ty), mask=m_c)
