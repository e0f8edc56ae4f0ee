"""Stage `affine`: what a chunk makes of the state it meets, whatever its readers and writers do inside it (dplr; and q that reads early).

    o = q~ S + M v;   S <- e^(G_C) S + b' (w~ S) + k~' v

    T = (I - M_rw)^-1;  A = T M_rk;  M = M_qk + M_qw A                  (w: the rule's b, which writes what r, the rule's a, has read)
    w~ = T (r e^G_);  q~ = q e^G + M_qw w~;  b = w e^(G_C - G);  k~ = k e^(G_C - G) + A' b

A reader that reads before its own token forgets has G_ = G - g in G's place and meets only tokens before it: r always, q with a bonus.
Scores as in score.py and bounded.py: from the chunk's start where no channel has forgotten more than 2^LIMIT up to a row, else by halves;
each row is decided by the gates up to it, so it hears nothing of later tokens, rounding included. A chunk that has rows of the second
kind is left to a second launch, with FAR: what they need would cost the first one its registers.
"""

import triton
import triton.language as tl

from .inverse import invert
from .score import gate_parts, gate_sums, load_sets, meets
from .tile import RCP_LN2, chunk_rows, load_rows, log2_gate


@triton.jit
def early(b_G, b_hi, b_lo, sets, o_c, C: tl.constexpr, EXACT: tl.constexpr, IPG: tl.constexpr):
    """G - g [C, BK], log2 units: sums of their own in fp32, so that no gate is added only to be subtracted."""
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    if b_hi.dtype == tl.float32:
        b_E = gate_sums(load_sets(sets, 3 * LEVELS + 3, o_c, C), b_hi, b_lo, EXACT, IPG)
    elif EXACT:
        b_E = tl.minimum(b_G - b_hi.to(tl.float32) * RCP_LN2, 0.0)
    else:
        b_E = tl.minimum(b_G - (b_hi.to(tl.float32) + b_lo.to(tl.float32)) * RCP_LN2, 0.0)
    return b_E


@triton.jit(do_not_specialize=["T", "HV"])
def affine_kernel(
    q, k, a, b, g, u, chunks,  # q, k: token rows; a, b: token rows; g [B*T, HV, K]; u [HV, K]
    sets, near,  # sets as in score.py, and those of readers before their token forgets behind them; near [slots, HV] uint8: not for FAR
    M, qm, wm, km, bm, decay,  # M [B*T, HV, C]; q~, w~, k~, b [B*T, HV, K]; decay [slots, HV, K]
    Tinv, A, Mqw,  # [B*T, HV, C], written with KEEP
    sk, sa, T, HV, scale,  # rows of q and k, of a and b are so far apart
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, GROUP_A: tl.constexpr,  # value heads that share q and k; a and b
    GATED: tl.constexpr, LOW_RANK: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr, KEEP: tl.constexpr, FAR: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: by halves only
    IP: tl.constexpr, IPG: tl.constexpr, IPT: tl.constexpr,  # of products; of sums of gates; of the fp32 products that make T
):  # fmt: skip
    """One program a (chunk, value head)."""
    pid = tl.program_id(0)
    i_slot = (pid // HV).to(tl.int64)
    i_hv = pid % HV
    row, L = chunk_rows(chunks, i_slot, T, C, PACKED)
    if L <= 0:
        return
    if FAR and LIMIT > 0:
        if tl.load(near + i_slot * HV + i_hv) != 0:
            return
    TYPE: tl.constexpr = k.dtype.element_ty
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or (g.dtype.element_ty == TYPE)
    o_c = tl.arange(0, C)
    i, j = o_c[:, None], o_c[None, :]
    q += i_hv // GROUP * K
    k += i_hv // GROUP * K
    a += i_hv // GROUP_A * K
    b += i_hv // GROUP_A * K
    g += i_hv * K
    o_h = (row + o_c) * HV + i_hv  # [C]
    b_qk = tl.zeros([C, C], tl.float32)
    b_qw = tl.zeros([C, C], tl.float32)
    b_rk = tl.zeros([C, C], tl.float32)
    b_rw = tl.zeros([C, C], tl.float32)
    n = 0  # rows in reach
    if LIMIT > 0 or not GATED:
        b_low = tl.zeros([C], tl.float32)  # the least G of each row
        for i_k in range((K + BK - 1) // BK):
            o_k = i_k * BK + tl.arange(0, BK)
            b_q = load_rows(q, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
            b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
            if LOW_RANK:
                b_r = load_rows(a, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
                b_w = load_rows(b, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
            if GATED:
                b_hi, b_lo = gate_parts(load_rows(g, row, HV * K, o_c, o_k, L, K, BK), TYPE)
                b_G = gate_sums(load_sets(sets, 2 * LEVELS + 1, o_c, C), b_hi, b_lo, EXACT, IPG)  # [C, BK]
                b_low = tl.minimum(b_low, tl.min(b_G, 1))
                b_D = tl.exp2(early(b_G, b_hi, b_lo, sets, o_c, C, EXACT, IPG))
                b_I = tl.exp2(tl.minimum(-b_G, LIMIT))
                b_q = (b_q * (b_D if BONUS else tl.exp2(b_G))).to(TYPE)
                b_k = (b_k * b_I).to(TYPE)
                if LOW_RANK:
                    b_r = (b_r * b_D).to(TYPE)
                    b_w = (b_w * b_I).to(TYPE)
            b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=IP)
            if LOW_RANK:
                b_rk = tl.dot(b_r, tl.trans(b_k), b_rk, input_precision=IP)
                b_qw = tl.dot(b_q, tl.trans(b_w), b_qw, input_precision=IP)
                b_rw = tl.dot(b_r, tl.trans(b_w), b_rw, input_precision=IP)
        if GATED:
            n = tl.min(tl.where(b_low >= -LIMIT, C, o_c), 0)  # NaN is out of reach
            if not FAR:
                tl.store(near + i_slot * HV + i_hv, (n >= L).to(tl.uint8))
                if n < L:
                    return
    if FAR:
        m_near = (o_c < n)[:, None]
        b_qk = tl.where(m_near, b_qk, 0.0)
        if LOW_RANK:
            b_qw = tl.where(m_near, b_qw, 0.0)
            b_rk = tl.where(m_near, b_rk, 0.0)
            b_rw = tl.where(m_near, b_rw, 0.0)
        b_dk = tl.zeros([C], tl.float32)
        b_dw = tl.zeros([C], tl.float32)
        for i_k in range(tl.cdiv(K, BK)):
            o_k = i_k * BK + tl.arange(0, BK)
            b_q = load_rows(q, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
            b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
            b_dk += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
            if LOW_RANK:
                b_r = load_rows(a, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
                b_w = load_rows(b, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
                b_dw += tl.sum(b_q.to(tl.float32) * b_w.to(tl.float32), 1)
            b_hi, b_lo = gate_parts(load_rows(g, row, HV * K, o_c, o_k, L, K, BK), TYPE)
            for level in range(LEVELS):
                o_row, o_col = meets(o_c, level)
                m = (o_row[:, None] == o_col[None, :]) & (o_c >= n)[:, None]
                b_D = tl.exp2(gate_sums(load_sets(sets, level, o_c, C), b_hi, b_lo, EXACT, IPG))  # [C, BK]
                b_B = b_D
                if LOW_RANK or BONUS:
                    b_B = tl.exp2(gate_sums(load_sets(sets, 2 * LEVELS + 3 + level, o_c, C), b_hi, b_lo, EXACT, IPG))
                b_qx = (b_q * (b_B if BONUS else b_D)).to(TYPE)
                b_y = tl.trans((b_k * b_D).to(TYPE))  # [BK, C]
                b_qk += tl.where(m, tl.dot(b_qx, b_y, input_precision=IP), 0.0)
                if LOW_RANK:
                    b_rx = (b_r * b_B).to(TYPE)
                    b_rk += tl.where(m, tl.dot(b_rx, b_y, input_precision=IP), 0.0)
                    b_y = tl.trans((b_w * b_D).to(TYPE))  # [BK, C]
                    b_qw += tl.where(m, tl.dot(b_qx, b_y, input_precision=IP), 0.0)
                    b_rw += tl.where(m, tl.dot(b_rx, b_y, input_precision=IP), 0.0)
        m = (i == j) & (o_c >= n)[:, None]
        b_qk = tl.where(m, b_dk[:, None], b_qk)
        if LOW_RANK:
            b_qw = tl.where(m, b_dw[:, None], b_qw)

    o_M = o_h[:, None] * C + j
    m_M = (o_c < L)[:, None]
    b_qk = tl.where((i > j) if BONUS else (i >= j), b_qk * scale, 0.0)
    if LOW_RANK:
        b_qw = tl.where(i >= j, b_qw * scale, 0.0).to(TYPE)
        b_rk = tl.where(i > j, b_rk, 0.0).to(TYPE)
        b_T = invert(tl.where(i > j, b_rw, 0.0), IPT).to(TYPE)  # [C, C]
        b_A = tl.dot(b_T, b_rk, input_precision=IP).to(TYPE)  # [C, C]
        b_qk = tl.dot(b_qw, b_A, b_qk, input_precision=IP)
        if KEEP:
            tl.store(Tinv + o_M, b_T, mask=m_M)
            tl.store(A + o_M, b_A, mask=m_M)
            tl.store(Mqw + o_M, b_qw, mask=m_M)
    if BONUS:
        b_met = tl.zeros([C], tl.float32)  # the bonus on a token's own pair
        for i_k in range((K + BK - 1) // BK):
            o_k = i_k * BK + tl.arange(0, BK)
            b_u = tl.load(u + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)  # [BK]
            b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK).to(tl.float32)  # [C, BK]
            b_met += tl.sum(load_rows(q, row, sk, o_c, o_k, L, K, BK) * b_k * b_u[None, :], 1)
        b_qk = tl.where(i == j, b_met[:, None] * scale, b_qk)
    tl.store(M + o_M, b_qk.to(TYPE), mask=m_M)
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        o_out = o_h[:, None] * K + o_k[None, :]
        m_out = (o_c < L)[:, None] & (o_k < K)[None, :]
        b_D = tl.full([C, BK], 1.0, tl.float32)
        b_E = b_D
        b_B = b_D
        b_all = tl.zeros([BK], tl.float32)
        if GATED:
            b_g = load_rows(g, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
            b_all = tl.sum(log2_gate(b_g), 0)
            b_hi, b_lo = gate_parts(b_g, TYPE)
            b_D = gate_sums(load_sets(sets, 2 * LEVELS + 1, o_c, C), b_hi, b_lo, EXACT, IPG)  # [C, BK]
            b_B = tl.exp2(early(b_D, b_hi, b_lo, sets, o_c, C, EXACT, IPG))
            b_D = tl.exp2(b_D)
            b_E = tl.exp2(gate_sums(load_sets(sets, 2 * LEVELS + 2, o_c, C), b_hi, b_lo, EXACT, IPG))
        tl.store(decay + (i_slot * HV + i_hv) * K + o_k, b_all, mask=o_k < K)
        b_q = load_rows(q, row, sk, o_c, o_k, L, K, BK) * (b_B if BONUS else b_D) * scale  # [C, BK]
        b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK) * b_E  # [C, BK]
        if LOW_RANK:
            b_w = (load_rows(b, row, sa, o_c, o_k, L, K, BK) * b_E).to(TYPE)  # [C, BK]
            tl.store(bm + o_out, b_w, mask=m_out)
            # transposed: a computed matrix must not be a transposed left operand (Triton 3.6.0)
            b_y = tl.dot(tl.trans(b_w), b_A, tl.trans(b_k), input_precision=IP)  # [BK, C]
            o_t = o_h[None, :] * K + o_k[:, None]
            tl.store(km + o_t, b_y.to(TYPE), mask=(o_c < L)[None, :] & (o_k < K)[:, None])
            b_r = (load_rows(a, row, sa, o_c, o_k, L, K, BK) * b_B).to(TYPE)  # [C, BK]
            b_r = tl.dot(b_T, b_r, input_precision=IP).to(TYPE)
            tl.store(wm + o_out, b_r, mask=m_out)
            b_q = tl.dot(b_qw, b_r, b_q, input_precision=IP)
        else:
            tl.store(km + o_out, b_k.to(TYPE), mask=m_out)
        tl.store(qm + o_out, b_q.to(TYPE), mask=m_out)
