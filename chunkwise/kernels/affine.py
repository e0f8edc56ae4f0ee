"""Stage `affine`: what a chunk makes of the state it meets, whatever its readers and writers do inside it (dplr; and q that reads early).

    X = w~ S + A v;   o = q^ S + M_qk v + M_qw X;   S <- e^(G_C) S + b' X + k^' v

    T = (I - M_rw)^-1;  A = T M_rk;  w~ = T (r e^G_)                    (w: the rule's b, which writes what r, the rule's a, has read)
    b = w e^(G_C - G);  q^ = q e^G, k^ = k e^(G_C - G): queries and keys that are not forgotten stay as they are

A reader that reads before its own token forgets has G_ = G - g in G's place and meets only tokens before it: r always, q with a bonus.
First the matrices of all tokens, then the operands, which need no pairs: the backward pass makes those again from matrices that were kept.
Scores as in score.py and bounded.py: from the chunk's start where no channel has forgotten more than 2^LIMIT up to a row, else by halves;
each row is decided by the gates up to it, so it hears nothing of later tokens, rounding included. Rows of the second kind are left to a
second launch, with FAR.
"""

import triton
import triton.language as tl

from .inverse import invert
from .score import gate_parts, gate_sums, load_sets, meets
from .tile import RCP_LN2, chunk_place, dense_place, load_chunk, load_rows, log2_gate, mask2, row_sums


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


@triton.jit
def near_scores(
    q, k, a, b, g, sets, sk, sa, HV, row, L, o_c, i_b, i_h, i_a, i_hv, t,  # as affine_score_kernel; the chunk's sequence, heads and token
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, LOW_RANK: tl.constexpr, BONUS: tl.constexpr,
    LIMIT: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Products of all rows, and n, how many of the first have decays within reach; what the rows from n on get is zero."""
    TYPE: tl.constexpr = k.dtype if TMA else k.dtype.element_ty
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or ((g.dtype if TMA else g.dtype.element_ty) == TYPE)
    b_qk = tl.zeros([C, C], tl.float32)
    b_qw = tl.zeros([C, C], tl.float32)
    b_rk = tl.zeros([C, C], tl.float32)
    b_rw = tl.zeros([C, C], tl.float32)
    b_low = tl.zeros([C], tl.float32)  # the least G of each row
    for i_k in range((K + BK - 1) // BK):
        b_q = load_chunk(q, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
        b_k = load_chunk(k, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
        if LOW_RANK:
            b_r = load_chunk(a, row, sa, i_b, i_a, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
            b_w = load_chunk(b, row, sa, i_b, i_a, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
        if GATED:
            b_hi, b_lo = gate_parts(load_chunk(g, row, HV * K, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA), TYPE)
            b_G = gate_sums(load_sets(sets, 2 * LEVELS + 1, o_c, C), b_hi, b_lo, EXACT, IPG)  # [C, BK]
            b_low = tl.minimum(b_low, tl.min(b_G, 1))
            b_I = tl.exp2(tl.minimum(-b_G, LIMIT))
            if LOW_RANK or BONUS:
                b_D = tl.exp2(early(b_G, b_hi, b_lo, sets, o_c, C, EXACT, IPG))
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
    n = tl.min(tl.where(b_low >= -LIMIT, C, o_c), 0)  # NaN is out of reach
    if GATED:
        m_near = (o_c < n)[:, None]
        b_qk = tl.where(m_near, b_qk, 0.0)
        if LOW_RANK:
            b_qw = tl.where(m_near, b_qw, 0.0)
            b_rk = tl.where(m_near, b_rk, 0.0)
            b_rw = tl.where(m_near, b_rw, 0.0)
    return b_qk, b_qw, b_rk, b_rw, n


@triton.jit
def far_scores(
    x, sx, y, sy, z, sz, g, sets, HV, row, L, o_c,  # token rows of a reader, of k and of w
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, TWO: tl.constexpr,
    EARLY: tl.constexpr,  # x reads before its token forgets, and does not meet it
    IP: tl.constexpr, IPG: tl.constexpr,
):  # fmt: skip
    """x y' and (with TWO) x z' [C, C] of tokens that meet, with what decays between them, level by level."""
    TYPE: tl.constexpr = x.dtype.element_ty
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or (g.dtype.element_ty == TYPE)
    b_xy = tl.zeros([C, C], tl.float32)
    b_xz = tl.zeros([C, C], tl.float32)
    b_dy = tl.zeros([C], tl.float32)
    b_dz = tl.zeros([C], tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        b_x = load_rows(x, row, sx, o_c, o_k, L, K, BK)  # [C, BK]
        b_y = load_rows(y, row, sy, o_c, o_k, L, K, BK)  # [C, BK]
        b_z = b_y
        if TWO:
            b_z = load_rows(z, row, sz, o_c, o_k, L, K, BK)  # [C, BK]
        if not EARLY:
            b_dy += tl.sum(b_x.to(tl.float32) * b_y.to(tl.float32), 1)
            if TWO:
                b_dz += tl.sum(b_x.to(tl.float32) * b_z.to(tl.float32), 1)
        b_hi, b_lo = gate_parts(load_rows(g, row, HV * K, o_c, o_k, L, K, BK), TYPE)
        for level in range(LEVELS):
            o_row, o_col = meets(o_c, level)
            m = o_row[:, None] == o_col[None, :]
            b_D = tl.exp2(gate_sums(load_sets(sets, level, o_c, C), b_hi, b_lo, EXACT, IPG))  # [C, BK]
            b_B = b_D
            if EARLY:
                b_B = tl.exp2(gate_sums(load_sets(sets, 2 * LEVELS + 3 + level, o_c, C), b_hi, b_lo, EXACT, IPG))
            b_xx = (b_x * b_B).to(TYPE)
            b_xy += tl.where(m, tl.dot(b_xx, tl.trans((b_y * b_D).to(TYPE)), input_precision=IP), 0.0)
            if TWO:
                b_xz += tl.where(m, tl.dot(b_xx, tl.trans((b_z * b_D).to(TYPE)), input_precision=IP), 0.0)
    if not EARLY:
        m = o_c[:, None] == o_c[None, :]
        b_xy = tl.where(m, b_dy[:, None], b_xy)
        b_xz = tl.where(m, b_dz[:, None], b_xz)
    return b_xy, b_xz


@triton.jit(do_not_specialize=["T", "HV"])
def affine_score_kernel(
    q, k, a, b, g, u, chunks,  # q, k: token rows; a, b: token rows; g [B*T, HV, K]; u [HV, K]
    sets,  # as in score.py, and those of readers before their token forgets behind them
    near,  # [slots, HV] uint8: how many of a chunk's first rows are in reach; read with FAR, else written
    M, Tinv, A, Mqw,  # [B*T, HV, C]; the last three only with LOW_RANK
    sk, sa, T, HV, scale,  # rows of q and k, of a and b are so far apart
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, GROUP_A: tl.constexpr,  # value heads that share q and k; a and b
    GATED: tl.constexpr, LOW_RANK: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr, FAR: tl.constexpr,
    LIMIT: tl.constexpr,
    IP: tl.constexpr, IPG: tl.constexpr, IPT: tl.constexpr,  # of products; of sums of gates; of the fp32 products that make T
    TMA: tl.constexpr,  # q, k, a, b, g are descriptors of [B, heads, T, columns], not pointers; never with FAR
):  # fmt: skip
    """One program a (chunk, value head)."""
    _, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED)
    if L <= 0:
        return
    if FAR:
        n = tl.load(near + i_slot * HV + i_hv).to(tl.int32)
        if n >= L:
            return
    TYPE: tl.constexpr = M.dtype.element_ty
    i_b, t = dense_place(i_slot, T, C)
    o_c = tl.arange(0, C)
    i, j = o_c[:, None], o_c[None, :]
    i_h, i_a = i_hv // GROUP, i_hv // GROUP_A
    if not TMA:
        pq, pk, pa, pb, pg = q + i_h * K, k + i_h * K, a + i_a * K, b + i_a * K, g + i_hv * K
    o_h = (row + o_c) * HV + i_hv  # [C]
    o_M = o_h[:, None] * C + j
    if FAR:
        m_M = ((o_c >= n) & (o_c < L))[:, None]
        if LOW_RANK:
            b_rk, b_rw = far_scores(pa, sa, pk, sk, pb, sa, pg, sets, HV, row, L, o_c, K, C, BK, True, True, IP, IPG)
    else:
        b_qk, b_qw, b_rk, b_rw, n = near_scores(
            q, k, a, b, g, sets, sk, sa, HV, row, L, o_c, i_b, i_h, i_a, i_hv, t, K, C, BK, GATED, LOW_RANK, BONUS, LIMIT, IP, IPG, TMA
        )
        m_M = (o_c < tl.minimum(n, L))[:, None]
        if GATED:
            tl.store(near + i_slot * HV + i_hv, n.to(tl.uint8))
    if LOW_RANK:
        b_T = invert(tl.where(i > j, b_rw, 0.0), IPT).to(TYPE)  # [C, C]
        tl.store(Tinv + o_M, b_T, mask=m_M)
        b_A = tl.dot(b_T, tl.where(i > j, b_rk, 0.0).to(TYPE), input_precision=IP).to(TYPE)  # [C, C]
        tl.store(A + o_M, b_A, mask=m_M)
    if FAR:
        b_qk, b_qw = far_scores(pq, sk, pk, sk, pb, sa, pg, sets, HV, row, L, o_c, K, C, BK, LOW_RANK, BONUS, IP, IPG)
    b_qk = tl.where((i > j) if BONUS else (i >= j), b_qk * scale, 0.0)
    if LOW_RANK:
        b_qw = tl.where(i >= j, b_qw * scale, 0.0).to(TYPE)
        tl.store(Mqw + o_M, b_qw, mask=m_M)
    if BONUS:
        b_met = tl.zeros([C], tl.float32)  # the bonus on a token's own pair
        for i_k in range((K + BK - 1) // BK):
            o_k = i_k * BK + tl.arange(0, BK)
            b_u = tl.load(u + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)  # [BK]
            b_k = load_chunk(k, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA).to(tl.float32)  # [C, BK]
            b_met += row_sums(load_chunk(q, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA) * b_k * b_u[None, :])
        b_qk = tl.where(i == j, b_met[:, None] * scale, b_qk)
    tl.store(M + o_M, b_qk.to(TYPE), mask=m_M)


@triton.jit(do_not_specialize=["T", "HV"])
def affine_kernel(
    q, k, a, b, g, chunks, sets, Tinv,  # as affine_score_kernel
    qm, wm, km, bm, decay,  # q^, w~, k^, b [B*T, HV, K]; decay [slots, HV, K]: G_C
    near, middle,  # with HALVES: [slots, HV, NK] uint8, whether both halves of a chunk are in reach; [slots, HV, K] what its first forgets
    sk, sa, T, HV, scale,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GROUP_A: tl.constexpr,
    GATED: tl.constexpr, LOW_RANK: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr,
    HALVES: tl.constexpr,  # what the gradients ask of the chunk
    LIMIT: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head, block of keys)."""
    NK: tl.constexpr = (K + BK - 1) // BK
    i_k, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED, NK)
    if L <= 0:
        return
    TYPE: tl.constexpr = k.dtype.element_ty
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or (g.dtype.element_ty == TYPE)
    o_c, o_k = tl.arange(0, C), i_k * BK + tl.arange(0, BK)
    m_k = o_k < K
    o_h = (row + o_c) * HV + i_hv  # [C]
    o_out = o_h[:, None] * K + o_k[None, :]
    m_out = mask2(o_c < L, o_k, K, BK)
    # all that is read, before anything is computed: what waits for memory waits once
    if GATED:
        b_g = load_rows(g + i_hv * K, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
    b_q = load_rows(q + i_hv // GROUP * K, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
    b_k = load_rows(k + i_hv // GROUP * K, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
    if LOW_RANK:
        b_r = load_rows(a + i_hv // GROUP_A * K, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
        b_w = load_rows(b + i_hv // GROUP_A * K, row, sa, o_c, o_k, L, K, BK)  # [C, BK]
        b_T = load_rows(Tinv + i_hv * C, row, HV * C, o_c, o_c, L, C, C)  # [C, C]
    b_q = b_q.to(tl.float32) * scale
    b_all = tl.zeros([BK], tl.float32)
    if GATED:
        b_all = tl.sum(log2_gate(b_g), 0)
        if HALVES:
            b_half = tl.sum(tl.where(o_c[:, None] < C // 2, log2_gate(b_g), 0.0), 0)  # [BK]
            ok = tl.min(tl.minimum(b_half, b_all - b_half), 0) >= -LIMIT  # NaN is not near
            tl.store(near + (i_slot * HV + i_hv) * NK + i_k, ok.to(tl.uint8))
            tl.store(middle + (i_slot * HV + i_hv) * K + o_k, b_half, mask=m_k)
        b_hi, b_lo = gate_parts(b_g, TYPE)
        b_G = gate_sums(load_sets(sets, 2 * LEVELS + 1, o_c, C), b_hi, b_lo, EXACT, IPG)  # [C, BK]
        if LOW_RANK or BONUS:
            b_B = tl.exp2(early(b_G, b_hi, b_lo, sets, o_c, C, EXACT, IPG))
        b_q *= b_B if BONUS else tl.exp2(b_G)
        if g.dtype.element_ty == tl.bfloat16:  # sums without rounding errors that matter to 8 bits
            b_E = tl.exp2(tl.sum(tl.where(o_c[:, None] == C - 1, b_G, 0.0), 0)[None, :] - b_G)
        else:
            b_E = tl.exp2(gate_sums(load_sets(sets, 2 * LEVELS + 2, o_c, C), b_hi, b_lo, EXACT, IPG))
        b_k = b_k * b_E
    tl.store(decay + (i_slot * HV + i_hv) * K + o_k, b_all, mask=m_k)
    if LOW_RANK:
        if GATED:
            b_r = (b_r * b_B).to(TYPE)
            b_w = (b_w * b_E).to(TYPE)
        tl.store(bm + o_out, b_w, mask=m_out)
        b_r = tl.dot(b_T, b_r, input_precision=IP).to(TYPE)
        tl.store(wm + o_out, b_r, mask=m_out)
    tl.store(km + o_out, b_k.to(TYPE), mask=m_out)
    tl.store(qm + o_out, b_q.to(TYPE), mask=m_out)
