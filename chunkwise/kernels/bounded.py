"""Gates per key channel: the decayed operands of the state pass, and the scores of tokens whose decays fit in one factor each.

While no channel has forgotten more than 2^LIMIT since the chunk's start, e^(G_i - G_j) = e^(G_i) e^(-G_j) neither overflows nor
loses digits, and a gated chunk is an ungated one of rescaled operands q~ = q e^G, k~ = k e^-G. Nothing of row i hears of later tokens,
rounding included. G only falls: the rows in reach are the first `near` of a chunk, each decided by the gates up to it; score.py does
the rows after them.
"""

import triton
import triton.language as tl

from .inverse import invert
from .score import gate_parts, gate_sums, load_sets
from .tile import chunk_rows, load_rows, log2_gate, mask2


@triton.jit(do_not_specialize=["T", "HV"])
def score_bounded_kernel(
    q, e, k, g, beta, chunks,  # as score_kernel
    sets, near,  # uint8, written. PAIRS: [slots, HV], how many rows are in reach (C: all); HALVES: [slots, HV, NK], whether both halves are
    Tinv, M, qd, kd, kr, decay,
    sk, T, HV, scale,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    DELTA: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr,
    PAIRS: tl.constexpr, HALVES: tl.constexpr,  # M and T too; what grad_key.py asks of the chunk
    LIMIT: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr, IPT: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head), without PAIRS a block of keys of it. M and T of rows in reach, the decayed operands of all."""
    NK: tl.constexpr = (K + BK - 1) // BK
    BLOCKS: tl.constexpr = 1 if PAIRS else NK  # programs that share a chunk's keys
    pid = tl.program_id(0)
    i_slot = (pid // (BLOCKS * HV)).to(tl.int64)
    i_hv = pid // BLOCKS % HV
    row, L = chunk_rows(chunks, i_slot, T, C, PACKED)
    if L <= 0:
        return
    TYPE: tl.constexpr = k.dtype.element_ty
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or (g.dtype.element_ty == TYPE)
    o_c = tl.arange(0, C)
    g += i_hv * K
    q += i_hv // GROUP * K
    e += i_hv // GROUP * K
    k += i_hv // GROUP * K
    b_R = load_sets(sets, 2 * LEVELS + 1, o_c, C)
    b_low = tl.zeros([C], tl.float32)  # the least G of each row
    b_qk = tl.zeros([C, C], tl.float32)
    b_ek = tl.zeros([C, C], tl.float32)
    o_h = (row + o_c) * HV + i_hv
    for i in range(NK // BLOCKS):
        i_k = pid % BLOCKS + i
        o_k = i_k * BK + tl.arange(0, BK)
        b_g = load_rows(g, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
        b_hi, b_lo = gate_parts(b_g, TYPE)
        b_G = gate_sums(b_R, b_hi, b_lo, EXACT, IPG)  # [C, BK]
        b_D = tl.exp2(b_G)
        b_all = tl.sum(log2_gate(b_g), 0)  # [BK] G_C
        if HALVES:
            b_half = tl.sum(tl.where(o_c[:, None] == C // 2 - 1, b_G, 0.0), 0)  # [BK]
            ok = tl.min(tl.minimum(b_half, b_all - b_half), 0) >= -LIMIT  # NaN is not near
            tl.store(near + (i_slot * HV + i_hv) * NK + i_k, ok.to(tl.uint8))
        if g.dtype.element_ty == tl.bfloat16:  # sums without rounding errors that matter to 8 bits
            b_end = tl.sum(tl.where(o_c[:, None] == C - 1, b_G, 0.0), 0)[None, :] - b_G
        else:
            b_end = gate_sums(load_sets(sets, 2 * LEVELS + 2, o_c, C), b_hi, b_lo, EXACT, IPG)
        o_out = o_h[:, None] * K + o_k[None, :]
        m_out = mask2(o_c < L, o_k, K, BK)
        b_k = load_rows(k, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        tl.store(kr + o_out, (b_k * tl.exp2(b_end)).to(TYPE), mask=m_out)
        b_qx = load_rows(q, row, sk, o_c, o_k, L, K, BK) * b_D
        tl.store(qd + o_out, (b_qx * scale).to(TYPE), mask=m_out)
        if DELTA:
            b_ex = (load_rows(e, row, sk, o_c, o_k, L, K, BK) * b_D).to(TYPE)
            tl.store(kd + o_out, b_ex, mask=m_out)
        if PAIRS:
            b_low = tl.minimum(b_low, tl.min(b_G, 1))
            b_ky = tl.trans((b_k * tl.exp2(tl.minimum(-b_G, LIMIT))).to(TYPE))  # [BK, C]
            b_qk = tl.dot(b_qx.to(TYPE), b_ky, b_qk, input_precision=IP)
            if DELTA:
                b_ek = tl.dot(b_ex, b_ky, b_ek, input_precision=IP)
        tl.store(decay + (i_slot * HV + i_hv) * K + o_k, b_all, mask=o_k < K)
    if PAIRS:
        o_out = o_h[:, None] * C + o_c[None, :]
        n = tl.min(tl.where(b_low >= -LIMIT, C, o_c), 0)  # NaN is out of reach
        tl.store(near + i_slot * HV + i_hv, n.to(tl.uint8))
        m_out = (o_c < tl.minimum(n, L))[:, None]
        b_qk = tl.where(o_c[:, None] >= o_c[None, :], b_qk * scale, 0.0)
        tl.store(M + o_out, b_qk.to(M.dtype.element_ty), mask=m_out)
        if DELTA:
            # rows out of reach hold anything; T of the others needs none of them
            b_ek = tl.where((o_c[:, None] > o_c[None, :]) & (o_c < n)[:, None], -b_ek, 0.0)
            if USE_BETA:
                b_ek *= tl.load(beta + o_h, mask=o_c < L, other=0.0).to(tl.float32)[:, None]
            tl.store(Tinv + o_out, invert(b_ek, IPT).to(Tinv.dtype.element_ty), mask=m_out)
