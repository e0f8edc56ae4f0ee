"""Gates per key channel that stay in reach: the scores and the gradients of tokens whose decays fit in one factor each.

While no channel has forgotten more than 2^LIMIT since an anchor a, e^(G_i - G_j) = e^(G_i - a) e^(a - G_j) neither overflows nor
loses digits, and a gated chunk is an ungated one of rescaled operands q~ = q e^(G - a), k~ = k e^(a - G).

Scores: a is the chunk's start, so nothing of row i hears of later tokens, rounding included. G only falls: the rows in reach are the
first `near` of a chunk, each decided by the gates up to it; score.py does the rows after them.
Gradients: a is the chunk's middle, for twice the reach. The kernel decides for its whole chunk, notes it in `near` and returns at
once if it is not so; grad_key.py does those chunks.
"""

import triton
import triton.language as tl

from .inverse import invert
from .score import gate_parts, gate_sums, load_sets
from .tile import chunk_rows, load_rows, log2_gate


@triton.jit
def half_sums(b_g, o_c, C: tl.constexpr):
    """Sums of gates [C, BK] over the rows up to the middle and over those after it, log2 units: [BK] each."""
    b_g = log2_gate(b_g)
    b_first = tl.sum(tl.where(o_c[:, None] < C // 2, b_g, 0.0), 0)
    return b_first, tl.sum(b_g, 0) - b_first


@triton.jit
def in_reach(g, row, stride, o_c, L, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LIMIT: tl.constexpr):
    """Whether no channel of the chunk forgets more than 2^LIMIT in a half."""
    near = True
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_first, b_rest = half_sums(load_rows(g, row, stride, o_c, o_k, L, K, BK), o_c, C)
        near = near & (tl.min(tl.minimum(b_first, b_rest), 0) >= -LIMIT)
    return near


@triton.jit(do_not_specialize=["T", "HV"])
def score_bounded_kernel(
    q, e, k, g, beta, chunks,  # as score_kernel
    sets, near,  # near [slots, HV] uint8, written: how many rows are in reach (C: all)
    Tinv, M, qd, kd, kr, decay,
    sk, T, HV, scale,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    DELTA: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr,
    LIMIT: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr, IPT: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head). M and T of rows in reach, the rest of all rows (kr and decay are right where all are in reach)."""
    pid = tl.program_id(0)
    i_slot = (pid // HV).to(tl.int64)
    i_hv = pid % HV
    row, L = chunk_rows(chunks, i_slot, T, C, PACKED)
    if L <= 0:
        return
    TYPE: tl.constexpr = k.dtype.element_ty
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or (g.dtype.element_ty == TYPE)
    o_c = tl.arange(0, C)
    g += i_hv * K
    q += i_hv // GROUP * K
    e += i_hv // GROUP * K
    k += i_hv // GROUP * K
    b_R = load_sets(sets, 2 * LEVELS + 1, o_c, C)
    b_low = tl.zeros([C], tl.float32)  # the least G of each row
    b_qk = tl.zeros([C, C], tl.float32)
    b_ek = tl.zeros([C, C], tl.float32)
    o_h = (row + o_c) * HV + i_hv
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_g = load_rows(g, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
        b_all = tl.sum(log2_gate(b_g), 0)  # [BK] G_C
        b_hi, b_lo = gate_parts(b_g, TYPE)
        b_G = gate_sums(b_R, b_hi, b_lo, EXACT, IPG)  # [C, BK]
        b_low = tl.minimum(b_low, tl.min(b_G, 1))
        b_D, b_I = tl.exp2(b_G), tl.exp2(tl.minimum(-b_G, LIMIT))
        o_out = o_h[:, None] * K + o_k[None, :]
        m_out = (o_c < L)[:, None] & (o_k < K)[None, :]
        b_kx = load_rows(k, row, sk, o_c, o_k, L, K, BK) * b_I
        tl.store(kr + o_out, (b_kx * tl.exp2(b_all)[None, :]).to(TYPE), mask=m_out)
        b_qx = load_rows(q, row, sk, o_c, o_k, L, K, BK) * b_D
        tl.store(qd + o_out, (b_qx * scale).to(TYPE), mask=m_out)
        b_ky = tl.trans(b_kx.to(TYPE))  # [BK, C]
        b_qk = tl.dot(b_qx.to(TYPE), b_ky, b_qk, input_precision=IP)
        if DELTA:
            b_ex = load_rows(e, row, sk, o_c, o_k, L, K, BK) * b_D
            tl.store(kd + o_out, b_ex.to(TYPE), mask=m_out)
            b_ek = tl.dot(b_ex.to(TYPE), b_ky, b_ek, input_precision=IP)
        tl.store(decay + (i_slot * HV + i_hv) * K + o_k, b_all, mask=o_k < K)
    o_out = o_h[:, None] * C + o_c[None, :]
    n = tl.min(tl.where(b_low >= -LIMIT, C, o_c), 0)  # NaN is out of reach
    tl.store(near + i_slot * HV + i_hv, n.to(tl.uint8))
    m_out = (o_c < tl.minimum(n, L))[:, None]
    b_qk = tl.where(o_c[:, None] >= o_c[None, :], b_qk * scale, 0.0)
    tl.store(M + o_out, b_qk.to(M.dtype.element_ty), mask=m_out)
    if DELTA:
        # rows out of reach hold anything; T of the others needs none of them
        b_ek = tl.where((o_c[:, None] > o_c[None, :]) & (o_c < n)[:, None], -b_ek, 0.0)
        if USE_BETA:
            b_ek *= tl.load(beta + o_h, mask=o_c < L, other=0.0).to(tl.float32)[:, None]
        tl.store(Tinv + o_out, invert(b_ek, IPT).to(Tinv.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["T", "HV"])
def grad_bounded_kernel(
    q, e, k, g, beta, do, y, U, chunks,  # as grad_key_kernel
    sets, near, dMqk, dMrw, S, dS,  # near [slots, HV] uint8, written
    dq, de, dk, dg, dbeta,
    sk, sv, sy, T, HV, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    DELTA: tl.constexpr, ERASE: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr,
    LIMIT: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head)."""
    pid = tl.program_id(0)
    i_slot = (pid // HV).to(tl.int64)
    i_hv = pid % HV
    row, L = chunk_rows(chunks, i_slot, T, C, PACKED)
    if L <= 0:
        return
    TYPE: tl.constexpr = k.dtype.element_ty
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or (g.dtype.element_ty == TYPE)
    o_c = tl.arange(0, C)
    g += i_hv * K
    ok = in_reach(g, row, HV * K, o_c, L, K, BK, C, LIMIT)
    tl.store(near + i_slot * HV + i_hv, ok.to(tl.uint8))
    if not ok:
        return
    i_h = i_hv // GROUP
    q += i_h * K
    e += i_h * K
    k += i_h * K
    do += i_hv * V
    y += i_hv * V
    U += i_hv * V
    S += (i_slot * HV + i_hv) * V * K
    dS += (i_slot * HV + i_hv) * V * K
    m_c = o_c < L
    o_h = (row + o_c) * HV + i_hv  # [C]
    dMqk += i_hv * C
    dMrw += i_hv * C
    out = (row * HV + i_hv) * K  # of dq, de, dk, dg
    b_dbeta = tl.zeros([C], tl.float32)
    b_beta = tl.where(m_c, 1.0, 0.0)
    if USE_BETA:
        b_beta = tl.load(beta + o_h, mask=m_c, other=0.0).to(tl.float32)  # [C]
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        o_out = o_c[:, None] * (HV * K) + o_k[None, :]
        m_out = m_c[:, None] & (o_k < K)[None, :]
        b_g = load_rows(g, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
        b_first, b_rest = half_sums(b_g, o_c, C)
        b_hi, b_lo = gate_parts(b_g, TYPE)
        b_E = gate_sums(load_sets(sets, 2 * LEVELS, o_c, C), b_hi, b_lo, EXACT, IPG)  # [C, BK] G - a
        b_before, b_after = tl.exp2(b_first), tl.exp2(b_rest)  # [BK]

        # readers
        b_dq = tl.zeros([C, BK], tl.float32)
        b_dr = tl.zeros([C, BK], tl.float32)
        for i_v in range((V + BV - 1) // BV):
            o_v = i_v * BV + tl.arange(0, BV)
            b_S = load_rows(S, 0, K, o_v, o_k, V, K, BK)  # [BV, BK]
            b_dq = tl.dot(load_rows(do, row, sv, o_c, o_v, L, V, BV), b_S, b_dq, input_precision=IP)
            if DELTA:
                b_dr = tl.dot(load_rows(U, row, HV * V, o_c, o_v, L, V, BV), b_S, b_dr, input_precision=IP)
        b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        b_ky = (b_k * tl.exp2(-b_E)).to(TYPE)
        b_A = load_rows(dMqk, row, HV * C, o_c, o_c, L, C, C)  # [C, C]
        b_dq = tl.dot(b_A, b_ky, b_dq * (b_before * scale)[None, :], input_precision=IP) * tl.exp2(b_E)
        tl.store(dq + out + o_out, b_dq.to(dq.dtype.element_ty), mask=m_out)
        b_z = load_rows(q, row, sk, o_c, o_k, L, K, BK) * b_dq
        if DELTA:
            b_B = load_rows(dMrw, row, HV * C, o_c, o_c, L, C, C)  # [C, C]
            b_dr = tl.dot(b_B, b_ky, b_dr * b_before[None, :], input_precision=IP) * tl.exp2(b_E)
            b_e = b_k
            if ERASE:
                b_e = load_rows(e, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
            b_ed = b_e * b_dr
            b_dbeta -= tl.sum(b_ed, 1)
            b_z -= b_ed * b_beta[:, None]
            b_dr *= -b_beta[:, None]
            if ERASE:
                tl.store(de + out + o_out, b_dr.to(de.dtype.element_ty), mask=m_out)

        # writers
        b_dk = tl.zeros([C, BK], tl.float32)
        b_through = tl.zeros([BK], tl.float32)  # S dS
        for i_v in range((V + BV - 1) // BV):
            o_v = i_v * BV + tl.arange(0, BV)
            b_dS = load_rows(dS, 0, K, o_v, o_k, V, K, BK)  # [BV, BK]
            b_dk = tl.dot(load_rows(y, row, sy, o_c, o_v, L, V, BV), b_dS, b_dk, input_precision=IP)
            b_through += tl.sum(load_rows(S, 0, K, o_v, o_k, V, K, BK).to(tl.float32) * b_dS.to(tl.float32), 0)
        b_dk *= b_after[None, :]
        # with k dk of the state at the chunk's end
        b_dg = b_through * (b_before * b_after) + tl.sum(b_k * tl.exp2(-b_E) * b_dk, 0)  # [BK]
        b_qx = (load_rows(q, row, sk, o_c, o_k, L, K, BK) * tl.exp2(b_E)).to(TYPE)
        b_dk = tl.dot(tl.trans(load_rows(dMqk, row, HV * C, o_c, o_c, L, C, C)), b_qx, b_dk, input_precision=IP)
        if DELTA:
            b_e = b_k
            if ERASE:
                b_e = load_rows(e, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
            b_rx = (b_e * -b_beta[:, None] * tl.exp2(b_E)).to(TYPE)
            b_dk = tl.dot(tl.trans(load_rows(dMrw, row, HV * C, o_c, o_c, L, C, C)), b_rx, b_dk, input_precision=IP)
        b_dk *= tl.exp2(-b_E)
        b_z -= b_k * b_dk  # x dx of readers less y dy of writers: what is left of it from t on decays across t
        if DELTA and not ERASE:
            b_dk += b_dr
        tl.store(dk + out + o_out, b_dk.to(dk.dtype.element_ty), mask=m_out)
        b_R = tl.trans(load_sets(sets, 2 * LEVELS + 1, o_c, C))
        b_hi = b_z.to(TYPE)
        b_dgs = tl.dot(b_R, b_hi, input_precision=IPG)
        if TYPE != tl.float32:  # terms of both signs
            b_dgs = tl.dot(b_R, (b_z - b_hi.to(tl.float32)).to(TYPE), b_dgs, input_precision=IPG)
        tl.store(dg + out + o_out, (b_dgs + b_dg[None, :]).to(dg.dtype.element_ty), mask=m_out)
    if USE_BETA:  # dbeta holds U.v
        tl.store(dbeta + o_h, tl.load(dbeta + o_h, mask=m_c, other=0.0) + b_dbeta, mask=m_c)
