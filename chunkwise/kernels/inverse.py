"""T = (I - M_rw)^-1 of every chunk, with M_rw = -beta_i (e_i . k_j) e^(G_i - G_j) strictly below the diagonal.

NORM, of raw keys, with r = 1 / |k|: M_rw of unit keys, r_i k_i; for scans that read k and |k| v in place of v, T_ij r_i beta_j r_j.

Blocks of doubling size: T_2s = [[T11, 0], [T22 M21 T11, T22]] from 1 up to C. That is back substitution, grouped: every factor is
an inverse or a block of M, no power of M is formed, so keys that are all alike (M close to -1 everywhere) cost no accuracy.
Only blocks on and below the diagonal are computed. A product takes 16 rows at least: up to 8, two blocks lie one under the other.
"""

import triton
import triton.language as tl

from .ready import over_length, ready_gate, ready_strength
from .tile import chunk_place, decay_sums, dense_place, early_sums, load_chunk, load_gate, load_strength, pair_decay
from .token import BETA, last_kind, store_left, store_tokens, token_place


@triton.jit
def halves(x):
    """[2n, ...] -> the even and the odd entries, [n, ...] each. x: 2 or 3 axes."""
    if len(x.shape) == 3:
        y = tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1], x.shape[2]])
        a, b = tl.split(tl.permute(y, [0, 2, 3, 1]))
    else:
        y = tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]])
        a, b = tl.split(tl.permute(y, [0, 2, 1]))
    return a, b


@triton.jit
def parts(x, TYPE: tl.constexpr):
    """fp32 as the sum of two: bf16, 16 of its 24 bits, or tf32 that lie in fp32, 22 of them."""
    CUT: tl.constexpr = -65536 if TYPE == tl.bfloat16 else -8192
    hi = (x.to(tl.int32, bitcast=True) & CUT).to(tl.float32, bitcast=True)  # its first digits: cheaper to cut off than to round
    return hi.to(TYPE), (x - hi).to(TYPE)


@triton.jit
def halved_product(a, b_hi, b_lo, c):
    """a b, plus c unless it is None, of fp32 a and the parts of b."""
    a_hi, a_lo = parts(a, b_hi.dtype)
    c = tl.dot(a_lo, b_hi, c, input_precision="tf32")
    c = tl.dot(a_hi, b_lo, c, input_precision="tf32")
    return tl.dot(a_hi, b_hi, c, input_precision="tf32")


@triton.jit
def product(a, b, IP: tl.constexpr, c=None):
    """a b, plus c unless it is None; IP: an input_precision, or "bf16x1", of operands rounded to that."""
    if IP == "bf16x3" or IP == "tf32x3":
        b_hi, b_lo = parts(b, tl.bfloat16 if IP == "bf16x3" else tl.float32)
        c = halved_product(a, b_hi, b_lo, c)
    elif IP == "bf16x1":
        c = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), c)
    else:
        c = tl.dot(a, b, c, input_precision=IP)
    return c


@triton.jit
def beside(b_X):
    """[n, 16, 8], two blocks of 8 rows one under the other -> the same on the diagonal of [n, 16, 16]."""
    n: tl.constexpr = b_X.shape[0]
    i = tl.arange(0, 2)[None, :, None, None, None]
    j = tl.arange(0, 2)[None, None, None, :, None]
    return tl.reshape(tl.where(i == j, tl.reshape(b_X, [n, 2, 8, 1, 8]), 0.0), [n, 16, 16])


@triton.jit
def under(b_M, BELOW: tl.constexpr):
    """The blocks of 8 rows on the diagonal of tiles [n, 16, 16], or BELOW so many under it, one under the other: [n, 16, 8]."""
    n: tl.constexpr = b_M.shape[0]
    i = tl.arange(0, 2)[None, :, None, None, None]
    j = tl.arange(0, 2)[None, None, None, :, None]
    return tl.reshape(tl.sum(tl.where(i == j + BELOW, tl.reshape(b_M, [n, 2, 8, 2, 8]), 0.0), 3), [n, 16, 8])


@triton.jit
def doubled(b_T, b_M, s: tl.constexpr, IP: tl.constexpr):
    """In blocks [n, 16, 8], two of 8 rows each: inverses of their diagonal blocks of s rows -> of 2s rows."""
    i = tl.arange(0, 16)[None, :, None] % 8 // s
    j = tl.arange(0, 8)[None, None, :] // s
    b_low = tl.where((i == j + 1) & (i % 2 == 1), b_M, 0.0)
    return product(beside(product(beside(b_T), b_low, IP)), b_T, IP, b_T)


@triton.jit
def paired(b_X):
    """[2n, 8, 8] -> two by two, one under the other: [n, 16, 8]."""
    return tl.reshape(b_X, [b_X.shape[0] // 2, 16, 8])


@triton.jit
def solve16(b_M, IP: tl.constexpr):
    """(I - M)^-1 of strictly lower triangular tiles M [n, 16, 16], zeros elsewhere; n: 1 or even."""
    n: tl.constexpr = b_M.shape[0]
    i = tl.arange(0, 16)[None, :, None] % 8
    j = tl.arange(0, 8)[None, None, :]
    b_D = under(b_M, 0)  # [n, 16, 8]
    b_T = tl.where(i == j, 1.0, tl.where((i == j + 1) & (i % 2 == 1), b_D, 0.0))
    b_T = doubled(b_T, b_D, 2, IP)
    b_T = doubled(b_T, b_D, 4, IP)
    if n == 1:
        b_T = beside(b_T)
        b_low = tl.where(tl.arange(0, 16)[None, :, None] // 8 == tl.arange(0, 16)[None, None, :] // 8 + 1, b_M, 0.0)
        b_T = product(product(b_T, b_low, IP), b_T, IP, b_T)
    else:
        _, b_low = halves(tl.reshape(under(b_M, 1), [2 * n, 8, 8]))  # [n, 8, 8]
        T11, T22 = halves(tl.reshape(b_T, [2 * n, 8, 8]))
        b_low = product(beside(paired(b_low)), paired(T11), IP)  # [n / 2, 16, 8]
        b_T = squared(T11, tl.reshape(product(beside(paired(T22)), b_low, IP), [n, 8, 8]), T22)
    return b_T


@triton.jit
def squared(T11, T21, T22):
    """[n, s, s] each -> [[T11, 0], [T21, T22]], [n, 2s, 2s]."""
    n: tl.constexpr = T11.shape[0]
    s: tl.constexpr = T11.shape[1]
    top = tl.reshape(tl.permute(tl.join(T11, tl.zeros_like(T11)), [0, 1, 3, 2]), [n, s, 2 * s])
    bottom = tl.reshape(tl.permute(tl.join(T21, T22), [0, 1, 3, 2]), [n, s, 2 * s])
    return tl.reshape(tl.permute(tl.join(top, bottom), [0, 3, 1, 2]), [n, 2 * s, 2 * s])


@triton.jit
def merge(b_T, b_M21, IP: tl.constexpr):
    """Inverses of diagonal blocks [2n, s, s] and the blocks M21 [n, s, s] between them -> inverses [n, 2s, 2s]."""
    n: tl.constexpr = b_M21.shape[0]
    s: tl.constexpr = b_M21.shape[1]
    T11, T22 = halves(b_T)
    if n == 1:
        low = product(tl.reshape(b_M21, [s, s]), tl.reshape(T11, [s, s]), IP)
        T21 = tl.reshape(product(tl.reshape(T22, [s, s]), low, IP), [n, s, s])
    else:
        T21 = product(T22, product(b_M21, T11, IP), IP)
    return squared(T11, T21, T22)


@triton.jit
def picked(b_M, s: tl.constexpr, BELOW: tl.constexpr):
    """The s x s blocks of a [C, C] matrix on its diagonal, or BELOW so many under it (zeros for those outside): [C/s, s, s]."""
    n: tl.constexpr = b_M.shape[0] // s
    i = tl.arange(0, n)[:, None, None, None]
    j = tl.arange(0, n)[None, None, :, None]
    return tl.sum(tl.where(i == j + BELOW, tl.reshape(b_M, [n, s, n, s]), 0.0), 2)


@triton.jit
def below(b_M, s: tl.constexpr):
    """M21 of every pair of diagonal blocks of s rows: [C/2s, s, s]."""
    _, b_low = halves(picked(b_M, s, 1))
    return b_low


@triton.jit
def invert(b_M, IP: tl.constexpr):
    """(I - M)^-1 of a strictly lower triangular fp32 matrix [C, C], zeros elsewhere; C: 16, 32, 64 or 128."""
    C: tl.constexpr = b_M.shape[0]
    b_T = solve16(picked(b_M, 16, 0), IP)  # [C/16, 16, 16]
    if C > 16:
        b_T = merge(b_T, below(b_M, 16), IP)  # [C/32, 32, 32]
    if C > 32:
        b_T = merge(b_T, below(b_M, 32), IP)  # [C/64, 64, 64]
    if C > 64:
        b_T = merge(b_T, below(b_M, 64), IP)
    return tl.reshape(b_T, [C, C])


@triton.jit(do_not_specialize=["T", "HV"])
def inverse_kernel(
    e, k, g, beta, A_log, dt_bias, lengths, chunks, Tinv, tokens,  # e, k: token rows; g, beta: [B*T, HV]; Tinv: [B*T, HV, C]
    sk, T, HV, bound, strength,  # rows of e and k are sk apart; of raw gates, and what raw strengths are multiplied by
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
    ERASE: tl.constexpr,  # e is not k
    TMA: tl.constexpr,  # e, k and Tinv are descriptors of [B, heads, T, columns], not pointers
    TOKENS: tl.constexpr,  # `tokens` is filled: see token.py
    BEFORE: tl.constexpr,  # e reads before its token forgets
    NORM: tl.constexpr,  # q and k are raw, 1 / |q| in lengths [B*T, heads]; as are what these say: see ready.py
    RAW: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    IP: tl.constexpr,  # of the products of e and k
    IPT: tl.constexpr,  # of the fp32 products that make T
):  # fmt: skip
    """One program a (chunk, value head)."""
    _, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED)
    if L <= 0:
        return
    o_c = tl.arange(0, C)
    m_c = o_c < L
    i_b, t = dense_place(i_slot, T, C)
    b_M = tl.zeros([C, C], tl.float32)
    for i_k in range((K + BK - 1) // BK):
        b_k = load_chunk(k, row, sk, i_b, i_hv // GROUP, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
        b_e = b_k
        if ERASE:
            b_e = load_chunk(e, row, sk, i_b, i_hv // GROUP, t, o_c, i_k * BK, L, K, C, BK, TMA)  # [C, BK]
        b_M = tl.dot(b_e, tl.trans(b_k), b_M, input_precision=IP)
    LEAVES: tl.constexpr = TOKENS and GATE == "scalar"
    b_square = 1.0
    if LEAVES or NORM:
        b_square = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_M, 0.0), 1)  # [C]
    if NORM:
        b_rk = over_length(b_square)
        b_square = 1.0  # of what is made of them
        b_rq = tl.load(lengths + (row + o_c) * (HV // GROUP) + i_hv // GROUP, mask=m_c, other=0.0)  # [C]
        b_M *= b_rk[:, None] * b_rk[None, :]
    m_low = o_c[:, None] > o_c[None, :]
    if GATE == "none":
        b_M = tl.where(m_low, b_M, 0.0)
    else:
        b_g = ready_gate(load_gate(g, row, HV, i_hv, o_c, L, GATE), A_log, dt_bias, bound, i_hv, m_c, RAW, BIAS)
        b_G, b_F = decay_sums(b_g, o_c, L, GATE, SPLIT)  # [C]
        b_Ge, b_Fe = b_G, b_F
        if BEFORE:
            b_Ge, b_Fe = early_sums(b_G, b_F, b_g, GATE, SPLIT)
        b_M *= pair_decay(b_Ge[:, None], b_Fe[:, None], b_G[None, :], b_F[None, :], m_low, SPLIT)
    if USE_BETA:
        b_beta = tl.load(beta + (row + o_c) * HV + i_hv, mask=m_c, other=0.0).to(tl.float32)  # [C]
        b_beta = ready_strength(b_beta, strength, m_c, SIGMOID)
        b_M *= b_beta[:, None]
    else:
        b_beta = tl.where(m_c, 1.0, 0.0)
    if TOKENS:
        p_t = token_place(tokens, i_slot, i_hv, HV, C, GATE, NORM)
        if GATE == "none":
            b_G = 0.0
        if NORM:
            tl.store(p_t + last_kind(GATE) * C + o_c, b_rq)
            store_tokens(p_t, tl.where(m_c, tl.div_rn(1.0, b_rk), 0.0), b_G, o_c, C, GATE)
        else:
            store_tokens(p_t, b_beta, b_G, o_c, C, GATE)
        if LEAVES:
            store_left(p_t, b_G, b_beta, b_square, o_c, C)
    b_T = invert(-b_M, IPT)  # [C, C]
    if NORM:  # read once more: they would wait in registers, of which a program of one warp has few
        tl.debug_barrier()
        b_long = tl.load(p_t + BETA * C + o_c)
        b_rk = tl.where(m_c, tl.div_rn(1.0, b_long), 0.0)
        b_beta = load_strength(beta, row, HV, i_hv, o_c, L, USE_BETA).to(tl.float32)
        b_T *= b_rk[:, None] * (ready_strength(b_beta, strength, m_c, SIGMOID) * b_rk)[None, :]
    if TMA:
        Tinv.store([i_b, i_hv, t, 0], tl.reshape(b_T.to(Tinv.dtype), [1, 1, C, C]))
    else:
        p_T = Tinv + ((row + o_c) * HV + i_hv)[:, None] * C + o_c[None, :]
        tl.store(p_T, b_T.to(Tinv.dtype.element_ty), mask=m_c[:, None])
