"""Stage `grads` for gates per key channel: the formulas of grad.py, with decays inside the products.

The pairs of a chunk meet level by level as in score.py. In each, x~ = x e^(sum of its gates), so the gate's gradient is the sum,
over the same sets of tokens, of x~ dx~: nothing is added only to be subtracted again, except around the middle of a block
whose pairs all meet at once. A pair i = j does not decay and is kept apart.

Everything of a block of channels is held transposed, [BK, C]: then dM serves as itself and transposed from one copy in shared memory.
"""

import triton
import triton.language as tl

from .score import block_level, gate_parts, load_sets, meets
from .tile import RCP_LN2, chunk_rows, load_rows, log2_gate


@triton.jit
def sums(b_hi, b_lo, b_R, EXACT: tl.constexpr, IP: tl.constexpr):
    """Sums of gates [BK, C] over the sets in R's rows, in log2 units: [BK, C]."""
    b_E = tl.dot(b_hi, tl.trans(b_R), input_precision=IP)
    if not EXACT:
        b_E = tl.dot(b_lo, tl.trans(b_R), b_E, input_precision=IP)
    return b_E * RCP_LN2


@triton.jit
def met_grads(
    b_A, b_B, m,  # [C, C] dM_qk, dM_rw, the pairs that meet
    b_qx, b_rx, b_ky, b_row, b_col, SIGN: tl.constexpr,  # [BK, C] q, r decayed by row, k by col; SIGN: of the gates in col
    b_dq, b_dr, b_dk,  # [BK, C] to add to
    DELTA: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of pairs that meet to dq, dr, dk; and the gradient of the decays' exponent, [BK, C]."""
    TYPE: tl.constexpr = b_ky.dtype
    b_M = tl.where(m, b_A, 0.0).to(TYPE)
    b_dx = tl.dot(b_ky, tl.trans(b_M), input_precision=IP)
    b_dq += b_row * b_dx
    b_z = b_qx * b_dx
    b_dy = tl.dot(b_qx, b_M, input_precision=IP)
    if DELTA:
        b_M = tl.where(m, b_B, 0.0).to(TYPE)
        b_dx = tl.dot(b_ky, tl.trans(b_M), input_precision=IP)
        b_dr += b_row * b_dx
        b_z += b_rx * b_dx
        b_dy = tl.dot(b_rx, b_M, b_dy, input_precision=IP)
    b_dk += b_col * b_dy
    return b_dq, b_dr, b_dk, b_z + SIGN * (b_ky * b_dy)


@triton.jit(do_not_specialize=["T", "HV"])
def grad_value_kernel(
    do, v, y, U, beta, M, kr, dS, chunks,  # do, v, y (v or X): token rows; U [B*T, HV, V]; M, kr of score.py; dS [slots, HV, V, K]
    dMqk, dMrw, dv, dbeta,  # [B*T, HV, C] twice, [B*T, HV, V], U.v [B*T, HV] fp32
    sv, sy,  # rows of do and v, of y are so far apart
    T, HV, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """What needs no gates: dM_qk = scale do y', dM_rw = U X' of each chunk and dv. One program a (chunk, value head)."""
    pid = tl.program_id(0)
    i_slot = (pid // HV).to(tl.int64)
    i_hv = pid % HV
    row, L = chunk_rows(chunks, i_slot, T, C, PACKED)
    if L <= 0:
        return
    do += i_hv * V
    v += i_hv * V
    y += i_hv * V
    U += i_hv * V
    dS += (i_slot * HV + i_hv) * V * K
    o_c = tl.arange(0, C)
    m_c = o_c < L
    o_h = (row + o_c) * HV + i_hv  # [C]
    b_A = tl.zeros([C, C], tl.float32)
    b_B = tl.zeros([C, C], tl.float32)
    b_uv = tl.zeros([C], tl.float32)
    b_beta = tl.where(m_c, 1.0, 0.0)
    if USE_BETA:
        b_beta = tl.load(beta + o_h, mask=m_c, other=0.0).to(tl.float32)  # [C]
    for i_v in range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_do = load_rows(do, row, sv, o_c, o_v, L, V, BV)  # [C, BV]
        b_y = tl.trans(load_rows(y, row, sy, o_c, o_v, L, V, BV))  # [BV, C]
        b_A = tl.dot(b_do, b_y, b_A, input_precision=IP)
        if DELTA:
            b_u = load_rows(U, row, HV * V, o_c, o_v, L, V, BV)  # [C, BV]
            b_B = tl.dot(b_u, b_y, b_B, input_precision=IP)
            if USE_BETA:
                b_uv += tl.sum(b_u.to(tl.float32) * load_rows(v, row, sv, o_c, o_v, L, V, BV).to(tl.float32), 1)
            b_dv = b_u * b_beta[:, None]
        else:
            b_M = tl.trans(load_rows(M + i_hv * C, row, HV * C, o_c, o_c, L, C, C))  # [C, C]
            b_dv = tl.dot(b_M, b_do, input_precision=IP)  # [C, BV]
            for i_k in range((K + BK - 1) // BK):
                o_k = i_k * BK + tl.arange(0, BK)
                b_kr = load_rows(kr + i_hv * K, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
                b_dv = tl.dot(b_kr, tl.trans(load_rows(dS, 0, K, o_v, o_k, V, K, BK)), b_dv, input_precision=IP)
        m_v = m_c[:, None] & (o_v < V)[None, :]
        tl.store(dv + o_h[:, None] * V + o_v[None, :], b_dv.to(dv.dtype.element_ty), mask=m_v)
    o_M = o_h[:, None] * C + o_c[None, :]
    b_A = tl.where(o_c[:, None] >= o_c[None, :], b_A * scale, 0.0)
    tl.store(dMqk + o_M, b_A.to(dMqk.dtype.element_ty), mask=m_c[:, None])
    if DELTA:
        b_B = tl.where(o_c[:, None] > o_c[None, :], b_B, 0.0)
        tl.store(dMrw + o_M, b_B.to(dMrw.dtype.element_ty), mask=m_c[:, None])
    if USE_BETA:
        tl.store(dbeta + o_h, b_uv, mask=m_c)


@triton.jit(do_not_specialize=["T", "HV"])
def grad_key_kernel(
    q, e, k, g, beta, do, y, U, chunks,  # q, e, k, do, y (v or X): token rows; g [B*T, HV, K]; beta [B*T, HV]; U [B*T, HV, V]
    sets, near, dMqk, dMrw, S, dS,  # as in score.py; dMqk, dMrw [B*T, HV, C]; S, dS [slots, HV, V, K]
    dq, de, dk, dg, dbeta,  # dq, de, dk, dg [B*T, HV, K]; dbeta [B*T, HV] fp32, holds U.v
    sk, sv, sy, T, HV, scale,  # rows of q, e, k; of do; of y are so far apart
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    DELTA: tl.constexpr, ERASE: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr,
    LIMIT: tl.constexpr,  # exponents up to so much may be positive
    IP: tl.constexpr, IPG: tl.constexpr,  # of products; of sums of gates
):  # fmt: skip
    """One program a (chunk, value head)."""
    pid = tl.program_id(0)
    i_slot = (pid // HV).to(tl.int64)
    i_hv = pid % HV
    row, L = chunk_rows(chunks, i_slot, T, C, PACKED)
    if L <= 0:
        return
    if tl.load(near + i_slot * HV + i_hv) != 0:
        return
    TYPE: tl.constexpr = k.dtype.element_ty
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or (g.dtype.element_ty == TYPE)
    i_h = i_hv // GROUP
    q += i_h * K
    e += i_h * K
    k += i_h * K
    g += i_hv * K
    do += i_hv * V
    y += i_hv * V
    U += i_hv * V
    S += (i_slot * HV + i_hv) * V * K
    dS += (i_slot * HV + i_hv) * V * K
    o_c = tl.arange(0, C)
    m_c = o_c < L
    o_i, o_j = o_c[:, None], o_c[None, :]
    o_h = (row + o_c) * HV + i_hv  # [C]
    b_A = load_rows(dMqk + i_hv * C, row, HV * C, o_c, o_c, L, C, C)  # [C, C]
    b_met = tl.sum(tl.where(o_i == o_j, b_A.to(tl.float32), 0.0), 1)  # [C]
    b_B = b_A
    b_dbeta = tl.zeros([C], tl.float32)
    b_beta = tl.where(m_c, 1.0, 0.0)
    if DELTA:
        b_B = load_rows(dMrw + i_hv * C, row, HV * C, o_c, o_c, L, C, C)
        if USE_BETA:
            b_beta = tl.load(beta + o_h, mask=m_c, other=0.0).to(tl.float32)  # [C]

    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_dq = tl.zeros([BK, C], tl.float32)
        b_dk = tl.zeros([BK, C], tl.float32)
        b_dr = tl.zeros([BK, C], tl.float32)
        b_through = tl.zeros([BK], tl.float32)  # S dS
        for i_v in range((V + BV - 1) // BV):
            o_v = i_v * BV + tl.arange(0, BV)
            b_S = load_rows(S, 0, K, o_v, o_k, V, K, BK)  # [BV, BK]
            b_dS = load_rows(dS, 0, K, o_v, o_k, V, K, BK)  # [BV, BK]
            b_dq = tl.dot(tl.trans(b_S), tl.trans(load_rows(do, row, sv, o_c, o_v, L, V, BV)), b_dq, input_precision=IP)
            if DELTA:
                b_dr = tl.dot(tl.trans(b_S), tl.trans(load_rows(U, row, HV * V, o_c, o_v, L, V, BV)), b_dr, input_precision=IP)
            b_dk = tl.dot(tl.trans(b_dS), tl.trans(load_rows(y, row, sy, o_c, o_v, L, V, BV)), b_dk, input_precision=IP)
            b_through += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 0)
        b_q = tl.trans(load_rows(q, row, sk, o_c, o_k, L, K, BK))  # [BK, C]
        b_k = tl.trans(load_rows(k, row, sk, o_c, o_k, L, K, BK))  # [BK, C]
        b_e = b_k
        if ERASE:
            b_e = tl.trans(load_rows(e, row, sk, o_c, o_k, L, K, BK))  # [BK, C]
        b_g = tl.trans(load_rows(g, row, HV * K, o_c, o_k, L, K, BK))  # [BK, C]
        b_hi, b_lo = gate_parts(b_g, TYPE)
        b_last = tl.sum(log2_gate(b_g), 1)  # [BK] G_C
        middle = block_level(-tl.min(b_last, 0), -tl.min(tl.min(log2_gate(b_g), 1), 0), C, LIMIT)

        b_R = load_sets(sets, 2 * LEVELS + 1, o_c, C)
        b_D = tl.exp2(sums(b_hi, b_lo, b_R, EXACT, IPG))  # [BK, C] e^G
        b_dq *= b_D * scale
        b_z = b_q * b_dq
        if DELTA:
            b_dr *= b_D
            b_z -= b_e * (b_dr * b_beta[None, :])
        b_dg = tl.dot(b_z.to(TYPE), b_R, input_precision=IP) + (b_through * tl.exp2(b_last))[:, None]
        b_R = load_sets(sets, 2 * LEVELS + 2, o_c, C)
        b_dk *= tl.exp2(sums(b_hi, b_lo, b_R, EXACT, IPG))
        b_dg = tl.dot((b_k * b_dk).to(TYPE), b_R, b_dg, input_precision=IP)
        for level in range(middle, LEVELS):
            b_R = load_sets(sets, level, o_c, C)
            b_D = tl.exp2(sums(b_hi, b_lo, b_R, EXACT, IPG))
            b_qx, b_rx, b_ky = (b_q * b_D).to(TYPE), (b_e * (b_D * -b_beta[None, :])).to(TYPE), (b_k * b_D).to(TYPE)
            o_row, o_col = meets(o_c, level)
            m = o_row[:, None] == o_col[None, :]
            b_dq, b_dr, b_dk, b_z = met_grads(b_A, b_B, m, b_qx, b_rx, b_ky, b_D, b_D, 1, b_dq, b_dr, b_dk, DELTA, IP)
            b_dg = tl.dot(b_z.to(TYPE), b_R, b_dg, input_precision=IP)

        b_R = load_sets(sets, LEVELS + middle, o_c, C)
        b_E = sums(b_hi, b_lo, b_R, EXACT, IPG)
        b_D, b_I = tl.exp2(b_E), tl.exp2(-b_E)
        b_qx, b_rx, b_ky = (b_q * b_D).to(TYPE), (b_e * (b_D * -b_beta[None, :])).to(TYPE), (b_k * b_I).to(TYPE)
        _, o_col = meets(o_c, middle)
        m = (o_col[:, None] == o_col[None, :]) & (o_i > o_j)
        b_dq, b_dr, b_dk, b_z = met_grads(b_A, b_B, m, b_qx, b_rx, b_ky, b_D, b_I, -1, b_dq, b_dr, b_dk, DELTA, IP)
        b_dq += b_met[None, :] * b_k
        b_dk += b_met[None, :] * b_q
        b_dg = tl.dot(b_z.to(TYPE), b_R, b_dg, input_precision=IP)
        if TYPE != tl.float32:  # terms of both signs
            b_dg = tl.dot((b_z - b_z.to(TYPE).to(tl.float32)).to(TYPE), b_R, b_dg, input_precision=IP)
        o_out = o_h[None, :] * K + o_k[:, None]
        m_out = m_c[None, :] & (o_k < K)[:, None]
        tl.store(dg + o_out, b_dg.to(dg.dtype.element_ty), mask=m_out)
        tl.store(dq + o_out, b_dq.to(dq.dtype.element_ty), mask=m_out)
        if DELTA:
            b_dbeta -= tl.sum(b_e * b_dr, 0)
            b_dr *= -b_beta[None, :]
            if ERASE:
                tl.store(de + o_out, b_dr.to(de.dtype.element_ty), mask=m_out)
            else:
                b_dk += b_dr
        tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=m_out)
    if USE_BETA:
        tl.store(dbeta + o_h, tl.load(dbeta + o_h, mask=m_c, other=0.0) + b_dbeta, mask=m_c)
