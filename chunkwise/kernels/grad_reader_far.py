"""grad_reader.py where a chunk forgets more than one factor holds: pairs meet by halves, as in score.py and grad_key.py.

x~ = x e^(sum of its gates) of every level, so the gate's gradient is the sum of x~ dx~ over the same tokens: nothing cancels. A pair i = j
does not decay and is kept apart.
"""

import triton
import triton.language as tl

from .affine import early
from .grad_reader import from_states, passed
from .score import gate_parts, gate_sums, load_sets, meets
from .tile import chunk_rows, load_rows, log2_gate


@triton.jit
def met_by(b_one, b_other, b_y, b_z, m, TWO: tl.constexpr, TURNED: tl.constexpr, IP: tl.constexpr):
    """What pairs m of b_one [C, C] hand on from y, and (with TWO) those of b_other from z; TURNED: matrices transposed. [C, BK]"""
    b_M = tl.where(m, b_one, 0.0).to(b_y.dtype)
    b_out = tl.dot(tl.trans(b_M) if TURNED else b_M, b_y, input_precision=IP)
    if TWO:
        b_M = tl.where(m, b_other, 0.0).to(b_y.dtype)
        b_out = tl.dot(tl.trans(b_M) if TURNED else b_M, b_z, b_out, input_precision=IP)
    return b_out


@triton.jit(do_not_specialize=["rows", "T", "HV"])
def grad_reader_far_kernel(
    q, k, a, b, g, u, do, v, X, U, chunks,  # as grad_reader_kernel
    sets, near, dMqk, dMqw, dMrk, dMrw, met, S, dS,
    dq, dk, da, db, dg, du,
    sk, sa, sv, rows, T, HV, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, GROUP_A: tl.constexpr,
    LOW_RANK: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr,
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
    q += i_hv // GROUP * K
    k += i_hv // GROUP * K
    a += i_hv // GROUP_A * K
    b += i_hv // GROUP_A * K
    g += i_hv * K
    do += i_hv * V
    v += i_hv * V
    dMqk += i_hv * C
    dMqw += i_hv * C
    dMrk += i_hv * C
    dMrw += i_hv * C
    X += i_hv * V
    U += i_hv * V
    S += (i_slot * HV + i_hv) * V * K
    dS += (i_slot * HV + i_hv) * V * K
    o_c = tl.arange(0, C)
    m_c = o_c < L
    out = (row * HV + i_hv) * K
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        o_out = o_c[:, None] * (HV * K) + o_k[None, :]
        m_out = m_c[:, None] & (o_k < K)[None, :]
        b_g = load_rows(g, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
        b_hi, b_lo = gate_parts(b_g, TYPE)
        b_q = load_rows(q, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        b_r, b_w = b_q, b_k
        if LOW_RANK:
            b_r = load_rows(a, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
            b_w = load_rows(b, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
        b_dq, b_dr = from_states(do, U, S, row, sv, HV * V, o_c, o_k, L, K, V, C, BK, BV, LOW_RANK, IP)
        b_dk, b_dw = from_states(v, X, dS, row, sv, HV * V, o_c, o_k, L, K, V, C, BK, BV, LOW_RANK, IP)
        b_dg = tl.zeros([C, BK], tl.float32) + (passed(S, dS, o_k, K, V, BK, BV) * tl.exp2(tl.sum(log2_gate(b_g), 0)))[None, :]

        b_R = load_sets(sets, 2 * LEVELS + 1, o_c, C)
        b_G = gate_sums(b_R, b_hi, b_lo, EXACT, IPG)  # [C, BK]
        b_B = tl.exp2(early(b_G, b_hi, b_lo, sets, o_c, C, EXACT, IPG))
        b_D = tl.exp2(b_G)
        b_dq *= scale * (b_B if BONUS else b_D)
        b_Rr = load_sets(sets, 3 * LEVELS + 3, o_c, C)
        b_dg = tl.dot(tl.trans(b_Rr if BONUS else b_R), (b_q * b_dq).to(TYPE), b_dg, input_precision=IPG)
        if LOW_RANK:
            b_dr *= b_B
            b_dg = tl.dot(tl.trans(b_Rr), (b_r * b_dr).to(TYPE), b_dg, input_precision=IPG)
        b_R = load_sets(sets, 2 * LEVELS + 2, o_c, C)
        b_D = tl.exp2(gate_sums(b_R, b_hi, b_lo, EXACT, IPG))
        b_dk *= b_D
        b_z = b_k * b_dk
        if LOW_RANK:
            b_dw *= b_D
            b_z += b_w * b_dw
        b_dg = tl.dot(tl.trans(b_R), b_z.to(TYPE), b_dg, input_precision=IPG)
        for level in range(LEVELS):
            b_R = load_sets(sets, level, o_c, C)
            b_Rr = load_sets(sets, 2 * LEVELS + 3 + level, o_c, C)
            b_D = tl.exp2(gate_sums(b_R, b_hi, b_lo, EXACT, IPG))
            b_B = tl.exp2(gate_sums(b_Rr, b_hi, b_lo, EXACT, IPG))
            o_row, o_col = meets(o_c, level)
            m = o_row[:, None] == o_col[None, :]
            b_qk = load_rows(dMqk, row, HV * C, o_c, o_c, L, C, C)  # [C, C]
            b_qw, b_rk, b_rw = b_qk, b_qk, b_qk
            if LOW_RANK:
                b_qw = load_rows(dMqw, row, HV * C, o_c, o_c, L, C, C)
                b_rk = load_rows(dMrk, row, HV * C, o_c, o_c, L, C, C)
                b_rw = load_rows(dMrw, row, HV * C, o_c, o_c, L, C, C)
            b_Dq = b_B if BONUS else b_D
            b_qx, b_rx = (b_q * b_Dq).to(TYPE), (b_r * b_B).to(TYPE)
            b_ky, b_wy = (b_k * b_D).to(TYPE), (b_w * b_D).to(TYPE)
            b_x = met_by(b_qk, b_qw, b_ky, b_wy, m, LOW_RANK, False, IP)
            b_dq += b_Dq * b_x
            b_z = b_qx * b_x
            if BONUS:
                b_dg = tl.dot(tl.trans(b_Rr), b_z.to(TYPE), b_dg, input_precision=IPG)
                b_z = tl.zeros([C, BK], tl.float32)
            b_x = met_by(b_qk, b_rk, b_qx, b_rx, m, LOW_RANK, True, IP)
            b_dk += b_D * b_x
            b_z += b_ky * b_x
            if LOW_RANK:
                b_x = met_by(b_qw, b_rw, b_qx, b_rx, m, True, True, IP)
                b_dw += b_D * b_x
                b_z += b_wy * b_x
                b_x = met_by(b_rk, b_rw, b_ky, b_wy, m, True, False, IP)
                b_dr += b_B * b_x
                b_dg = tl.dot(tl.trans(b_Rr), (b_rx * b_x).to(TYPE), b_dg, input_precision=IPG)
            b_dg = tl.dot(tl.trans(b_R), b_z.to(TYPE), b_dg, input_precision=IPG)
        b_met = tl.load(met + (row + o_c) * HV + i_hv, mask=m_c, other=0.0)[:, None]  # [C, 1]
        if BONUS:
            tl.store(du + (i_slot * HV + i_hv) * K + o_k, tl.sum(b_met * (b_q.to(tl.float32) * b_k.to(tl.float32)), 0), mask=o_k < K)
            b_met = b_met * tl.load(u + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
        b_dq += b_met * b_k
        b_dk += b_met * b_q
        if LOW_RANK:
            b_met = tl.load(met + (rows.to(tl.int64) + row + o_c) * HV + i_hv, mask=m_c, other=0.0)[:, None]
            b_dq += b_met * b_w
            b_dw += b_met * b_q
            tl.store(da + out + o_out, b_dr.to(da.dtype.element_ty), mask=m_out)
            tl.store(db + out + o_out, b_dw.to(db.dtype.element_ty), mask=m_out)
        tl.store(dq + out + o_out, b_dq.to(dq.dtype.element_ty), mask=m_out)
        tl.store(dk + out + o_out, b_dk.to(dk.dtype.element_ty), mask=m_out)
        tl.store(dg + out + o_out, b_dg.to(dg.dtype.element_ty), mask=m_out)
