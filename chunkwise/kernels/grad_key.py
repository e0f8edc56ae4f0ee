"""Stage `grads` for gates per key channel, of chunks whose decays stay in reach: the formulas of grad.py, with decays inside the products.

No channel forgets more than 2^LIMIT in the chunk (bounded.py notes which chunks are so; grad_key_blocks.py does the others), so all pairs
meet around its start: the operands are those of the scans, scale q e^G, e e^G and k~ = k e^(G_C - G), and e^-G = e^-G_C k~ / k.
With y = v | X, D = beta U (dv), A = do y' for j <= i and B = D X' for j < i, undecayed and the same for all channels:

    q_ = do S' + e^-G_C A k~      dq = scale e^G q_
    r_ = D S' + e^-G_C B k~       de = -e^G r_, dbeta = (D.v - (e e^G).r_) / beta
    k_ = e^G_C (y dS') + A' (scale q e^G) - B' (e e^G)      dk = e^-G k_ (+ de where e = k)
    dg_t = S dS e^G_C + the sum over tokens from t on of (scale q e^G) q_ - (e e^G) r_ - e^-G_C k~ k_, and over all of k~ (y dS')

A, B and their transposes stay in registers, as left operands; a block of keys needs few beside them. What meets on both sides of t
cancels, as the operands are the same.
"""

import triton
import triton.language as tl

from .grad import load_state
from .score import add_sums, fitting, gate_parts, gate_sums, load_sets
from .tile import chunk_place, dense_place, load_chunk, load_rows, load_strength, row_sums, shared_strength, store_chunk


@triton.jit(do_not_specialize=["T", "HV"])
def grad_key_kernel(
    qd, kd, kr, g, beta, v, do, y, D, chunks,  # qd, kd, kr, g [B*T, HV, K]; v, do, y (v or X): token rows; beta [B*T, HV]; D [B*T, HV, V]
    sets, near, decay,  # sets as in score.py; near [slots, HV] uint8; decay [slots, HV, K]: G_C, log2 units
    S, dS,  # [slots, HV, V, K]
    dq, de, dk, dg, dbeta,  # dq, de, dk, dg [B*T, HV, K]; dbeta [B*T, HV, PARTS] fp32, to be summed
    sv, sy, T, HV, scale,  # rows of v, do; of y are so far apart
    rest,  # what dS and qd lack, where the rule adds
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, ERASE: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr,  # of products; of sums of gates
    TMA: tl.constexpr,  # do, y, D, dq, de, dk, dg are descriptors of [B, heads, T, columns], S, dS of their shape, not pointers
):  # fmt: skip
    """One program a (chunk, value head), block of keys by block of keys. All V values at once: BV >= V."""
    _, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED)
    if L <= 0:
        return
    if tl.load(near + i_slot * HV + i_hv) < C:
        return
    TYPE: tl.constexpr = kr.dtype.element_ty
    OUT: tl.constexpr = dk.dtype if TMA else dk.dtype.element_ty
    GATE: tl.constexpr = g.dtype.element_ty
    SUMS: tl.constexpr = sets.dtype.element_ty  # bf16 of fp16 operands too: R in both would leave room for one program of KDA, not two
    EXACT: tl.constexpr = (TYPE == tl.float32) or (GATE == SUMS)
    NK: tl.constexpr = (K + BK - 1) // BK
    FEW: tl.constexpr = min(BV, 32)
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    i_b, t = dense_place(i_slot, T, C)
    o_c, o_v, o_k = tl.arange(0, C), tl.arange(0, BV), tl.arange(0, BK)
    m_c = o_c < L
    i, j = o_c[:, None], o_c[None, :]
    o_h = (row + o_c) * HV + i_hv  # [C]
    p_all = decay + (i_slot * HV + i_hv) * K
    first = (row * HV + i_hv) * K
    o_in = i * (HV * K) + o_k[None, :]  # 32 bits: the host keeps C * stride below 2^31
    qd, kr, g = qd + first, kr + first, g + first
    m_in = m_c[:, None] & (o_k < K)[None, :]
    # what a block of keys reads by pointers is asked for a block ahead
    b_gn = tl.load(g + o_in, mask=m_in, other=0.0)  # [C, BK]
    b_kn = tl.load(kr + o_in, mask=m_in, other=0.0)
    if DELTA:
        kd += first
        b_v = load_rows(v + i_hv * V, row, sv, o_c, o_v, L, V, BV)  # [C, BV]
        b_unit, b_rest = shared_strength(load_strength(beta, row, HV, i_hv, o_c, L, USE_BETA).to(tl.float32), TYPE)  # [C]
    b_do = load_chunk(do, row, sv, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]
    b_y = load_chunk(y, row, sy, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]
    b_A = tl.where(j <= i, tl.dot(b_do, tl.trans(b_y), input_precision=IP), 0.0)  # [i, j]
    b_B = b_A
    if DELTA:
        b_D = load_chunk(D, row, sy, i_b, i_hv, t, o_c, 0, L, V, C, BV, TMA)  # [C, BV]
        b_B = tl.where(j < i, tl.dot(b_D, tl.trans(b_y), input_precision=IP), 0.0)  # [i, j]
    if TYPE == tl.float16:
        fit, back = fitting(tl.maximum(tl.abs(b_A), tl.abs(b_B)))
        b_A *= fit
        b_B *= fit
    b_A = b_A.to(TYPE)
    b_At = tl.trans(b_A)
    if DELTA:
        b_Bt = tl.trans((b_B * -b_rest[:, None]).to(TYPE))
        b_B = b_B.to(TYPE)
        b_dbeta = row_sums(b_D.to(tl.float32) * b_v.to(tl.float32))  # [C]
    b_R = load_sets(sets, 2 * LEVELS + 1, o_c, C)  # [C, C]
    b_ones = tl.full([C, FEW], 1.0, tl.float32).to(SUMS)
    b_every = tl.full([C, C], 1.0, tl.float32).to(SUMS)
    for i_k in range(NK):
        b_g, b_k = b_gn, b_kn
        b_q = tl.load(qd + o_in, mask=m_in, other=0.0)  # [C, BK]
        if DELTA:
            b_e = tl.load(kd + i_k * BK + o_in, mask=m_in, other=0.0)  # [C, BK]
        b_all = tl.load(p_all + i_k * BK + o_k, mask=i_k * BK + o_k < K, other=0.0)  # [BK]
        qd, kr, g = qd + BK, kr + BK, g + BK
        m_in = m_c[:, None] & (o_k < K - (i_k + 1) * BK)[None, :]
        b_gn = tl.load(g + o_in, mask=m_in, other=0.0)
        b_kn = tl.load(kr + o_in, mask=m_in, other=0.0)
        b_S = load_state(S, i_slot, i_hv, HV, 0, i_k, K, V, BK, BV, TMA)  # [BV, BK]
        b_dS = load_state(dS, i_slot, i_hv, HV, 0, i_k, K, V, BK, BV, TMA)  # [BV, BK]
        b_hi, b_lo = gate_parts(b_g, SUMS)
        b_E = gate_sums(b_R, b_hi, b_lo, EXACT, IPG)  # [C, BK] G
        b_from = tl.exp2(-b_all)[None, :]  # e^-G_C
        b_pair = b_from * back if TYPE == tl.float16 else b_from
        b_all = tl.exp2(b_all)[None, :]
        b_P = tl.sum(tl.reshape(b_S.to(tl.float32) * b_dS.to(tl.float32), [BV // FEW, FEW, BK]), 0)  # [FEW, BK]
        b_dg = add_sums(b_ones, b_P, None, TYPE, False, True, IPG) * b_all  # [C, BK]
        b_dy = tl.dot(b_y, b_dS, input_precision=IP)  # [C, BK]
        b_dg = add_sums(b_every, b_k * b_dy, b_dg, TYPE, False, True, IPG)  # meets most of itself again, and cancels
        b_dy *= b_all * fit if TYPE == tl.float16 else b_all
        b_x = tl.dot(b_A, b_k, input_precision=IP) * b_pair
        b_x = tl.dot(b_do, b_S, b_x, input_precision=IP)
        b_z = b_q * b_x
        store_chunk(dq, tl.trans((b_x * (tl.exp2(b_E) * scale)).to(OUT)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)
        b_dy = tl.dot(b_At, b_q, b_dy, input_precision=IP)
        if DELTA:
            b_x = tl.dot(b_B, b_k, input_precision=IP) * b_pair
            b_x = tl.dot(b_D, b_S, b_x, input_precision=IP)
            b_p = b_e * b_x
            b_dbeta -= tl.sum(b_p, 1)
            b_z -= b_p * b_rest[:, None]
            b_x *= tl.exp2(b_E) * -b_rest[:, None]
            b_dy = tl.dot(b_Bt, b_e, b_dy, input_precision=IP)
        b_z -= b_k * (b_dy * b_pair)
        b_dy *= tl.exp2(-b_E) * back if TYPE == tl.float16 else tl.exp2(-b_E)
        if not DELTA:
            b_dy *= rest
        if DELTA:
            if ERASE:
                store_chunk(de, tl.trans(b_x.to(OUT)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)
            else:
                b_dy += b_x
        store_chunk(dk, tl.trans(b_dy.to(OUT)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)
        b_dg = add_sums(tl.trans(b_R), b_z, b_dg, TYPE, False, True, IPG)  # terms of both signs
        if not DELTA:
            b_dg *= rest
        store_chunk(dg, tl.trans(b_dg.to(GATE)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)
    if DELTA:
        if USE_BETA:
            for n in tl.static_range(PARTS):
                tl.store(dbeta + (o_h * PARTS + n), b_dbeta / b_unit if n == 0 else tl.zeros_like(b_dbeta), mask=m_c)


@triton.jit(do_not_specialize=["rows"])
def strength_kernel(
    shares, beta, dbeta, dv,  # shares [rows, PARTS] fp32; beta, dbeta [rows]; dv [rows, V]: D of the gradients
    rows, V: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dbeta from its shares; and dv of rows whose beta was too small to divide by. `BLOCK` rows a program."""
    TYPE: tl.constexpr = dv.dtype.element_ty
    FEW: tl.constexpr = 16
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < rows
    b_dbeta = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(PARTS):
        b_dbeta += tl.load(shares + o * PARTS + n, mask=m, other=0.0)
    tl.store(dbeta + o, b_dbeta.to(dbeta.dtype.element_ty), mask=m)
    b_ones, b_all = shared_strength(tl.load(beta + o, mask=m, other=1.0).to(tl.float32), TYPE)
    for n in range(tl.where(tl.max((b_all != 1.0).to(tl.int32), 0) > 0, BLOCK // FEW, 0)):
        o_r = tl.program_id(0).to(tl.int64) * BLOCK + n * FEW + tl.arange(0, FEW)
        b_unit, b_rest = shared_strength(tl.load(beta + o_r, mask=o_r < rows, other=1.0).to(tl.float32), TYPE)
        for i_v in range((V + BV - 1) // BV):
            o_v = i_v * BV + tl.arange(0, BV)
            o_out = o_r[:, None] * V + o_v[None, :]
            m_out = (b_rest != 1.0)[:, None] & (o_v < V)[None, :]
            tl.store(dv + o_out, (tl.load(dv + o_out, mask=m_out, other=0.0) * b_rest[:, None]).to(TYPE), mask=m_out)
