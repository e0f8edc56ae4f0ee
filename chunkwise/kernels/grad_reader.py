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
from .grad_pair import add_pairs
from .score import add_sums, gate_parts, gate_sums, load_sets
from .tile import RCP_LN2, chunk_place, column_sums, dense_place, load_rows, store_chunk


@triton.jit
def from_state(x, S, row, sx, o_c, o_k, L, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               IP: tl.constexpr):  # fmt: skip
    """x S [C, BK] of values x in token rows and states S [V, K]."""
    b_x = tl.zeros([C, BK], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_S = load_rows(S, 0, K, o_v, o_k, V, K, BK)  # [BV, BK]
        b_x = tl.dot(load_rows(x, row, sx, o_c, o_v, L, V, BV), b_S, b_x, input_precision=IP)
    return b_x


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
    """For every token t the sum of z [C, BK] from t on and (with EARLY) of zr after t. Terms of both signs."""
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    b_R = tl.trans(load_sets(sets, 2 * LEVELS + 1, o_c, C))
    if TYPE == tl.float32:
        b_out = tl.dot(b_R, b_z, input_precision=IP)
        if EARLY:
            b_out = tl.dot(tl.trans(load_sets(sets, 3 * LEVELS + 3, o_c, C)), b_zr, b_out, input_precision=IP)
    else:
        if EARLY:
            b_z += b_zr
        b_out = add_sums(b_R, b_z, None, TYPE, False, True, IP)
        if EARLY:
            b_out -= b_zr
    return b_out


@triton.jit
def around_middle(b_g, sets, middle, decay, i_block, o_c, o_k, K: tl.constexpr, C: tl.constexpr, TYPE: tl.constexpr, IPG: tl.constexpr):
    """(G less G at the chunk's middle, the same of readers that read early [C, BK]; e^ of the first and of the other half's sums [BK])."""
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or (b_g.dtype == TYPE)
    b_hi, b_lo = gate_parts(b_g, TYPE)
    b_E = gate_sums(load_sets(sets, 2 * LEVELS, o_c, C), b_hi, b_lo, EXACT, IPG)  # [C, BK]
    b_first = tl.load(middle + i_block * K + o_k, mask=o_k < K, other=0.0)  # [BK]
    b_rest = tl.load(decay + i_block * K + o_k, mask=o_k < K, other=0.0) - b_first
    return b_E, b_E - b_g.to(tl.float32) * RCP_LN2, tl.exp2(b_first), tl.exp2(b_rest)


@triton.jit(do_not_specialize=["rows", "T", "HV"])
def grad_reader_kernel(
    q, k, a, b, g, u, do, U, chunks,  # as affine_kernel and grad_pair_kernel
    sets,
    near, middle, decay,  # of the affine stage: [slots, HV, blocks of keys] uint8; [slots, HV, K]: what the first half and the whole forget
    dMqk, dMqw, dMrk, dMrw, met, backs, S,  # S [slots, HV, V, K]
    dq, da, dg, du,  # [B*T, HV, K]; dg fp32, the readers' part; du [slots, HV, K] fp32
    sk, sa, sv, rows, T, HV, scale,  # rows: B*T
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, GROUP_A: tl.constexpr,
    GATED: tl.constexpr, LOW_RANK: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr,
    IP: tl.constexpr, IPG: tl.constexpr,
    TMA: tl.constexpr,  # dq, da, dg are descriptors of [B, heads, T, columns], S of its shape, not pointers
):  # fmt: skip
    """Gradients of q and a. One program a (chunk, value head, block of keys)."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    i_k, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED, BLOCKS)
    i_block = i_slot * HV + i_hv
    p_back = backs + i_block * 4
    if L <= 0:
        return
    TYPE: tl.constexpr = k.dtype.element_ty
    OUT: tl.constexpr = dq.dtype if TMA else dq.dtype.element_ty
    OUT_A: tl.constexpr = da.dtype if TMA else da.dtype.element_ty
    i_b, t = dense_place(i_slot, T, C)
    o_c = tl.arange(0, C)
    o_v = tl.arange(0, BV)
    q += i_hv // GROUP * K
    k += i_hv // GROUP * K
    a += i_hv // GROUP_A * K
    b += i_hv // GROUP_A * K
    g += i_hv * K
    do += i_hv * V
    U += i_hv * V
    if GATED:
        if tl.load(near + i_block * BLOCKS + i_k) == 0:
            return
    m_c = o_c < L
    b_qk = load_rows(dMqk + i_hv * C, row, HV * C, o_c, o_c, L, C, C)  # [C, C]
    b_met = tl.load(met + (row + o_c) * HV + i_hv, mask=m_c, other=0.0)  # [C]
    if BV >= V:
        b_do = load_rows(do, row, sv, o_c, o_v, L, V, BV)  # [C, BV]
    if LOW_RANK:
        b_met_w = tl.load(met + (rows.to(tl.int64) + row + o_c) * HV + i_hv, mask=m_c, other=0.0)  # [C]
        if BV >= V:
            b_u = load_rows(U, row, HV * V, o_c, o_v, L, V, BV)  # [C, BV]
        b_qw = load_rows(dMqw + i_hv * C, row, HV * C, o_c, o_c, L, C, C)  # [C, C]
        b_rk = load_rows(dMrk + i_hv * C, row, HV * C, o_c, o_c, L, C, C)
        b_rw = load_rows(dMrw + i_hv * C, row, HV * C, o_c, o_c, L, C, C)
    o_k = i_k * BK + tl.arange(0, BK)
    # all that is read, before anything is computed: what waits for memory waits once
    if GATED:
        b_g = load_rows(g, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
    b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
    b_q = load_rows(q, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
    b_ky, b_wy = b_k, b_k
    if LOW_RANK:
        b_w = load_rows(b, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
        b_r = load_rows(a, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
        b_wy = b_w
    if BV >= V:
        b_S = load_state(S, i_slot, i_hv, HV, 0, i_k, K, V, BK, BV, TMA)  # [BV, BK]
    if GATED:
        b_E, b_B, b_before, _ = around_middle(b_g, sets, middle, decay, i_block, o_c, o_k, K, C, TYPE, IPG)
        b_I = tl.exp2(-b_E)
        b_ky = (b_k * b_I).to(TYPE)
        if LOW_RANK:
            b_wy = (b_w * b_I).to(TYPE)
    if BV >= V:
        b_dx = tl.dot(b_do, b_S, input_precision=IP)
    else:
        b_dx = from_state(do, S + i_block * V * K, row, sv, o_c, o_k, L, K, V, C, BK, BV, IP)
    b_dx *= scale
    if GATED:
        b_dx *= b_before[None, :]
    b_dx = add_pairs(b_qk, b_ky, b_dx, p_back, False, IP)
    if LOW_RANK:
        b_dx = add_pairs(b_qw, b_wy, b_dx, p_back + 1, False, IP)
    if GATED:
        b_dx *= tl.exp2(b_B if BONUS else b_E)
        b_z = b_q * b_dx
        b_zr = b_z
    b_x = b_met[:, None] * b_k  # [C, BK]
    if BONUS:
        tl.store(du + i_block * K + o_k, tl.sum(b_q * b_x, 0), mask=o_k < K)
        b_x *= tl.load(u + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    b_dx += b_x
    if LOW_RANK:
        b_dx += b_met_w[:, None] * b_w
    store_chunk(dq, tl.trans(b_dx.to(OUT)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)
    if LOW_RANK:
        if BV >= V:
            b_dx = tl.dot(b_u, b_S, input_precision=IP)
        else:
            b_dx = from_state(U, S + i_block * V * K, row, HV * V, o_c, o_k, L, K, V, C, BK, BV, IP)
        if GATED:
            b_dx *= b_before[None, :]
        b_dx = add_pairs(b_rk, b_ky, b_dx, p_back + 2, False, IP)
        b_dx = add_pairs(b_rw, b_wy, b_dx, p_back + 3, False, IP)
        if GATED:
            b_dx *= tl.exp2(b_B)
            b_zr = b_r * b_dx
        store_chunk(da, tl.trans(b_dx.to(OUT_A)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)
    if GATED:
        if BONUS:
            b_z = tl.zeros([C, BK], tl.float32)
        b_dg = later(sets, b_z, b_zr, o_c, C, TYPE, LOW_RANK or BONUS, IPG)  # [C, BK]
        store_chunk(dg, tl.trans(b_dg), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)


@triton.jit(do_not_specialize=["rows", "T", "HV"])
def grad_writer_kernel(
    q, k, a, b, g, u, v, X, chunks,  # as grad_reader_kernel
    sets, near, middle, decay, dMqk, dMqw, dMrk, dMrw, met, backs, S, dS,
    dk, db, part, dg,  # part: dg of grad_reader_kernel
    sk, sa, sv, rows, T, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, GROUP_A: tl.constexpr,
    GATED: tl.constexpr, LOW_RANK: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr,
    TMA: tl.constexpr,  # dk, db, dg are descriptors as there, S and dS too
):  # fmt: skip
    """Gradients of k, b and the gate. One program a (chunk, value head, block of keys)."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    i_k, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED, BLOCKS)
    i_block = i_slot * HV + i_hv
    p_back = backs + i_block * 4
    if L <= 0:
        return
    if GATED:
        if tl.load(near + i_block * BLOCKS + i_k) == 0:
            return
    TYPE: tl.constexpr = k.dtype.element_ty
    OUT: tl.constexpr = dk.dtype if TMA else dk.dtype.element_ty
    OUT_A: tl.constexpr = db.dtype if TMA else db.dtype.element_ty
    i_b, t = dense_place(i_slot, T, C)
    o_c = tl.arange(0, C)
    o_v = tl.arange(0, BV)
    q += i_hv // GROUP * K
    k += i_hv // GROUP * K
    a += i_hv // GROUP_A * K
    b += i_hv // GROUP_A * K
    g += i_hv * K
    v += i_hv * V
    X += i_hv * V
    part += i_hv * K
    m_c = o_c < L
    o_S = i_block * V * K
    o_k = i_k * BK + tl.arange(0, BK)
    if BV >= V:
        b_dS = load_state(dS, i_slot, i_hv, HV, 0, i_k, K, V, BK, BV, TMA)  # [BV, BK]
    if GATED:
        if BV >= V:
            b_S = load_state(S, i_slot, i_hv, HV, 0, i_k, K, V, BK, BV, TMA)  # [BV, BK]
            b_dg = column_sums(b_S.to(tl.float32) * b_dS.to(tl.float32))  # [BK]
        else:
            b_dg = passed(S + o_S, dS + o_S, o_k, K, V, BK, BV)
    b_qk = load_rows(dMqk + i_hv * C, row, HV * C, o_c, o_c, L, C, C)  # [C, C]
    b_met = tl.load(met + (row + o_c) * HV + i_hv, mask=m_c, other=0.0)  # [C]
    if BV >= V:
        b_v = load_rows(v, row, sv, o_c, o_v, L, V, BV)  # [C, BV]
    if LOW_RANK:
        b_met_w = tl.load(met + (rows.to(tl.int64) + row + o_c) * HV + i_hv, mask=m_c, other=0.0)  # [C]
        if BV >= V:
            b_x = load_rows(X, row, HV * V, o_c, o_v, L, V, BV)  # [C, BV]
        b_qw = load_rows(dMqw + i_hv * C, row, HV * C, o_c, o_c, L, C, C)  # [C, C]
        b_rk = load_rows(dMrk + i_hv * C, row, HV * C, o_c, o_c, L, C, C)
        b_rw = load_rows(dMrw + i_hv * C, row, HV * C, o_c, o_c, L, C, C)
    if GATED:
        b_g = load_rows(g, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
        b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
    b_q = load_rows(q, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
    b_qx = b_q
    if LOW_RANK:
        b_rx = load_rows(a, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
        if GATED:
            b_w = load_rows(b, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
    if GATED:
        b_E, b_B, b_before, b_after = around_middle(b_g, sets, middle, decay, i_block, o_c, o_k, K, C, TYPE, IPG)
        b_qx = (b_q * tl.exp2(b_B if BONUS else b_E)).to(TYPE)
        if LOW_RANK:
            b_rx = (b_rx * tl.exp2(b_B)).to(TYPE)
        b_E = tl.exp2(-b_E)
    if BV >= V:
        b_dy = tl.dot(b_v, b_dS, input_precision=IP)
    else:
        b_dy = from_state(v, dS + o_S, row, sv, o_c, o_k, L, K, V, C, BK, BV, IP)
    if GATED:
        b_dg *= b_before * b_after
        b_dy *= b_after[None, :]
        b_y = b_k * b_E  # [C, BK]
        b_dg += tl.sum(b_y * b_dy, 0)  # of the state at the chunk's end
    b_dy = add_pairs(b_qk, b_qx, b_dy, p_back, True, IP)
    if LOW_RANK:
        b_dy = add_pairs(b_rk, b_rx, b_dy, p_back + 2, True, IP)
    if GATED:
        b_z = b_y * b_dy
        b_dy *= b_E
    b_y = b_met[:, None] * b_q  # [C, BK]
    if BONUS:
        b_y *= tl.load(u + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    store_chunk(dk, tl.trans((b_dy + b_y).to(OUT)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)
    if LOW_RANK:
        if BV >= V:
            b_dy = tl.dot(b_x, b_dS, input_precision=IP)
        else:
            b_dy = from_state(X, dS + o_S, row, HV * V, o_c, o_k, L, K, V, C, BK, BV, IP)
        if GATED:
            b_dy *= b_after[None, :]
            b_y = b_w * b_E  # [C, BK]
            b_dg += tl.sum(b_y * b_dy, 0)
        b_dy = add_pairs(b_qw, b_qx, b_dy, p_back + 1, True, IP)
        b_dy = add_pairs(b_rw, b_rx, b_dy, p_back + 3, True, IP)
        if GATED:
            b_z += b_y * b_dy
            b_dy *= b_E
        b_dy += b_met_w[:, None] * b_q
        store_chunk(db, tl.trans(b_dy.to(OUT_A)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)
    if GATED:
        b_dgs = load_rows(part, row, HV * K, o_c, o_k, L, K, BK) + b_dg[None, :]
        b_dgs = (b_dgs - later(sets, b_z, b_z, o_c, C, TYPE, False, IPG)).to(dg.dtype if TMA else dg.dtype.element_ty)
        store_chunk(dg, tl.trans(b_dgs), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)
