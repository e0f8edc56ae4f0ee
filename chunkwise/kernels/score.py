"""Stage `scores` for gates per key channel: M_qk and T = (I - M_rw)^-1 of rows that bounded.py has left.

Secondary chunking. A reader at row i and a writer at row j < i meet through e^(G_i - G_j), one factor per channel, which must
become (x e^(G_i - a)) . (y e^(a - G_j)) to be a matrix product, and a positive exponent would overflow. So, by halves: in
level s the rows of every odd block of s rows meet the columns of the block before it, and a is the log decay at their border.
A token is a row or a column of a level, never both: one exponential a channel and level. The diagonal has no decay.
The border lies before the row, so a row hears nothing of later tokens, rounding included: causality is bitwise. (The gradients of
grad_key_blocks.py, which need no such thing, stop at blocks whose gates sum to no more than LIMIT: all pairs there meet around the
middle.)
Exponents are sums of gates (0/1 matrix times g), not differences of prefix sums: nothing cancels.
"""

import triton
import triton.language as tl

from .inverse import invert, parts
from .tile import RCP_LN2, chunk_place, load_rows

GROUPED = tl.constexpr(8)
LOWEST = tl.constexpr(-104.0)  # natural; exp of it is 0 in fp32


@triton.jit
def gate_parts(b_g, TYPE: tl.constexpr):
    """Natural gates [C, BK] as hi + lo of the operands' dtype; lo is for gates that it cannot hold."""
    b_g = b_g.to(tl.float32)
    b_g = tl.where(b_g < LOWEST, LOWEST, b_g)
    b_hi = b_g.to(TYPE)
    return b_hi, (b_g - b_hi.to(tl.float32)).to(TYPE)


@triton.jit
def gate_sums(b_R, b_hi, b_lo, EXACT: tl.constexpr, IP: tl.constexpr):
    """Sums of gates over sets of tokens: R [C, C] (row i: the set of i) times g [C, BK], in log2 units."""
    b_E = tl.dot(b_R, b_hi, input_precision=IP)
    if not EXACT:
        b_E = tl.dot(b_R, b_lo, b_E, input_precision=IP)
    return b_E * RCP_LN2


@triton.jit
def add_sums(b_R, b_z, b_acc, TYPE: tl.constexpr, TURNED: tl.constexpr, FINE: tl.constexpr, IP: tl.constexpr):
    """acc (or None) and sums of fp32 numbers over sets of tokens: R z, TURNED z R. R, of 0 and 1, has the operands' TYPE.

    FINE: of both signs, almost all of which may cancel: 16 bits, and 24 where operands are fp16. The numbers are gradients, whose size
    nobody knows beforehand: fp16, whose range they would leave, gives way to parts in bf16, or is given smaller ones.
    """
    if TYPE == tl.float32:
        b_acc = add_product(b_R, b_z, b_acc, TURNED, IP)
    elif TYPE == tl.bfloat16 and not FINE:
        b_acc = add_product(b_R, b_z.to(tl.bfloat16), b_acc, TURNED, IP)
    elif not FINE:
        fit, back = fitting(tl.abs(b_z))
        b_y = add_product(b_R, (b_z * fit).to(TYPE), None, TURNED, IP) * back
        if b_acc is None:
            b_acc = b_y
        else:
            b_acc += b_y
    else:
        b_R = b_R.to(tl.bfloat16)
        b_hi, b_lo = parts(b_z, tl.bfloat16)
        b_acc = add_product(b_R, b_hi, b_acc, TURNED, IP)
        if TYPE == tl.float16 and FINE:
            b_hi, b_lo = parts(b_z - b_hi.to(tl.float32), tl.bfloat16)
            b_acc = add_product(b_R, b_hi, b_acc, TURNED, IP)
        b_acc = add_product(b_R, b_lo, b_acc, TURNED, IP)
    return b_acc


@triton.jit
def fitting(b_x):
    """A power of two, at most 1, that brings numbers of these sizes [R, W] into fp16's range; and its inverse."""
    top = tl.max(tl.reshape(b_x, [b_x.shape[0] * b_x.shape[1]]), 0)
    exponent = tl.maximum(tl.floor(tl.log2(tl.maximum(top, 1.0))) - 14.0, 0.0)
    return tl.exp2(-exponent), tl.exp2(exponent)


@triton.jit
def add_product(b_R, b_z, b_acc, TURNED: tl.constexpr, IP: tl.constexpr):
    if TURNED:
        b_acc = tl.dot(b_z, b_R, b_acc, input_precision=IP)
    else:
        b_acc = tl.dot(b_R, b_z, b_acc, input_precision=IP)
    return b_acc


@triton.jit
def meets(o_c, level):
    """(row, column) [C] of tokens in a level of blocks of 2^level: i meets j before it where row_i == column_j."""
    block = o_c >> level
    return tl.where((block & 1) == 1, block - 1, -1), block


@triton.jit
def load_sets(sets, number, o_c, C: tl.constexpr):
    """[C, C]: row i says which tokens' gates i sums."""
    return tl.load(sets + number * C * C + o_c[:, None] * C + o_c[None, :])


@triton.jit
def chosen(near, DONE: tl.constexpr, each, blocks, PER: tl.constexpr):
    """Which of a program's `each` blocks of work are its own, [GROUP] of 0 and 1: whose entry of `near`, one to PER blocks, is below DONE.

    Most programs find none, so they look after several blocks.
    """
    o_b = tl.arange(0, GROUPED)
    o = tl.program_id(0) * each + o_b
    return (tl.load(near + o // PER, mask=(o_b < each) & (o < blocks), other=DONE) < DONE).to(tl.int32)


@triton.jit
def is_chosen(b_chosen, i):
    return tl.sum(tl.where(tl.arange(0, GROUPED) == i, b_chosen, 0), 0) > 0


@triton.jit
def far_scores(
    q, e, k, g, beta, sets, Tinv, M, sk, HV, scale, row, L, n, i_hv,  # as score_kernel; n: rows that are done
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, DELTA: tl.constexpr, USE_BETA: tl.constexpr,
    IP: tl.constexpr, IPG: tl.constexpr, IPT: tl.constexpr,
):  # fmt: skip
    """M and T of one chunk's rows from n on."""
    i_h = i_hv // GROUP
    TYPE: tl.constexpr = k.dtype.element_ty
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    EXACT: tl.constexpr = (TYPE == tl.float32) or (g.dtype.element_ty == TYPE)
    o_c = tl.arange(0, C)
    m_far = (o_c >= n) & (o_c < L)
    b_diagonal = tl.zeros([C], tl.float32)
    b_qk = tl.zeros([C, C], tl.float32)
    b_ek = tl.zeros([C, C], tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = load_rows(q + i_h * K, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        b_k = load_rows(k + i_h * K, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        b_e = b_k
        if DELTA:
            b_e = load_rows(e + i_h * K, row, sk, o_c, o_k, L, K, BK)  # [C, BK]
        b_g = load_rows(g + i_hv * K, row, HV * K, o_c, o_k, L, K, BK)  # [C, BK]
        b_hi, b_lo = gate_parts(b_g, TYPE)
        b_diagonal += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
        for level in range(LEVELS):
            o_row, o_col = meets(o_c, level)
            b_D = tl.exp2(gate_sums(load_sets(sets, level, o_c, C), b_hi, b_lo, EXACT, IPG))
            b_ky = tl.trans((b_k * b_D).to(TYPE))  # [BK, C]
            m = o_row[:, None] == o_col[None, :]
            b_qk += tl.where(m, tl.dot((b_q * b_D).to(TYPE), b_ky, input_precision=IP), 0.0)
            if DELTA:
                b_ek += tl.where(m, tl.dot((b_e * b_D).to(TYPE), b_ky, input_precision=IP), 0.0)

    o_out = ((row + o_c) * HV + i_hv)[:, None] * C + o_c[None, :]
    m_out = m_far[:, None]
    b_qk = tl.where(o_c[:, None] == o_c[None, :], b_diagonal[:, None], b_qk)
    tl.store(M + o_out, (b_qk * scale).to(M.dtype.element_ty), mask=m_out)
    if DELTA:
        if USE_BETA:
            b_ek *= tl.load(beta + (row + o_c) * HV + i_hv, mask=o_c < L, other=0.0).to(tl.float32)[:, None]
        tl.store(Tinv + o_out, invert(-b_ek, IPT).to(Tinv.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["T", "HV", "each", "blocks"])
def score_kernel(
    q, e, k, g, beta, chunks,  # q, e, k: token rows; g [B*T, HV, K]; beta [B*T, HV]
    sets,  # [2 * LEVELS + 3, C, C]: of levels, of blocks around their middle, from the chunk's start, to its end
    near,  # [slots, HV] uint8: how many of a chunk's first rows bounded.py has done
    Tinv, M,  # [B*T, HV, C]
    sk, T, HV, scale,  # rows of q, e, k are sk apart
    each, blocks,  # (chunk, value head)s of a program, at most GROUPED; of all
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    DELTA: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr,
    IP: tl.constexpr, IPG: tl.constexpr, IPT: tl.constexpr,  # of products of q, e and k; of sums of gates; of the fp32 products that make T
):  # fmt: skip
    """`each` (chunk, value head)s a program."""
    b_chosen = chosen(near, C, each, blocks, 1)
    for i in range(tl.where(tl.max(b_chosen, 0) > 0, each, 0)):
        if is_chosen(b_chosen, i):
            i_block = tl.program_id(0) * each + i
            _, _, i_hv, row, L = chunk_place(i_block, chunks, HV, T, C, PACKED)
            n = tl.load(near + i_block).to(tl.int32)
            if n < L:
                far_scores(q, e, k, g, beta, sets, Tinv, M, sk, HV, scale, row, L, n, i_hv, K, C, BK, GROUP, DELTA, USE_BETA, IP, IPG, IPT)
