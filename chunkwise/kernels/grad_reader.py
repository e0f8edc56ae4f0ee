"""Stage `grads` of the affine stage's rules, second half: gradients of readers and writers of keys, and of the gates.

Readers x (q, r) and writers y (k, w) of a chunk, with dM of grad_pair.py, each pair decayed by what lies between:

    dx_i = e^G (S' do_i | S' U_i) + sum_j dM_ij y_j e^(G_i - G_j)
    dy_j = e^(G_C - G) (dS' v_j | dS' X_j) + sum_i dM_ij x_i e^(G_i - G_j)

with G - g in G's place for readers that read before their token forgets (r; q with a bonus). The gate's gradient: what readers from t on
draw less what writers from t on are drawn from, and what passes the chunk whole.
Two kernels as in bounded.py: where no channel forgets more than 2^LIMIT in a half, all pairs meet around the chunk's middle; the others
are left to grad_reader_far.py.
"""

import triton
import triton.language as tl

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
def summed(b_R, b_z, b_out, IP: tl.constexpr):
    """R z [C, BK] added to b_out; terms of both signs, so 16-bit operands come in two parts."""
    b_hi = b_z.to(b_R.dtype)
    b_out = tl.dot(b_R, b_hi, b_out, input_precision=IP)
    if b_R.dtype != tl.float32:
        b_out = tl.dot(b_R, (b_z - b_hi.to(tl.float32)).to(b_R.dtype), b_out, input_precision=IP)
    return b_out


@triton.jit
def load_pairs(dM, row, HV, i_hv, o_c, L, STRICT: tl.constexpr, C: tl.constexpr):
    """dM [C, C] of a chunk; STRICT: without the diagonal."""
    b_M = load_rows(dM + i_hv * C, row, HV * C, o_c, o_c, L, C, C)
    if STRICT:
        b_M = tl.where(o_c[:, None] == o_c[None, :], 0.0, b_M).to(b_M.dtype)
    return b_M


@triton.jit(do_not_specialize=["T", "HV"])
def grad_reader_kernel(
    q, k, a, b, g, u, do, v, X, U, chunks,  # as affine_kernel and grad_pair_kernel
    sets, near, dMqk, dMqw, dMrk, dMrw, S, dS,  # near [slots, HV] uint8, written
    dq, dk, da, db, dg, du,  # [B*T, HV, K]; du [slots, HV, K] fp32
    sk, sa, sv, T, HV, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, GROUP_A: tl.constexpr,
    GATED: tl.constexpr, LOW_RANK: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr,
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
    if GATED:
        ok = in_reach(g, row, HV * K, o_c, L, K, BK, C, LIMIT)
        tl.store(near + i_slot * HV + i_hv, ok.to(tl.uint8))
        if not ok:
            return
    q += i_hv // GROUP * K
    k += i_hv // GROUP * K
    a += i_hv // GROUP_A * K
    b += i_hv // GROUP_A * K
    do += i_hv * V
    v += i_hv * V
    X += i_hv * V
    U += i_hv * V
    S += (i_slot * HV + i_hv) * V * K
    dS += (i_slot * HV + i_hv) * V * K
    m_c = o_c < L
    out = (row * HV + i_hv) * K
    if BONUS:
        b_met = load_rows(dMqk + i_hv * C, row, HV * C, o_c, o_c, L, C, C).to(tl.float32)
        b_met = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_met, 0.0), 1)  # [C]
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        o_out = o_c[:, None] * (HV * K) + o_k[None, :]
        m_out = m_c[:, None] & (o_k < K)[None, :]
        if GATED:
            b_g = load_rows(g, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
            b_first, b_rest = half_sums(b_g, o_c, C)
            b_hi, b_lo = gate_parts(b_g, TYPE)
            b_E = gate_sums(load_sets(sets, 2 * LEVELS, o_c, C), b_hi, b_lo, EXACT, IPG)  # [C, BK] G - G at the middle
            b_I = tl.exp2(-b_E)
            b_B = b_E - log2_gate(b_g)
            b_D = tl.exp2(b_B if BONUS else b_E)
            b_B = tl.exp2(b_B)
            b_before, b_after = tl.exp2(b_first), tl.exp2(b_rest)  # [BK]

        # readers
        b_dq, b_dr = from_states(do, U, S, row, sv, HV * V, o_c, o_k, L, K, V, C, BK, BV, LOW_RANK, IP)
        b_dq *= scale
        b_ky = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        if GATED:
            b_dq *= b_before[None, :]
            b_ky = (b_ky * b_I).to(TYPE)
        b_dq = tl.dot(load_pairs(dMqk, row, HV, i_hv, o_c, L, BONUS, C), b_ky, b_dq, input_precision=IP)
        if LOW_RANK:
            b_wy = load_rows(b, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
            if GATED:
                b_dr *= b_before[None, :]
                b_wy = (b_wy * b_I).to(TYPE)
            b_dq = tl.dot(load_pairs(dMqw, row, HV, i_hv, o_c, L, False, C), b_wy, b_dq, input_precision=IP)
            b_dr = tl.dot(load_pairs(dMrk, row, HV, i_hv, o_c, L, False, C), b_ky, b_dr, input_precision=IP)
            b_dr = tl.dot(load_pairs(dMrw, row, HV, i_hv, o_c, L, False, C), b_wy, b_dr, input_precision=IP)
        b_q = load_rows(q, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        if GATED:
            b_dq *= b_D
            # x dx of readers less y dy of writers: what is left of it from t on decays across t; of readers that read early from after t on
            b_zr = b_q * b_dq
            b_z = b_zr
            if BONUS:
                b_z = tl.zeros([C, BK], tl.float32)
            if LOW_RANK:
                b_dr *= b_B
                b_zr = load_rows(a, row, sa, o_c, o_k, L, K, BK) * b_dr
        if BONUS:
            b_u = tl.load(u + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)  # [BK]
            b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
            b_dq += b_met[:, None] * (b_k * b_u[None, :])
            tl.store(du + (i_slot * HV + i_hv) * K + o_k, tl.sum(b_met[:, None] * (b_q * b_k.to(tl.float32)), 0), mask=o_k < K)
        tl.store(dq + out + o_out, b_dq.to(dq.dtype.element_ty), mask=m_out)
        if LOW_RANK:
            tl.store(da + out + o_out, b_dr.to(da.dtype.element_ty), mask=m_out)

        # writers
        b_dk, b_dw = from_states(v, X, dS, row, sv, HV * V, o_c, o_k, L, K, V, C, BK, BV, LOW_RANK, IP)
        b_qx = load_rows(q, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        if LOW_RANK:
            b_rx = load_rows(a, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
        if GATED:
            b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
            b_dk *= b_after[None, :]
            b_dg = tl.sum(b_k * b_I * b_dk, 0)  # [BK] of the state at the chunk's end
            b_qx = (b_qx * b_D).to(TYPE)
            if LOW_RANK:
                b_w = load_rows(b, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
                b_dw *= b_after[None, :]
                b_dg += tl.sum(b_w * b_I * b_dw, 0)
                b_rx = (b_rx * b_B).to(TYPE)
        b_dk = tl.dot(tl.trans(load_pairs(dMqk, row, HV, i_hv, o_c, L, BONUS, C)), b_qx, b_dk, input_precision=IP)
        if LOW_RANK:
            b_dw = tl.dot(tl.trans(load_pairs(dMqw, row, HV, i_hv, o_c, L, False, C)), b_qx, b_dw, input_precision=IP)
            b_dk = tl.dot(tl.trans(load_pairs(dMrk, row, HV, i_hv, o_c, L, False, C)), b_rx, b_dk, input_precision=IP)
            b_dw = tl.dot(tl.trans(load_pairs(dMrw, row, HV, i_hv, o_c, L, False, C)), b_rx, b_dw, input_precision=IP)
        if GATED:
            b_dk *= b_I
            b_z -= b_k * b_dk
            if LOW_RANK:
                b_dw *= b_I
                b_z -= b_w * b_dw
        if BONUS:
            b_u = tl.load(u + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)  # [BK]
            b_dk += b_met[:, None] * (load_rows(q, row, sk, o_c, o_k, L, K, BK) * b_u[None, :])
        tl.store(dk + out + o_out, b_dk.to(dk.dtype.element_ty), mask=m_out)
        if LOW_RANK:
            tl.store(db + out + o_out, b_dw.to(db.dtype.element_ty), mask=m_out)
        if GATED:
            b_dg += passed(S, dS, o_k, K, V, BK, BV) * (b_before * b_after)
            b_dgs = tl.zeros([C, BK], tl.float32) + b_dg[None, :]
            b_R = tl.trans(load_sets(sets, 2 * LEVELS + 1, o_c, C))  # tokens from t on
            b_dgs = summed(b_R, b_z, b_dgs, IPG)
            if LOW_RANK or BONUS:
                b_dgs = summed(tl.trans(load_sets(sets, 3 * LEVELS + 3, o_c, C)), b_zr, b_dgs, IPG)  # tokens after t
            tl.store(dg + out + o_out, b_dgs.to(dg.dtype.element_ty), mask=m_out)
