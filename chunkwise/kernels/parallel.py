"""The parallel form where the rule adds: a block of rows from all blocks before it, quadratic in T. No T x T matrix is ever in memory.

    o_i = scale e^(G_i) x_i S + sum_{j <= i} scale (x_i.y_j) e^(G_i - G_j) z_j                          o: x, y, z = q, k, v; dq: do, v, k
    REVERSE, from the gradient dS of the last state:
    o_j = e^(G_T - G_j) x_j dS + sum_{i >= j} scale (y_i.x_j) e^(G_i - G_j) z_i                         dv: k, q, do; dk: v, do, q

as a chunk's in output.py, whose TURNED this is: keys and values have changed places (dq, dk): x and y are of value heads, z of key heads.
Between a row and a column of another block the decay is a product, e^(of the row since its block began) e^(of all blocks between)
e^(of the column to its block's end), each at most 1: factors of tokens that `factor_kernel` has left. Blocks are met from the nearest on,
so the sum of those between starts at 0 and what is large in it decays to nothing.

The gate's gradient, d_t = sum over pairs j < t <= i of their shares, is summed from the end: q.dq of readers from t on less k.dk of writers
from t on; what tokens before t have written into the last state is summed from the start. A token's own pair decays nowhere and is added
to dq and dk apart. Where a gate learns, pairs are rounded with their whole decay, so that both sums have the same numbers: what cancels,
cancels. In float32 that leaves too much, for one token's rounding is in the gradients of all before it: there a block's own pairs are
summed one by one, over j < t <= i, and only blocks are summed from the end.
"""

import triton
import triton.language as tl

from .grad import before
from .score import fitting
from .tile import (
    chunk_rows,
    decay_sums,
    load_chunk,
    load_gate,
    load_rows,
    log2_gate,
    pair_decay,
    sequence_of,
    start,
    store_chunk,
    whole,
)

START = tl.constexpr(0)  # e^G in the token's block
END = tl.constexpr(1)  # e^(G_C - G)
SUM = tl.constexpr(2)  # G, log2


@triton.jit(do_not_specialize=["T", "HV", "rows"])
def factor_kernel(
    g, chunks, factors,  # g [B*T, HV]; factors [3, HV, B*T] fp32
    T, HV, rows,
    C: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Of scalar gates, what a token has in its block of C. One program ROWS of a value head; slots are of ROWS."""
    pid = tl.program_id(0)
    i_slot = pid // HV
    i_hv = pid - i_slot * HV
    row, L = chunk_rows(chunks, i_slot.to(tl.int64), T, ROWS, PACKED)
    if L <= 0:
        return
    o_c = tl.arange(0, C)
    many = rows.to(tl.int64) * HV
    for i in range(ROWS // C):
        n = L - i * C
        b_G, b_F = decay_sums(load_gate(g, row + i * C, HV, i_hv, o_c, n, "scalar"), o_c, n, "scalar", SPLIT)  # [C]
        _, b_end = whole(b_G, b_F, o_c, C, SPLIT)
        p_f = factors + i_hv.to(tl.int64) * rows + row + i * C + o_c
        tl.store(p_f + START * many, start(b_G, b_F, SPLIT), mask=o_c < n)
        tl.store(p_f + END * many, b_end, mask=o_c < n)
        tl.store(p_f + SUM * many, b_G + b_F if SPLIT else b_G, mask=o_c < n)


@triton.jit
def column_decay(
    factors, g2, i_hv, HV, rows, row, L, o_c, GATE: tl.constexpr, REVERSE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of L rows from `row` on, a block of columns: their factors [C], and its log decay."""
    if GATE == "scalar":
        many = rows.to(tl.int64) * HV
        p_f = factors + i_hv.to(tl.int64) * rows + row
        if REVERSE:
            b_w = tl.load(p_f + START * many + o_c, mask=o_c < L, other=0.0)
        else:
            b_w = tl.load(p_f + END * many + o_c)
        total = tl.load(p_f + SUM * many + L - 1)
    else:  # a head's, g2 of every token
        n = o_c + 1 if REVERSE else C - 1 - o_c
        b_w = tl.exp2(n.to(tl.float32) * g2)
        total = L * g2
    return b_w, total


@triton.jit
def block_scores(
    x, y, b_x, row, row_y, sx, i_b, i_x, t, t_y, o_r, o_c, L, n,
    X: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, TMA: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """x.y of a block of rows and n columns from row_y on: [ROWS, C]. b_x: all of x's block, where BX >= X."""
    if BX >= X:
        b_y = load_chunk(y, row_y, sx, i_b, i_x, t_y, o_c, 0, n, X, C, BX, TMA)  # [C, BX]
        b_M = tl.dot(b_x, tl.trans(b_y), input_precision=IP)
    else:
        b_M = tl.zeros([ROWS, C], tl.float32)
        for i in range((X + BX - 1) // BX):
            b_u = load_chunk(x, row, sx, i_b, i_x, t, o_r, i * BX, L, X, ROWS, BX, TMA)  # [ROWS, BX]
            b_y = load_chunk(y, row_y, sx, i_b, i_x, t_y, o_c, i * BX, n, X, C, BX, TMA)  # [C, BX]
            b_M = tl.dot(b_u, tl.trans(b_y), b_M, input_precision=IP)
    return b_M


@triton.jit(do_not_specialize=["T", "HV", "N", "slots", "rows"])
def parallel_kernel(
    x, y, z, own, w, g, factors, chunks, first, cu_seqlens, S, o, met, ends, inner,  # x, y, z, w: token rows; own: z; g [HV] | [B*T, HV]
    sx, sz,  # rows of x and y, of z and w are so far apart
    T, HV, N, slots, rows, scale,  # rows: B*T; S [N, HV, K, V]
    X: tl.constexpr, Z: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BZ: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, LEARNS: tl.constexpr, INITIAL: tl.constexpr, REVERSE: tl.constexpr, TURNED: tl.constexpr,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One program a (value head, block of rows, block of z's columns), slots of ROWS; o [B*T, HV, Z].

    LEARNS (dq, dk; w is q, k): met [NZ, HV, B*T] fp32 takes w.o of every row but for its own pair and, REVERSE, the state's part; that goes
    into ends. In float32, where ROWS is C, met takes other blocks' pairs alone, and inner, of dq, the gate's gradient of a block's own.
    TMA: x, own, w and o are described by ROWS, y and z by C.
    """
    NZ: tl.constexpr = (Z + BZ - 1) // BZ
    NX: tl.constexpr = (X + BX - 1) // BX
    pid = tl.program_id(0)
    i_z = pid % NZ
    i_hv = pid // NZ // slots
    i_slot = pid // NZ - i_hv * slots
    if not REVERSE:
        i_slot = slots - 1 - i_slot  # those with the most columns first
    row, L = chunk_rows(chunks, i_slot.to(tl.int64), T, ROWS, PACKED)
    if L <= 0:
        return
    if PACKED:
        i_b = sequence_of(first, i_slot, N)
        bos = tl.load(cu_seqlens + i_b).to(tl.int64)
        Tn = (tl.load(cu_seqlens + i_b + 1).to(tl.int64) - bos).to(tl.int32)
    else:
        i_b = i_slot // tl.cdiv(T, ROWS)
        bos = i_b.to(tl.int64) * T
        Tn = T
    t = (row - bos).to(tl.int32)
    i_x, i_y = i_hv // GROUP, i_hv
    if TURNED:
        i_x, i_y = i_y, i_x
    TYPE: tl.constexpr = x.dtype if TMA else x.dtype.element_ty
    EXACT: tl.constexpr = LEARNS and TYPE == tl.float32
    FIT: tl.constexpr = TYPE == tl.float16  # whose range sums of many channels may leave
    o_r, o_c = tl.arange(0, ROWS), tl.arange(0, C)
    col = i_z * BZ

    b_x = None
    if NX == 1:
        b_x = load_chunk(x, row, sx, i_b, i_x, t, o_r, 0, L, X, ROWS, BX, TMA)  # [ROWS, BX]
    if FIT:  # |x.y| <= |x|_1 max |y|: pairs are so many times too small until they are summed
        b_n = tl.zeros([ROWS], tl.float32)
        for i in range(NX):
            b_u = load_chunk(x, row, sx, i_b, i_x, t, o_r, i * BX, L, X, ROWS, BX, TMA)  # [ROWS, BX]
            b_n += tl.sum(tl.abs(b_u.to(tl.float32)), 1)
        b_n = tl.ceil(tl.log2(tl.maximum(b_n * tl.abs(scale), 1.0)))
        b_fit, b_back = tl.exp2(-b_n), tl.exp2(b_n)
    b_G, b_F = decay_sums(load_gate(g, row, HV, i_hv, o_r, L, GATE), o_r, L, GATE, SPLIT)  # [ROWS]
    if REVERSE:
        _, b_row = whole(b_G, b_F, o_r, ROWS, SPLIT)
    else:
        b_row = start(b_G, b_F, SPLIT)
    g2 = 0.0
    if GATE == "head":
        g2 = log2_gate(tl.load(g + i_hv))

    b_o = tl.zeros([ROWS, BZ], tl.float32)
    between = 0.0  # log decay of the blocks between
    if REVERSE:
        t_0 = t + ROWS
        many = (tl.maximum(Tn - t_0, 0) + C - 1) // C
    else:
        t_0 = 0
        many = t // C
    for i in range(many):
        if REVERSE:
            t_y = t_0 + i * C
            n = tl.minimum(C, Tn - t_y)
        else:
            t_y = (many - 1 - i) * C
            n = C
        b_M = block_scores(x, y, b_x, row, bos + t_y, sx, i_b, i_x, t, t_y, o_r, o_c, L, n, X, ROWS, C, BX, TMA, IP)  # [ROWS, C]
        if GATE == "none":
            b_M *= scale
        else:
            b_w, total = column_decay(factors, g2, i_hv, HV, rows, bos + t_y, n, o_c, GATE, REVERSE, C)
            b_w *= tl.exp2(between) * scale
            between += total
            if LEARNS:
                b_M *= b_row[:, None]
            b_M *= b_w[None, :]
        if FIT:
            b_M *= b_fit[:, None]
        b_z = load_chunk(z, bos + t_y, sz, i_b, i_y, t_y, o_c, col, n, Z, C, BZ, TMA)  # [C, BZ]
        b_o = tl.dot(b_M.to(TYPE), b_z, b_o, input_precision=IP)
    if GATE != "none" and not LEARNS:
        b_o *= b_row[:, None]

    if EXACT:
        b_w = load_chunk(w, row, sz, i_b, i_y, t, o_r, col, L, Z, ROWS, BZ, TMA)  # [ROWS, BZ]
    if LEARNS:
        p_met = (i_z * HV + i_hv).to(tl.int64) * rows + row + o_r
    if EXACT:
        b_met = tl.sum(b_w * b_o, 1)
    b_own = tl.zeros([ROWS], tl.float32)  # of a token and itself
    for i in tl.range(ROWS // C, num_stages=1):  # the rows' own block
        b_M = block_scores(
            x, y, b_x, row, row + i * C, sx, i_b, i_x, t, t + i * C, o_r, o_c, L, L - i * C, X, ROWS, C, BX, TMA, IP
        )  # fmt: skip
        o_y = i * C + o_c
        if REVERSE:
            m = (o_r[:, None] < o_y[None, :]) if LEARNS else (o_r[:, None] <= o_y[None, :])
        else:
            m = (o_r[:, None] > o_y[None, :]) if LEARNS else (o_r[:, None] >= o_y[None, :])
        if LEARNS:
            b_own += tl.sum(tl.where(o_r[:, None] == o_y[None, :], b_M, 0.0), 1) * scale
        if GATE == "none":
            b_M = tl.where(m, b_M, 0.0)
        else:
            b_Gy = tl.gather(b_G, o_y, 0)  # [C]
            b_Fy = tl.gather(b_F, o_y, 0) if SPLIT else b_Gy
            if REVERSE:
                b_M *= pair_decay(b_Gy[None, :], b_Fy[None, :], b_G[:, None], b_F[:, None], m, SPLIT)
            else:
                b_M *= pair_decay(b_G[:, None], b_F[:, None], b_Gy[None, :], b_Fy[None, :], m, SPLIT)
        b_M *= scale
        if FIT:
            b_M *= b_fit[:, None]
        b_z = load_chunk(z, row + i * C, sz, i_b, i_y, t + i * C, o_c, col, L - i * C, Z, C, BZ, TMA)  # [C, BZ]
        if EXACT and not REVERSE:  # of token t: all that rows from t on have of columns before it
            b_E = tl.cumsum(b_M * tl.dot(b_w, tl.trans(b_z), input_precision=IP), 1)  # [ROWS, C]
            b_d = tl.sum(tl.where(o_r[:, None] > o_c[None, :], b_E, 0.0), 0)  # of the next token
            o_next = tl.where(o_c == C - 1, 0, o_c + 1)
            p_inner = inner + (i_z * HV + i_hv).to(tl.int64) * rows + row + o_next
            tl.store(p_inner, tl.where(o_c == C - 1, 0.0, b_d), mask=o_next < L)
        b_o = tl.dot(b_M.to(TYPE), b_z, b_o, input_precision=IP)
    if FIT:
        b_o *= b_back[:, None]

    o_z = col + tl.arange(0, BZ)
    if LEARNS:
        if not EXACT:  # not before: it would be held beside the pairs' products
            b_w = load_chunk(w, row, sz, i_b, i_y, t, o_r, col, L, Z, ROWS, BZ, TMA).to(tl.float32)  # [ROWS, BZ]
        if REVERSE:
            tl.store(met + p_met, b_met if EXACT else tl.sum(b_w * b_o, 1), mask=o_r < L)
    if INITIAL:
        S += (i_b.to(tl.int64) * HV + i_hv) * X * Z
        b_s = tl.zeros([ROWS, BZ], tl.float32)
        for i in range(NX):
            o_x = i * BX + tl.arange(0, BX)
            b_u = b_x
            if NX > 1:
                b_u = load_chunk(x, row, sx, i_b, i_x, t, o_r, i * BX, L, X, ROWS, BX, TMA)  # [ROWS, BX]
            if TURNED:
                b_S = tl.trans(load_rows(S, 0, X, o_z, o_x, Z, X, BX))  # [BX, BZ]
            else:
                b_S = load_rows(S, 0, Z, o_x, o_z, X, Z, BZ)  # [BX, BZ]
            if FIT:
                b_S = b_S.to(tl.float32)
                fit, back = fitting(tl.abs(b_S))
                b_s += tl.dot(b_u, (b_S * fit).to(TYPE), input_precision=IP) * back
            else:
                b_s = tl.dot(b_u, b_S.to(TYPE), b_s, input_precision=IP)
        if GATE != "none":
            b_s *= (b_row * tl.exp2(between))[:, None]
        if not REVERSE:
            b_s *= scale
        b_o += b_s
        if EXACT and not REVERSE:
            b_met += tl.sum(b_w * b_s, 1)
        if LEARNS and REVERSE:
            tl.store(ends + p_met, tl.sum(b_w * b_s, 1), mask=o_r < L)
    if LEARNS:
        if not REVERSE:
            tl.store(met + p_met, b_met if EXACT else tl.sum(b_w * b_o, 1), mask=o_r < L)
        b_o += b_own[:, None] * load_chunk(own, row, sz, i_b, i_y, t, o_r, col, L, Z, ROWS, BZ, TMA).to(tl.float32)
    OUT: tl.constexpr = o.dtype if TMA else o.dtype.element_ty
    store_chunk(o, tl.trans(b_o.to(OUT)), row, HV, i_b, i_hv, t, o_r, col, L, Z, ROWS, BZ, TMA)


@triton.jit(do_not_specialize=["T", "HV", "N", "rows"])
def parallel_gate_kernel(
    read, written, ends, inner, g, factors, cu_seqlens, S, dS, dg,  # read to inner [parts, HV, B*T]; S, dS [N, HV, K, V]; dg [B*T, HV]
    T, HV, N, rows,
    SIZE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, FINAL: tl.constexpr,
    INITIAL: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr,  # float32: BLOCK is C
):  # fmt: skip
    """dg of a sequence and value head. FINAL: the last state has a gradient, and the first part of `ends` is written over; SIZE: K * V;
    PARTS: blocks of keys."""
    pid = tl.program_id(0)
    i_n = pid // HV
    i_hv = pid - i_n * HV
    if PACKED:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        Tn = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
    else:
        bos = i_n.to(tl.int64) * T
        Tn = T
    o_b = tl.arange(0, BLOCK)
    wide = rows.to(tl.int64)
    at = i_hv * wide + bos
    many = tl.cdiv(Tn, BLOCK)
    if FINAL:
        earlier = 0.0  # what passes from the first state to the last, and what tokens so far have written there
        if INITIAL:
            total = 0.0
            if GATE == "head":
                total += Tn * log2_gate(tl.load(g + i_hv))
            else:
                blocks = tl.cdiv(Tn, C)
                for i in range(tl.cdiv(blocks, BLOCK)):
                    o = i * BLOCK + o_b
                    last = tl.minimum(o * C + C, Tn) - 1
                    total += tl.sum(tl.load(factors + SUM * HV * wide + at + last, mask=o < blocks, other=0.0), 0)
            at_S = (i_n.to(tl.int64) * HV + i_hv) * SIZE
            for i in range((SIZE + BLOCK - 1) // BLOCK):
                o = i * BLOCK + o_b
                b_S = tl.load(S + at_S + o, mask=o < SIZE, other=0.0).to(tl.float32)
                earlier += tl.sum(b_S * tl.load(dS + at_S + o, mask=o < SIZE, other=0.0), 0)
            earlier *= tl.exp2(total)
        for i in range(many):
            o = i * BLOCK + o_b
            b_d = tl.zeros([BLOCK], tl.float32)
            for j in tl.static_range(PARTS):
                b_d += tl.load(ends + at + j * HV * wide + o, mask=o < Tn, other=0.0)
            tl.store(ends + at + o, before(b_d, o_b) + earlier, mask=o < Tn)
            earlier += tl.sum(b_d, 0)
        tl.debug_barrier()
    after = 0.0
    for i in range(many):
        o = (many - 1 - i) * BLOCK + o_b
        b_d = tl.zeros([BLOCK], tl.float32)
        b_r = tl.zeros([BLOCK], tl.float32)
        b_w = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(PARTS):
            p = at + j * HV * wide + o
            b_r += tl.load(read + p, mask=o < Tn, other=0.0)
            b_w += tl.load(written + p, mask=o < Tn, other=0.0)
            if EXACT:
                b_d += tl.load(inner + p, mask=o < Tn, other=0.0)
        if EXACT:
            after -= tl.sum(b_w, 0)  # what passes the block
            b_dg = b_d + tl.cumsum(b_r, 0, reverse=True) + before(b_w, o_b) + after
            after += tl.sum(b_r, 0)
        else:
            b_dg = tl.cumsum(b_r - b_w, 0, reverse=True) + after
            after += tl.sum(b_r - b_w, 0)
        if FINAL:
            b_dg += tl.load(ends + at + o, mask=o < Tn, other=0.0)
        tl.store(dg + (bos + o) * HV + i_hv, b_dg.to(dg.dtype.element_ty), mask=o < Tn)
