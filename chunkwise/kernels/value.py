"""Stage `output` for gates per value channel (additive), from the state that every chunk met.

    o_i = e^(H_i) (scale S'q_i) + sum_{j <= i} M_ij v_j e^(H_i - H_j),   M = scale q k'          H: the log decay cumulated in the chunk

As the scores of gates per key: while no channel of a row has forgotten more than 2^LIMIT since the chunk's start, o = e^H (scale S'q +
M v~) with v~ = v e^-H; rows after that meet earlier ones by halves. Nothing of a row hangs on later tokens, rounding included.
"""

import triton
import triton.language as tl

from .score import gate_parts, gate_sums, load_sets, meets
from .tile import chunk_place, load_rows


@triton.jit(do_not_specialize=["T", "HV"])
def value_output_kernel(
    q, k, v, g, chunks, sets, S, o,  # q, k, v: token rows; g, o [B*T, HV, V]; sets as in score.py; S [slots, HV, K, V]
    sk, sv, T, HV, scale,  # rows of q and k, of v are so far apart
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: by halves only
    IP: tl.constexpr, IPG: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head, block of values)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED, NV)
    if L <= 0:
        return
    TYPE: tl.constexpr = v.dtype.element_ty
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or (g.dtype.element_ty == TYPE)
    o_c, o_v = tl.arange(0, C), i_v * BV + tl.arange(0, BV)
    b_M = tl.zeros([C, C], tl.float32)
    b_o = tl.zeros([C, BV], tl.float32)
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = load_rows(q + i_hv // GROUP * K, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        b_k = load_rows(k + i_hv // GROUP * K, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        b_M = tl.dot(b_q, tl.trans(b_k), b_M, input_precision=IP)
        b_o = tl.dot(b_q, load_rows(S + (i_slot * HV + i_hv) * K * V, 0, V, o_k, o_v, K, V, BV), b_o, input_precision=IP)
    b_M = tl.where(o_c[:, None] >= o_c[None, :], b_M * scale, 0.0)
    b_v = load_rows(v + i_hv * V, row, sv, o_c, o_v, L, V, BV)  # [C, BV]
    b_hi, b_lo = gate_parts(load_rows(g + i_hv * V, row, HV * V, o_c, o_v, L, V, BV), TYPE)
    b_H = gate_sums(load_sets(sets, 2 * LEVELS + 1, o_c, C), b_hi, b_lo, EXACT, IPG)  # [C, BV]
    b_D = tl.exp2(b_H)
    b_o *= b_D * scale
    n = 0  # rows in reach
    if LIMIT > 0:
        b_x = tl.dot(b_M.to(TYPE), (b_v * tl.exp2(tl.minimum(-b_H, LIMIT))).to(TYPE), input_precision=IP) * b_D
        n = tl.min(tl.where(tl.min(b_H, 1) >= -LIMIT, C, o_c), 0)  # NaN is out of reach
        b_o += tl.where((o_c < n)[:, None], b_x, 0.0)
    if n < L:
        m_far = (o_c >= n)[:, None]
        b_x = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_M, 0.0), 1)[:, None] * b_v.to(tl.float32)
        for level in range(LEVELS):
            o_row, o_col = meets(o_c, level)
            b_D = tl.exp2(gate_sums(load_sets(sets, level, o_c, C), b_hi, b_lo, EXACT, IPG))  # [C, BV]
            b_m = tl.where(o_row[:, None] == o_col[None, :], b_M, 0.0).to(TYPE)
            b_x += tl.dot(b_m, (b_v * b_D).to(TYPE), input_precision=IP) * b_D
        b_o += tl.where(m_far, b_x, 0.0)
    o_out = ((row + o_c) * HV + i_hv)[:, None] * V + o_v[None, :]
    tl.store(o + o_out, b_o.to(o.dtype.element_ty), mask=(o_c < L)[:, None] & (o_v < V)[None, :])
