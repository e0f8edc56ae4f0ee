"""Gates per key channel: the decayed operands of the state pass, and the scores of tokens whose decays fit in one factor each.

While no channel has forgotten more than 2^LIMIT since the chunk's start, e^(G_i - G_j) = e^(G_i) e^(-G_j) neither overflows nor
loses digits, and a gated chunk is an ungated one of rescaled operands q~ = q e^G, k~ = k e^-G. Nothing of row i hears of later tokens,
rounding included. G only falls: the rows in reach are the first `near` of a chunk, each decided by the gates up to it; score.py does
the rows after them. fp16 has no room for such factors: the scores' operands are fp32 of as many digits there.
"""

import triton
import triton.language as tl

from .inverse import invert
from .score import LOWEST, gate_parts, gate_sums, load_sets
from .tile import chunk_place, column_sums, dense_place, load_chunk, log2_gate, store_chunk
from .token import store_tokens, token_place


@triton.jit
def factor(x, TYPE: tl.constexpr):
    """fp32 as an operand of scores. fp16: rounded to as many digits, which tf32 products would cut off, but in fp32's range."""
    if TYPE == tl.float16:
        b_near = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        x = tl.where(x == x, b_near, x)  # NaN's bits may be counted on to 0
    else:
        x = x.to(TYPE)
    return x


@triton.jit(do_not_specialize=["T", "HV"])
def score_bounded_kernel(
    q, e, k, g, beta, chunks,  # as score_kernel
    sets, near,  # uint8 [slots, HV], written: how many rows are in reach, C: all
    Tinv, M, qd, kd, kr, decay, tokens,
    sk, T, HV, scale,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    DELTA: tl.constexpr, ERASE: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr,
    PAIRS: tl.constexpr,  # M and T too
    TOKENS: tl.constexpr,  # `tokens` is filled: see token.py
    LIMIT: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr, IPT: tl.constexpr,
    TMA: tl.constexpr,  # q, e, k, g, Tinv, M, qd, kd, kr are descriptors of [B, heads, T, columns], not pointers
):  # fmt: skip
    """One program a (chunk, value head). M and T of rows in reach (of others anything), the decayed operands of all."""
    NK: tl.constexpr = (K + BK - 1) // BK
    _, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED)
    i_h = i_hv // GROUP
    if L <= 0:
        return
    i_b, t = dense_place(i_slot, T, C)
    TYPE: tl.constexpr = kr.dtype if TMA else kr.dtype.element_ty
    GATE: tl.constexpr = g.dtype if TMA else g.dtype.element_ty
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or (GATE == TYPE)
    o_c = tl.arange(0, C)
    b_R = load_sets(sets, 2 * LEVELS + 1, o_c, C)
    b_RE = load_sets(sets, 2 * LEVELS + 2, o_c, C)
    b_low = tl.zeros([C], tl.float32)  # the least G of each row
    b_qk = tl.zeros([C, C], tl.float32)
    b_ek = tl.zeros([C, C], tl.float32)
    o_h = (row + o_c) * HV + i_hv
    for i_k in range(NK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_g = load_chunk(g, row, HV * K, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
        b_hi, b_lo = gate_parts(b_g, TYPE)
        b_G = gate_sums(b_R, b_hi, b_lo, EXACT, IPG)  # [C, BK]
        p_decay = decay + (i_slot * HV + i_hv) * K
        if GATE == tl.bfloat16:  # of 8 bits, so sums of them are exact
            o_last = tl.where(o_c == C - 1, 0, K)  # the others' rows are not stored
            tl.store(p_decay + (o_last[:, None] + o_k[None, :]), b_G, mask=o_last[:, None] + o_k[None, :] < K)
        elif TYPE == tl.bfloat16:  # three parts of 8 bits; in the same order in whatever layout they are
            b_rest = tl.maximum(b_g.to(tl.float32), LOWEST) - b_hi.to(tl.float32) - b_lo.to(tl.float32)
            b_ones = tl.full([16, C], 1.0, tl.float32).to(TYPE)
            b_all = gate_sums(b_ones, b_rest.to(TYPE), b_hi, True, IPG) + gate_sums(b_ones, b_hi, b_lo, False, IPG)  # [16, BK], all alike
            o_first = tl.where(tl.arange(0, 16) == 0, 0, K)
            tl.store(p_decay + (o_first[:, None] + o_k[None, :]), b_all, mask=o_first[:, None] + o_k[None, :] < K)
        else:
            tl.store(p_decay + o_k, column_sums(log2_gate(b_g)), mask=o_k < K)
        b_k = load_chunk(k, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
        b_low = tl.minimum(b_low, tl.min(b_G, 1))
        if PAIRS:
            b_ky = tl.trans(factor(b_k * tl.exp2(tl.minimum(-b_G, LIMIT)), TYPE))  # [BK, C]
        b_D = tl.exp2(b_G)
        if DELTA:
            b_e = b_k
            if ERASE:
                b_e = load_chunk(e, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
            b_ex = b_e * b_D
            store_chunk(kd, tl.trans(b_ex.to(TYPE)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)
            if PAIRS:
                b_ek = tl.dot(factor(b_ex, TYPE), b_ky, b_ek, input_precision=IP)
        b_qx = load_chunk(q, row, sk, i_b, i_h, t, o_c, i_k * BK, L, K, C, BK, TMA) * b_D  # [C, BK]
        store_chunk(qd, tl.trans((b_qx * scale).to(TYPE)), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)
        if PAIRS:
            b_qk = tl.dot(factor(b_qx, TYPE), b_ky, b_qk, input_precision=IP)
        b_end = gate_sums(b_RE, b_hi, b_lo, EXACT, IPG)  # [C, BK]
        b_x = (b_k * tl.exp2(b_end)).to(TYPE)
        store_chunk(kr, tl.trans(b_x), row, HV, i_b, i_hv, t, o_c, i_k * BK, L, K, C, BK, TMA)
    n = tl.min(tl.where(b_low >= -LIMIT, C, o_c), 0)  # NaN is out of reach
    tl.store(near + i_slot * HV + i_hv, n.to(tl.uint8))
    if PAIRS:
        b_qk = tl.where(o_c[:, None] >= o_c[None, :], b_qk * scale, 0.0)
        store_chunk(M, tl.trans(b_qk.to(TYPE)), row, HV, i_b, i_hv, t, o_c, 0, L, C, C, C, TMA)
        if DELTA:
            # rows out of reach hold anything; T of the others needs none of them
            b_ek = tl.where((o_c[:, None] > o_c[None, :]) & (o_c < n)[:, None], -b_ek, 0.0)
            if USE_BETA:
                b_beta = tl.load(beta + o_h, mask=o_c < L, other=0.0).to(tl.float32)  # [C]
                b_ek *= b_beta[:, None]
            else:
                b_beta = tl.where(o_c < L, 1.0, 0.0)
            if TOKENS:
                store_tokens(token_place(tokens, i_slot, i_hv, HV, C, "key"), b_beta, 0.0, o_c, C, "key")
            store_chunk(Tinv, tl.trans(invert(b_ek, IPT).to(TYPE)), row, HV, i_b, i_hv, t, o_c, 0, L, C, C, C, TMA)
