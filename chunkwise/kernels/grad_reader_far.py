"""grad_reader.py where a chunk forgets more than one factor holds: pairs meet by halves, as in score.py and grad_key_blocks.py.

x~ = x e^(sum of its gates) of every level, so the gate's gradient is the sum of x~ dx~ over the same tokens: nothing cancels. A pair i = j
does not decay and is kept apart.
"""

import triton
import triton.language as tl

from .grad_pair import add_pairs
from .grad_reader import from_state, passed
from .score import add_sums, gate_parts, gate_sums, load_sets, meets
from .tile import chunk_place, load_rows, log2_gate, mask2


@triton.jit
def met_by(dM, dN, p_M, p_N, b_y, b_z, row, HV, L, o_c, m, C: tl.constexpr, TWO: tl.constexpr, TURNED: tl.constexpr, IP: tl.constexpr):
    """What pairs m of dM hand on from y, and (with TWO) those of dN from z; TURNED: matrices transposed. [C, BK]"""
    b_M = tl.where(m, load_rows(dM, row, HV * C, o_c, o_c, L, C, C), 0.0).to(b_y.dtype)  # [C, C]
    b_out = add_pairs(b_M, b_y, None, p_M, TURNED, IP)
    if TWO:
        b_M = tl.where(m, load_rows(dN, row, HV * C, o_c, o_c, L, C, C), 0.0).to(b_y.dtype)
        b_out = add_pairs(b_M, b_z, b_out, p_N, TURNED, IP)
    return b_out


@triton.jit
def far_reader(
    b_x, b_k, b_w, b_dx, b_dg, b_hi, b_lo, sets, dM, dN, p_M, p_N, row, HV, L, o_c,  # dM, dN: pairs with k and with w
    C: tl.constexpr, TWO: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr, TYPE: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr,
):  # fmt: skip
    """A reader's gradient [C, BK] from the state's, b_dx, and from pairs; and b_dg with its part of the gate's."""
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    b_R = load_sets(sets, 3 * LEVELS + 3 if EARLY else 2 * LEVELS + 1, o_c, C)
    b_dx *= tl.exp2(gate_sums(b_R, b_hi, b_lo, EXACT, IPG))
    b_dg = add_sums(tl.trans(b_R), b_x * b_dx, b_dg, TYPE, False, False, IPG)
    for level in range(LEVELS):
        o_row, o_col = meets(o_c, level)
        m = o_row[:, None] == o_col[None, :]
        b_R = load_sets(sets, level, o_c, C)
        b_D = tl.exp2(gate_sums(b_R, b_hi, b_lo, EXACT, IPG))  # [C, BK]
        b_z = met_by(dM, dN, p_M, p_N, (b_k * b_D).to(TYPE), (b_w * b_D).to(TYPE), row, HV, L, o_c, m, C, TWO, False, IP)
        if EARLY:
            b_R = load_sets(sets, 2 * LEVELS + 3 + level, o_c, C)
            b_D = tl.exp2(gate_sums(b_R, b_hi, b_lo, EXACT, IPG))
        b_dx += b_D * b_z
        b_z *= (b_x * b_D).to(TYPE)
        b_dg = add_sums(tl.trans(b_R), b_z, b_dg, TYPE, False, False, IPG)
    return b_dx, b_dg


@triton.jit
def far_writer(
    b_y, b_q, b_r, b_dy, b_dg, b_hi, b_lo, sets, dM, dN, p_M, p_N, row, HV, L, o_c,  # dM, dN: pairs with q and with r
    C: tl.constexpr, LOW_RANK: tl.constexpr, BONUS: tl.constexpr, EXACT: tl.constexpr, TYPE: tl.constexpr, IP: tl.constexpr,
    IPG: tl.constexpr,
):  # fmt: skip
    """The same of a writer."""
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    b_R = load_sets(sets, 2 * LEVELS + 2, o_c, C)
    b_dy *= tl.exp2(gate_sums(b_R, b_hi, b_lo, EXACT, IPG))
    b_dg = add_sums(tl.trans(b_R), b_y * b_dy, b_dg, TYPE, False, False, IPG)
    for level in range(LEVELS):
        o_row, o_col = meets(o_c, level)
        m = o_row[:, None] == o_col[None, :]
        b_R = load_sets(sets, level, o_c, C)
        b_D = tl.exp2(gate_sums(b_R, b_hi, b_lo, EXACT, IPG))  # [C, BK]
        b_B = b_D
        if LOW_RANK or BONUS:
            b_B = tl.exp2(gate_sums(load_sets(sets, 2 * LEVELS + 3 + level, o_c, C), b_hi, b_lo, EXACT, IPG))
        b_qx = (b_q * (b_B if BONUS else b_D)).to(TYPE)
        b_z = met_by(dM, dN, p_M, p_N, b_qx, (b_r * b_B).to(TYPE), row, HV, L, o_c, m, C, LOW_RANK, True, IP)
        b_dy += b_D * b_z
        b_z *= (b_y * b_D).to(TYPE)
        b_dg = add_sums(tl.trans(b_R), b_z, b_dg, TYPE, False, False, IPG)
    return b_dy, b_dg


@triton.jit(do_not_specialize=["rows", "T", "HV"])
def grad_reader_far_kernel(
    q, k, a, b, g, u, do, v, X, U, chunks,  # as grad_reader_kernel
    sets, near, dMqk, dMqw, dMrk, dMrw, met, backs, S, dS,
    dq, dk, da, db, dg, du,
    sk, sa, sv, rows, T, HV, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EACH: tl.constexpr,  # blocks of keys to one of near
    GROUP: tl.constexpr, GROUP_A: tl.constexpr,
    LOW_RANK: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head, block of keys): the gradients one after the other, each level by level."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    NK: tl.constexpr = (BLOCKS + EACH - 1) // EACH
    i_k, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED, BLOCKS)
    o_k = i_k * BK + tl.arange(0, BK)
    if L <= 0:
        return
    if tl.load(near + (i_slot * HV + i_hv) * NK + i_k // EACH) != 0:
        return
    TYPE: tl.constexpr = k.dtype.element_ty
    EXACT: tl.constexpr = (TYPE == tl.float32) or (g.dtype.element_ty == TYPE)
    q += i_hv // GROUP * K
    k += i_hv // GROUP * K
    a += i_hv // GROUP_A * K
    b += i_hv // GROUP_A * K
    g += i_hv * K
    do += i_hv * V
    v += i_hv * V
    p_back = backs + (i_slot * HV + i_hv) * 4
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
    o_out = o_c[:, None] * (HV * K) + o_k[None, :]
    m_out = mask2(m_c, o_k, K, BK)
    b_g = load_rows(g, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
    b_hi, b_lo = gate_parts(b_g, TYPE)
    b_dg = tl.zeros([C, BK], tl.float32) + (passed(S, dS, o_k, K, V, BK, BV) * tl.exp2(tl.sum(log2_gate(b_g), 0)))[None, :]
    b_q = load_rows(q, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
    b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
    b_r, b_w = b_q, b_k
    if LOW_RANK:
        b_r = load_rows(a, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
        b_w = load_rows(b, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
    b_met = tl.load(met + (row + o_c) * HV + i_hv, mask=m_c, other=0.0)[:, None]  # [C, 1]
    if BONUS:
        tl.store(du + (i_slot * HV + i_hv) * K + o_k, tl.sum(b_met * (b_q.to(tl.float32) * b_k.to(tl.float32)), 0), mask=o_k < K)
        b_met = b_met * tl.load(u + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    if LOW_RANK:
        b_met_w = tl.load(met + (rows.to(tl.int64) + row + o_c) * HV + i_hv, mask=m_c, other=0.0)[:, None]  # [C, 1]
    b_dx = from_state(do, S, row, sv, o_c, o_k, L, K, V, C, BK, BV, IP) * scale
    b_dx, b_dg = far_reader(
        b_q, b_k, b_w, b_dx, b_dg, b_hi, b_lo, sets, dMqk, dMqw, p_back, p_back + 1, row, HV, L, o_c,
        C, LOW_RANK, BONUS, EXACT, TYPE, IP, IPG
    )
    b_dx += b_met * b_k
    if LOW_RANK:
        b_dx += b_met_w * b_w
    tl.store(dq + out + o_out, b_dx.to(dq.dtype.element_ty), mask=m_out)
    b_dx = from_state(v, dS, row, sv, o_c, o_k, L, K, V, C, BK, BV, IP)
    b_dx, b_dg = far_writer(
        b_k, b_q, b_r, b_dx, b_dg, b_hi, b_lo, sets, dMqk, dMrk, p_back, p_back + 2, row, HV, L, o_c,
        C, LOW_RANK, BONUS, EXACT, TYPE, IP, IPG
    )
    tl.store(dk + out + o_out, (b_dx + b_met * b_q).to(dk.dtype.element_ty), mask=m_out)
    if LOW_RANK:
        b_dx = from_state(U, S, row, HV * V, o_c, o_k, L, K, V, C, BK, BV, IP)
        b_dx, b_dg = far_reader(
            b_r, b_k, b_w, b_dx, b_dg, b_hi, b_lo, sets, dMrk, dMrw, p_back + 2, p_back + 3, row, HV, L, o_c,
            C, True, True, EXACT, TYPE, IP, IPG
        )
        tl.store(da + out + o_out, b_dx.to(da.dtype.element_ty), mask=m_out)
        b_dx = from_state(X, dS, row, HV * V, o_c, o_k, L, K, V, C, BK, BV, IP)
        b_dx, b_dg = far_writer(
            b_w, b_q, b_r, b_dx, b_dg, b_hi, b_lo, sets, dMqw, dMrw, p_back + 1, p_back + 3, row, HV, L, o_c,
            C, LOW_RANK, BONUS, EXACT, TYPE, IP, IPG
        )
        tl.store(db + out + o_out, (b_dx + b_met_w * b_q).to(db.dtype.element_ty), mask=m_out)
    tl.store(dg + out + o_out, b_dg.to(dg.dtype.element_ty), mask=m_out)
