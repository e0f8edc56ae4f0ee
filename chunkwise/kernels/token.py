"""What scans forwards of the delta rules ask of each token besides its rows: made once, chunk by chunk, by the kernel that makes T.

fp32 [KINDS, C] a (slot, value head), of rows past the end too; without scalar gates beta alone. NORM, of raw keys and queries: in beta's
place |k|, which multiplies v, as T has all else that brings keys to unit length (inverse.py); last 1 / |q|, for outputs.

A scan has one program for each block of values and the whole sequence: there sums, exponentials and strided addresses of 64 numbers cost
more than a product.

Between tokens of a chunk e^(G_i - G_j) is a product of factors, e^G_i e^-G_j, where the reader keeps more than 2^NEAR of the chunk's
first state. That is decided for each reader by its own G, so that no later token changes its bits.

LEFT is of the whole chunk: log2 of a bound on the norm of what it makes of a state. A token multiplies that by e^g (I - beta k k'), whose
norm is e^g max(1, |1 - beta |k|^2|).
"""

import triton
import triton.language as tl

from .tile import NEAR, NEVER, chunk_place, decay_sums, load_gate, load_strength, start, whole

BETA = tl.constexpr(0)
START = tl.constexpr(1)  # e^G
END = tl.constexpr(2)  # e^(G_C - G)
READ = tl.constexpr(3)  # e^G, or 1 where that is no factor
BACK = tl.constexpr(4)  # e^-G, or 1 well beyond where a reader's is a factor: a later sum may be larger, by a rounding
SUM = tl.constexpr(5)  # G
LEFT = tl.constexpr(6)  # one number, see above
KINDS = tl.constexpr(7)
ALL_NEAR = tl.constexpr(2.0**-99.5)  # of e^(G_C): above it no token is far, rounding included


@triton.constexpr_function
def last_kind(GATE):
    """Where 1 / |q| is."""
    return KINDS.value if GATE == "scalar" else 1


@triton.jit
def token_place(tokens, i_slot, i_hv, HV, C: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr = False):
    """Where those of a chunk begin."""
    return tokens + (i_slot * HV + i_hv) * ((last_kind(GATE) + NORM) * C)


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
def store_left(p_t, b_G, b_beta, b_square, o_c, C: tl.constexpr):
    """G, beta, |k|^2: [C]. NaN stays NaN."""
    b_grown = tl.abs(1.0 - b_beta * b_square)
    b_left = tl.log2(tl.where(b_grown <= 1.0, 1.0, b_grown)) + tl.where(o_c == C - 1, b_G, 0.0)
    tl.store(p_t + LEFT * C, tl.sum(b_left, 0))


@triton.jit
def token_scores(b_y, b_x, p_t, b_all, o_c, L, scale, C: tl.constexpr, LOWER: tl.constexpr, IP: tl.constexpr):
    """`scores` of pair.py under scalar gates: scale q_i.k_j e^(G_i - G_j), LOWER at [i, j] from y = q, x = k; else at [j, i] from y = k,
    x = q. b_all: e^(G_C)."""
    o_i = tl.minimum(o_c, L - 1)  # as there
    b_w = tl.load(p_t + BACK * C + o_c)
    b_M = tl.dot(b_y, tl.trans(b_x), input_precision=IP)  # [C, C]
    b_r = tl.load(p_t + READ * C + o_c) * scale
    if LOWER:
        m = o_c[None, :] <= o_i[:, None]
        b_M *= b_r[:, None]
        b_w = b_w[None, :]
    else:
        m = o_c[:, None] <= o_i[None, :]
        b_M *= b_r[None, :]
        b_w = b_w[:, None]
    if b_all > ALL_NEAR:
        b_M = tl.where(m, b_M * b_w, 0.0)
    else:
        b_G = tl.load(p_t + SUM * C + o_c)  # [C]
        if LOWER:
            b_D = tl.exp2(tl.where(m, b_G[:, None] - b_G[None, :], NEVER))
            m_near = (b_G > NEAR)[:, None]
        else:
            b_D = tl.exp2(tl.where(m, b_G[None, :] - b_G[:, None], NEVER))
            m_near = (b_G > NEAR)[None, :]
        b_M *= tl.where(m & m_near, b_w, b_D)
    return b_M


@triton.jit(do_not_specialize=["T", "HV"])
def token_kernel(
    g, beta, chunks, tokens,  # g, beta: [B*T, HV]; tokens: [slots, HV, kinds, C]
    T, HV,
    C: tl.constexpr, GATE: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head): what the kernel that makes T leaves, where it does not run."""
    _, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED)
    if L <= 0:
        return
    o_c = tl.arange(0, C)
    b_beta = load_strength(beta, row, HV, i_hv, o_c, L, USE_BETA).to(tl.float32)  # [C]
    b_G, _ = decay_sums(load_gate(g, row, HV, i_hv, o_c, L, GATE), o_c, L, GATE, False)  # [C]
    store_tokens(token_place(tokens, i_slot, i_hv, HV, C, GATE), b_beta, b_G, o_c, C, GATE)
