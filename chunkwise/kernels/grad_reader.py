"""Stage `grads` of the affine stage's rules, second half: gradients of readers and writers of keys, and of the gates.

Readers x (q, r) and writers y (k, w) of a chunk, with dM of grad_pair.py, each pair decayed by what lies between:

    dx_i = e^G (S' do_i | S' U_i) + sum_j dM_ij y_j e^(G_i - G_j)
    dy_j = e^(G_C - G) (dS' v_j | dS' X_j) + sum_i dM_ij x_i e^(G_i - G_j)

with G - g in G's place for readers that read before their token forgets (r; q with a bonus). The gate's gradient: what readers from t on
draw less what writers from t on are drawn from, and what passes the chunk whole.
As in bounded.py: where no channel forgets more than 2^LIMIT in a half of a chunk, all pairs meet around its middle. First the readers, then
the writers, one after the other; chunks that forget more are left to grad_reader_far.py.
"""

import triton
import triton.language as tl

from .grad import load_state
from .score import gate_parts, gate_sums, load_sets
from .tile import RCP_LN2, chunk_rows, load_chunk, load_rows, log2_gate


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


@triton.jit
def from_states(x, y, S, row, sx, sy, o_c, o_k, L, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                TWO: tl.constexpr, IP: tl.constexpr):  # fmt: skip
    """x S and y S [C, BK] (with TWO) of values x, y in token rows and states S [V, K]."""
    b_x = tl.zeros([C, BK], tl.float32)
    b_y = tl.zeros([C, BK], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_S = load_rows(S, 0, K, o_v, o_k, V, K, BK)  # [BV, BK]
        b_x = tl.dot(load_rows(x, row, sx, o_c, o_v, L, V, BV), b_S, b_x, input_precision=IP)
        if TWO:
            b_y = tl.dot(load_rows(y, row, sy, o_c, o_v, L, V, BV), b_S, b_y, input_precision=IP)
    return b_x, b_y


@triton.jit
def passed(S, dS, o_k, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """S dS summed over values: [BK]."""
    b_sum = tl.zeros([BK], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_S = load_rows(S, 0, K, o_v, o_k, V, K, BK).to(tl.float32)
        b_sum += tl.sum(b_S * load_rows(dS, 0, K, o_v, o_k, V, K, BK).to(tl.float32), 0)
    return b_sum


@triton.jit
def later(sets, b_z, b_zr, o_c, C: tl.constexpr, TYPE: tl.constexpr, EARLY: tl.constexpr, IP: tl.constexpr):
    """For every token t the sum of z [C, BK] from t on and (with EARLY) of zr after t. Terms of both signs: 16 bits come in two parts."""
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    b_R = tl.trans(load_sets(sets, 2 * LEVELS + 1, o_c, C))
    if TYPE == tl.float32:
        b_out = tl.dot(b_R, b_z, input_precision=IP)
        if EARLY:
            b_out = tl.dot(tl.trans(load_sets(sets, 3 * LEVELS + 3, o_c, C)), b_zr, b_out, input_precision=IP)
    else:
        if EARLY:
            b_z += b_zr
        b_hi = b_z.to(TYPE)
        b_out = tl.dot(b_R, b_hi, input_precision=IP)
        b_out = tl.dot(b_R, (b_z - b_hi.to(tl.float32)).to(TYPE), b_out, input_precision=IP)
        if EARLY:
            b_out -= b_zr
    return b_out


@triton.jit
def around_middle(g, sets, row, HV, o_c, o_k, L, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, TYPE: tl.constexpr, IPG: tl.constexpr):
    """(G less G at the chunk's middle, the same of readers that read early [C, BK]; e^ of the first and of the other half's sums [BK])."""
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or (g.dtype.element_ty == TYPE)
    b_g = load_rows(g, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
    b_hi, b_lo = gate_parts(b_g, TYPE)
    b_E = gate_sums(load_sets(sets, 2 * LEVELS, o_c, C), b_hi, b_lo, EXACT, IPG)  # [C, BK]
    b_first, b_rest = half_sums(b_g, o_c, C)
    return b_E, b_E - b_g.to(tl.float32) * RCP_LN2, tl.exp2(b_first), tl.exp2(b_rest)


@triton.jit(do_not_specialize=["rows", "T", "HV"])
def grad_reader_kernel(
    q, k, a, b, g, u, do, U, chunks,  # as affine_kernel and grad_pair_kernel
    sets, near, dMqk, dMqw, dMrk, dMrw, met, S,  # near [slots, HV] uint8, written; S [slots, HV, V, K]
    dq, da, dg, du,  # [B*T, HV, K]; dg fp32, the readers' part; du [slots, HV, K] fp32
    sk, sa, sv, rows, T, HV, scale,  # rows: B*T
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, GROUP_A: tl.constexpr,
    GATED: tl.constexpr, LOW_RANK: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr,
    LIMIT: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr,
    TMA: tl.constexpr,  # do, U, dM are descriptors of [B, heads, T, columns], S of its shape, not pointers
):  # fmt: skip
    """Gradients of q and a. One program a (chunk, value head)."""
    pid = tl.program_id(0)
    i_slot = pid // HV
    i_hv = pid % HV
    row, L = chunk_rows(chunks, i_slot.to(tl.int64), T, C, PACKED)
    if L <= 0:
        return
    TYPE: tl.constexpr = k.dtype.element_ty
    NC = tl.cdiv(T, C)
    i_b = i_slot // NC
    t = (i_slot - i_b * NC) * C
    o_c = tl.arange(0, C)
    g += i_hv * K
    if GATED:
        ok = in_reach(g, row, HV * K, o_c, L, K, BK, C, LIMIT)
        tl.store(near + i_slot.to(tl.int64) * HV + i_hv, ok.to(tl.uint8))
        if not ok:
            return
    q += i_hv // GROUP * K
    k += i_hv // GROUP * K
    a += i_hv // GROUP_A * K
    b += i_hv // GROUP_A * K
    m_c = o_c < L
    out = (row * HV + i_hv) * K
    b_qk = load_chunk(dMqk, row, HV * C, i_b, i_hv, t, o_c, 0, L, C, C, C, TMA)  # [C, C]
    b_met = tl.load(met + (row + o_c) * HV + i_hv, mask=m_c, other=0.0)  # [C]
    if BV >= V:
        b_do = load_chunk(do, row, sv, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]
    if LOW_RANK:
        if BV >= V:
            b_u = load_chunk(U, row, HV * V, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]
        b_qw = load_chunk(dMqw, row, HV * C, i_b, i_hv, t, o_c, 0, L, C, C, C, TMA)  # [C, C]
        b_rk = load_chunk(dMrk, row, HV * C, i_b, i_hv, t, o_c, 0, L, C, C, C, TMA)
        b_rw = load_chunk(dMrw, row, HV * C, i_b, i_hv, t, o_c, 0, L, C, C, C, TMA)
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        o_out = o_c[:, None] * (HV * K) + o_k[None, :]
        m_out = m_c[:, None] & (o_k < K)[None, :]
        if BV >= V:
            b_S = load_state(S, i_slot, i_hv, HV, 0, i_k, K, V, BK, BV, TMA)  # [BV, BK]
            b_dq = tl.dot(b_do, b_S, input_precision=IP)
            if LOW_RANK:
                b_dr = tl.dot(b_u, b_S, input_precision=IP)
        else:
            p_S = S + (i_slot.to(tl.int64) * HV + i_hv) * V * K
            b_dq, b_dr = from_states(do + i_hv * V, U + i_hv * V, p_S, row, sv, HV * V, o_c, o_k, L, K, V, C, BK, BV, LOW_RANK, IP)
        b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        b_dq *= scale
        if LOW_RANK:
            b_w = load_rows(b, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
        if GATED:
            b_E, b_B, b_before, _ = around_middle(g, sets, row, HV, o_c, o_k, L, K, C, BK, TYPE, IPG)
            b_I = tl.exp2(-b_E)
            b_dq *= b_before[None, :]
            b_k = (b_k * b_I).to(TYPE)
            if LOW_RANK:
                b_w = (b_w * b_I).to(TYPE)
                b_dr *= b_before[None, :]
        b_dq = tl.dot(b_qk, b_k, b_dq, input_precision=IP)
        if LOW_RANK:
            b_dq = tl.dot(b_qw, b_w, b_dq, input_precision=IP)
            b_dr = tl.dot(b_rk, b_k, b_dr, input_precision=IP)
            b_dr = tl.dot(b_rw, b_w, b_dr, input_precision=IP)
        b_q = load_rows(q, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        if GATED:
            b_dq *= tl.exp2(b_B if BONUS else b_E)
            b_z = b_q * b_dq
            b_zr = b_z
        b_k = b_met[:, None] * load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        if BONUS:
            o_u = (i_slot.to(tl.int64) * HV + i_hv) * K + o_k
            tl.store(du + o_u, tl.sum(b_q * b_k, 0), mask=o_k < K)
            b_k *= tl.load(u + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
        b_dq += b_k
        if LOW_RANK:
            b_met_w = tl.load(met + (rows.to(tl.int64) + row + o_c) * HV + i_hv, mask=m_c, other=0.0)  # [C]
            b_dq += b_met_w[:, None] * load_rows(b, row, sa, o_c, o_k, L, K, BK)
        tl.store(dq + out + o_out, b_dq.to(dq.dtype.element_ty), mask=m_out)
        if LOW_RANK:
            if GATED:
                b_dr *= tl.exp2(b_B)
                b_zr = load_rows(a, row, sa, o_c, o_k, L, K, BK) * b_dr
            tl.store(da + out + o_out, b_dr.to(da.dtype.element_ty), mask=m_out)
        if GATED:
            if BONUS:
                b_z = tl.zeros([C, BK], tl.float32)
            b_dg = later(sets, b_z, b_zr, o_c, C, TYPE, LOW_RANK or BONUS, IPG)
            tl.store(dg + out + o_out, b_dg, mask=m_out)


@triton.jit(do_not_specialize=["rows", "T", "HV"])
def grad_writer_kernel(
    q, k, a, b, g, u, v, X, chunks,  # as grad_reader_kernel
    sets, near, dMqk, dMqw, dMrk, dMrw, met, S, dS,
    dk, db, part, dg,  # part: dg of grad_reader_kernel
    sk, sa, sv, rows, T, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, GROUP_A: tl.constexpr,
    GATED: tl.constexpr, LOW_RANK: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr,
    TMA: tl.constexpr,  # v, X, dM are descriptors of [B, heads, T, columns], S, dS of their shape, not pointers
):  # fmt: skip
    """Gradients of k, b and the gate. One program a (chunk, value head)."""
    pid = tl.program_id(0)
    i_slot = pid // HV
    i_hv = pid % HV
    row, L = chunk_rows(chunks, i_slot.to(tl.int64), T, C, PACKED)
    if L <= 0:
        return
    if GATED:
        if tl.load(near + i_slot.to(tl.int64) * HV + i_hv) == 0:
            return
    TYPE: tl.constexpr = k.dtype.element_ty
    NC = tl.cdiv(T, C)
    i_b = i_slot // NC
    t = (i_slot - i_b * NC) * C
    o_c = tl.arange(0, C)
    g += i_hv * K
    q += i_hv // GROUP * K
    k += i_hv // GROUP * K
    a += i_hv // GROUP_A * K
    b += i_hv // GROUP_A * K
    m_c = o_c < L
    out = (row * HV + i_hv) * K
    b_qk = load_chunk(dMqk, row, HV * C, i_b, i_hv, t, o_c, 0, L, C, C, C, TMA)  # [C, C]
    b_met = tl.load(met + (row + o_c) * HV + i_hv, mask=m_c, other=0.0)  # [C]
    if BV >= V:
        b_v = load_chunk(v, row, sv, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]
    if LOW_RANK:
        if BV >= V:
            b_x = load_chunk(X, row, HV * V, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]
        b_qw = load_chunk(dMqw, row, HV * C, i_b, i_hv, t, o_c, 0, L, C, C, C, TMA)  # [C, C]
        b_rk = load_chunk(dMrk, row, HV * C, i_b, i_hv, t, o_c, 0, L, C, C, C, TMA)
        b_rw = load_chunk(dMrw, row, HV * C, i_b, i_hv, t, o_c, 0, L, C, C, C, TMA)
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        o_out = o_c[:, None] * (HV * K) + o_k[None, :]
        m_out = m_c[:, None] & (o_k < K)[None, :]
        if BV >= V:
            b_dS = load_state(dS, i_slot, i_hv, HV, 0, i_k, K, V, BK, BV, TMA)  # [BV, BK]
            b_dk = tl.dot(b_v, b_dS, input_precision=IP)
            if LOW_RANK:
                b_dw = tl.dot(b_x, b_dS, input_precision=IP)
            if GATED:
                b_S = load_state(S, i_slot, i_hv, HV, 0, i_k, K, V, BK, BV, TMA)  # [BV, BK]
                b_dg = tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 0)  # [BK]
        else:
            o_S = (i_slot.to(tl.int64) * HV + i_hv) * V * K
            b_dk, b_dw = from_states(v + i_hv * V, X + i_hv * V, dS + o_S, row, sv, HV * V, o_c, o_k, L, K, V, C, BK, BV, LOW_RANK, IP)
            if GATED:
                b_dg = passed(S + o_S, dS + o_S, o_k, K, V, BK, BV)
        b_q = load_rows(q, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        if LOW_RANK:
            b_r = load_rows(a, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
        if GATED:
            b_E, b_B, b_before, b_after = around_middle(g, sets, row, HV, o_c, o_k, L, K, C, BK, TYPE, IPG)
            b_dk *= b_after[None, :]
            b_q = (b_q * tl.exp2(b_B if BONUS else b_E)).to(TYPE)
            b_dg *= b_before * b_after
            b_E = tl.exp2(-b_E)
            b_ends = load_rows(k, row, sk, o_c, o_k, L, K, BK) * b_E * b_dk  # of the state at the chunk's end
            if LOW_RANK:
                b_dw *= b_after[None, :]
                b_ends += load_rows(b, row, sa, o_c, o_k, L, K, BK) * b_E * b_dw
                b_r = (b_r * tl.exp2(b_B)).to(TYPE)
            b_dg += tl.sum(b_ends, 0)
        b_dk = tl.dot(tl.trans(b_qk), b_q, b_dk, input_precision=IP)
        if LOW_RANK:
            b_dk = tl.dot(tl.trans(b_rk), b_r, b_dk, input_precision=IP)
            b_dw = tl.dot(tl.trans(b_qw), b_q, b_dw, input_precision=IP)
            b_dw = tl.dot(tl.trans(b_rw), b_r, b_dw, input_precision=IP)
        if GATED:
            b_dk *= b_E
            b_z = load_rows(k, row, sk, o_c, o_k, L, K, BK) * b_dk
        b_q = load_rows(q, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        if BONUS:
            b_dk += b_met[:, None] * b_q * tl.load(u + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
        else:
            b_dk += b_met[:, None] * b_q
        tl.store(dk + out + o_out, b_dk.to(dk.dtype.element_ty), mask=m_out)
        if LOW_RANK:
            if GATED:
                b_dw *= b_E
                b_z += load_rows(b, row, sa, o_c, o_k, L, K, BK) * b_dw
            b_met_w = tl.load(met + (rows.to(tl.int64) + row + o_c) * HV + i_hv, mask=m_c, other=0.0)  # [C]
            b_dw += b_met_w[:, None] * b_q
            tl.store(db + out + o_out, b_dw.to(db.dtype.element_ty), mask=m_out)
        if GATED:
            b_dgs = tl.load(part + out + o_out, mask=m_out, other=0.0) + b_dg[None, :]
            b_dgs -= later(sets, b_z, b_z, o_c, C, TYPE, False, IPG)
            tl.store(dg + out + o_out, b_dgs.to(dg.dtype.element_ty), mask=m_out)
