"""Stage `grads` of the affine stage's rules, first half: what needs no gates.

The scans leave what the rule has read, X = w~ S + A v, and its gradient dX = b dS + M_qw' do. With U = T' dX every pair of a reader
(q of o's gradient, r of U) and a writer (k with v, w with X) meets in a matrix:

    dM_qk = scale do v', dM_qw = scale do X', dM_rk = U v', dM_rw = U X' for j < i;   dv = M_qk' do + A' dX + k^ dS

The pairs of q at j = i, which no decay lies between, are kept apart as `met`: the gate's gradient must not add and subtract them.
"""

import triton
import triton.language as tl

from .score import fitting
from .tile import chunk_place, load_rows, mask2


@triton.jit
def store_pairs(dM, met, p_back, b_M, scale, o_h, o_c, L, C: tl.constexpr, MET: tl.constexpr):
    """The strict lower triangle of scale * b_M [C, C] in the operands' dtype, and (with MET) its diagonal.

    fp16: brought into range, at p_back what brings it back (see `add_pairs`): gradients have no size that is known beforehand.
    """
    i, j = o_c[:, None], o_c[None, :]
    b_M *= scale
    if MET:
        tl.store(met + o_h, tl.sum(tl.where(i == j, b_M, 0.0), 1), mask=o_c < L)
    b_M = tl.where((i > j) & (i < L), b_M, 0.0)
    if dM.dtype.element_ty == tl.float16:
        fit, back = fitting(tl.abs(b_M))
        b_M *= fit
        tl.store(p_back, back)
    tl.store(dM + o_h[:, None] * C + j, b_M.to(dM.dtype.element_ty), mask=(o_c < L)[:, None])


@triton.jit
def add_pairs(b_M, b_y, b_acc, p_back, TURNED: tl.constexpr, IP: tl.constexpr):
    """acc (or None) and M y, TURNED M' y, of what `store_pairs` has left."""
    b_M = tl.trans(b_M) if TURNED else b_M
    if b_M.dtype == tl.float16:
        b_y = tl.dot(b_M, b_y, input_precision=IP) * tl.load(p_back)
        if b_acc is None:
            b_acc = b_y
        else:
            b_acc += b_y
    else:
        b_acc = tl.dot(b_M, b_y, b_acc, input_precision=IP)
    return b_acc


@triton.jit(do_not_specialize=["rows", "T", "HV"])
def grad_pair_kernel(
    do, v, X, U, chunks,  # do, v: token rows; X, U [B*T, HV, V]: U is dX, replaced
    Mqk, km, A, Tinv, dS,  # of the affine stage: [B*T, HV, C]; k^ [B*T, HV, K]; dS [slots, HV, V, K]
    dMqk, dMqw, dMrk, dMrw, met, backs, dv,  # [B*T, HV, C] four times; [2, B*T, HV] and, fp16, [slots, HV, 4] fp32; [B*T, HV, V]
    sv, rows, T, HV, scale,  # rows of do and v are sv apart; rows: B*T
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LOW_RANK: tl.constexpr, PACKED: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head)."""
    _, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED)
    if L <= 0:
        return
    TYPE: tl.constexpr = v.dtype.element_ty
    NV: tl.constexpr = (V + BV - 1) // BV  # 1: every matrix is stored where it is made, and leaves its registers
    do += i_hv * V
    v += i_hv * V
    X += i_hv * V
    U += i_hv * V
    dS += (i_slot * HV + i_hv) * V * K
    backs += (i_slot * HV + i_hv) * 4
    o_c = tl.arange(0, C)
    o_h = (row + o_c) * HV + i_hv  # [C]
    met_w = met + rows.to(tl.int64) * HV
    b_qk = tl.zeros([C, C], tl.float32)
    b_qw = tl.zeros([C, C], tl.float32)
    b_rk = tl.zeros([C, C], tl.float32)
    b_rw = tl.zeros([C, C], tl.float32)
    m_c = o_c < L
    for i_v in range(NV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = mask2(m_c, o_v, V, BV)
        o_out = o_c[:, None] * (HV * V) + o_v[None, :]
        b_do = load_rows(do, row, sv, o_c, o_v, L, V, BV)  # [C, BV]
        b_v = load_rows(v, row, sv, o_c, o_v, L, V, BV)  # [C, BV]
        if LOW_RANK:  # all that is read, before anything is computed: what waits for memory waits once
            b_A = load_rows(A + i_hv * C, row, HV * C, o_c, o_c, L, C, C)  # [C, C]
            b_x = load_rows(X, row, HV * V, o_c, o_v, L, V, BV)  # [C, BV]
            b_u = load_rows(U, row, HV * V, o_c, o_v, L, V, BV)  # [C, BV]
            b_T = load_rows(Tinv + i_hv * C, row, HV * C, o_c, o_c, L, C, C)  # [C, C]
            b_M = load_rows(Mqk + i_hv * C, row, HV * C, o_c, o_c, L, C, C)  # [C, C]
        b_qk = tl.dot(b_do, tl.trans(b_v), b_qk, input_precision=IP)
        if NV == 1:
            store_pairs(dMqk, met, backs, b_qk, scale, o_h, o_c, L, C, True)
        if LOW_RANK:
            b_qw = tl.dot(b_do, tl.trans(b_x), b_qw, input_precision=IP)
            if NV == 1:
                store_pairs(dMqw, met_w, backs + 1, b_qw, scale, o_h, o_c, L, C, True)
            b_dv = tl.dot(tl.trans(b_A), b_u, input_precision=IP)  # [C, BV]
            b_u = tl.dot(tl.trans(b_T), b_u, input_precision=IP).to(TYPE)
            tl.store(U + row * (HV * V) + o_out, b_u, mask=m_v)
            b_rk = tl.dot(b_u, tl.trans(b_v), b_rk, input_precision=IP)
            if NV == 1:
                store_pairs(dMrk, met, backs + 2, b_rk, 1.0, o_h, o_c, L, C, False)
            b_rw = tl.dot(b_u, tl.trans(b_x), b_rw, input_precision=IP)
            if NV == 1:
                store_pairs(dMrw, met, backs + 3, b_rw, 1.0, o_h, o_c, L, C, False)
            b_dv = tl.dot(tl.trans(b_M), b_do, b_dv, input_precision=IP)
            for i_k in range((K + BK - 1) // BK):
                o_k = i_k * BK + tl.arange(0, BK)
                b_k = load_rows(km + i_hv * K, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
                b_dv = tl.dot(b_k, tl.trans(load_rows(dS, 0, K, o_v, o_k, V, K, BK)), b_dv, input_precision=IP)
            tl.store(dv + o_h[:, None] * V + o_v[None, :], b_dv.to(dv.dtype.element_ty), mask=m_v)
    if NV > 1:
        store_pairs(dMqk, met, backs, b_qk, scale, o_h, o_c, L, C, True)
        if LOW_RANK:
            store_pairs(dMqw, met_w, backs + 1, b_qw, scale, o_h, o_c, L, C, True)
            store_pairs(dMrk, met, backs + 2, b_rk, 1.0, o_h, o_c, L, C, False)
            store_pairs(dMrw, met, backs + 3, b_rw, 1.0, o_h, o_c, L, C, False)
