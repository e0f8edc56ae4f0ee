"""What scans forwards of the delta rules ask of each token besides its rows: made once, chunk by chunk, by the kernel that makes T.

fp32 [KINDS, C] a (slot, value head), of rows past the end too; without scalar gates beta alone. A scan has one program for each block of
values and the whole sequence: there sums, exponentials and strided addresses of 64 numbers cost more than a product.

Between tokens of a chunk e^(G_i - G_j) is a product of factors, e^G_i e^-G_j, where the reader keeps more than 2^NEAR of the chunk's
first state. That is decided for each reader by its own G, so that no later token changes its bits.
"""

import triton
import triton.language as tl

from .tile import NEAR, NEVER, start, whole

BETA = tl.constexpr(0)
START = tl.constexpr(1)  # e^G
END = tl.constexpr(2)  # e^(G_C - G)
READ = tl.constexpr(3)  # e^G, or 1 where that is no factor
BACK = tl.constexpr(4)  # e^-G, or 1 well beyond where a reader's is a factor: a later sum may be larger, by a rounding
SUM = tl.constexpr(5)  # G
KINDS = tl.constexpr(6)
ALL_NEAR = tl.constexpr(2.0**-99.5)  # of e^(G_C): above it no token is far, rounding included


@triton.jit
def token_place(tokens, i_slot, i_hv, HV, C: tl.constexpr, GATE: tl.constexpr):
    """Where those of a chunk begin."""
    return tokens + (i_slot.to(tl.int64) * HV + i_hv) * ((KINDS if GATE == "scalar" else 1) * C)


@triton.jit
def store_tokens(p_t, b_beta, b_G, o_c, C: tl.constexpr, GATE: tl.constexpr):
    """beta, G: [C]."""
    p_t += o_c  # [C]
    tl.store(p_t + BETA * C, b_beta)
    if GATE == "scalar":
        b_start = start(b_G, b_G, False)
        _, b_end = whole(b_G, b_G, o_c, C, False)
        m_near = b_G > NEAR
        tl.store(p_t + START * C, b_start)
        tl.store(p_t + END * C, b_end)
        tl.store(p_t + READ * C, tl.where(m_near, b_start, 1.0))
        tl.store(p_t + BACK * C, tl.where(b_G > NEAR - 1.0, tl.exp2(-b_G), 1.0))
        tl.store(p_t + SUM * C, b_G)


@triton.jit
def token_scores(b_k, b_q, p_t, b_all, o_c, L, scale, C: tl.constexpr, IP: tl.constexpr):
    """`scores` of pair.py under scalar gates, transposed: scale q_i.k_j e^(G_i - G_j) at [j, i]. b_all: e^(G_C)."""
    m = o_c[:, None] <= tl.minimum(o_c, L - 1)[None, :]  # [C, C]; L as there
    b_w = tl.load(p_t + BACK * C + o_c)[:, None]
    b_M = tl.dot(b_k, tl.trans(b_q), input_precision=IP) * (tl.load(p_t + READ * C + o_c) * scale)[None, :]  # [C, C]
    if b_all > ALL_NEAR:
        b_M = tl.where(m, b_M * b_w, 0.0)
    else:
        b_G = tl.load(p_t + SUM * C + o_c)  # [C]
        b_D = tl.exp2(tl.where(m, b_G[None, :] - b_G[:, None], NEVER))
        b_M *= tl.where(m & (b_G > NEAR)[None, :], b_w, b_D)
    return b_M
