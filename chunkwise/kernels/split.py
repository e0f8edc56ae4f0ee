"""Few heads: a long sequence is cut into pieces of whole chunks, scanned side by side.

What a piece makes of its first state is affine and known without it. With the state transposed, S' [V, K]:

    S_last' = S_first' A' + B'        B: the last state from an empty first one;  A: the decays' product (added), or [K, K] (delta rule)

A first scan (kernels/state_pass.py with ENDS) finds A and B of all pieces but the last, of the first its last state; the kernel here goes
from piece to piece; a second scan starts from the true first states. Backwards, dS_first' = dS_last' A + B' with the same A, so the maps of
the first and of the last piece are never needed; and what is first there is scanned for good at once, since the first scan leaves nothing
out but what it would write.

Of a piece that forgets more than 2^LOST nothing is asked of what it makes of another state, and its last state is what its last chunks make
that forget as much (under gates a token, see LEFT in token.py): of a state of 2^16 the rest is below the smallest number of fp32.
"""

import triton
import triton.language as tl

from .inverse import halved_product
from .token import LEFT, token_place

LOST = tl.constexpr(176.0)  # log2


@triton.jit
def four_bits(x):
    """Sum of up to 16 numbers of 4 bits each, below 256. Scalars only: vectors would cost the scan's loop registers."""
    ones: tl.constexpr = 0x0F0F0F0F0F0F0F0F
    x = (x & ones) + ((x >> 4) & ones)
    x += x >> 8
    x += x >> 16
    x += x >> 32
    return (x & 255).to(tl.int32)


@triton.jit
def joined(b_first, b_kept, b_S, KEY: tl.constexpr):
    """b_first b_kept + b_S, rounded once: the same bits wherever pieces meet. All [BV, BK], but for b_kept: KEY [BK], else a number."""
    if KEY:
        b_kept = b_kept[None, :]
    return tl.fma(b_first, tl.broadcast_to(b_kept, b_first.shape), b_S)


@triton.jit
def units(c, NC, parts):
    """Bits 0 to u, of the unit u of a sequence's pieces that chunk c lies in: u + 1 is the first to begin after c."""
    return (tl.cast(2, tl.int64) << (((c + 1) * parts - 1) // NC)) - 1


@triton.jit
def begins(lengths, pieces):
    """Bits of the units where pieces begin, but for the first."""
    bits = tl.cast(0, tl.int64)
    n = tl.cast(0, tl.int64)
    for i in range(pieces - 1):
        n += (lengths >> (4 * i)) & 15
        bits |= tl.cast(1, tl.int64) << n
    return bits


@triton.jit
def last_asked(tokens, i_slot, i_hv, HV, c_0, c_end, C: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr):
    """The last of chunks c_0 ... c_end - 1 that forgets 2^LOST with those after it (c_0: none does), and whether all of them do together.
    tokens: of token.py; i_slot: of chunk 0."""
    N: tl.constexpr = 128
    c_last = c_0
    b_left = 0.0
    for i in range(tl.cdiv(c_end - c_0, N)):
        o = c_end - 1 - i * N - tl.arange(0, N)
        b_n = tl.load(token_place(tokens, i_slot + o, i_hv, HV, C, GATE, NORM) + LEFT * C, mask=o >= c_0, other=0.0)  # [N]
        b_sum = b_left + tl.cumsum(b_n, 0)
        c_last = tl.maximum(c_last, tl.max(tl.where((b_sum < -LOST) & (o >= c_0), o, c_0), 0))
        b_left += tl.sum(b_n, 0)
    return c_last, b_left < -LOST


@triton.jit(do_not_specialize=["HV", "pieces"])
def carry_kernel(
    states,  # [sequences, pieces - 1, HV, V, K], in the scan's order: the state after the first piece, then B' of others; all become states
    maps,  # of the pieces without first and last: A' [sequences, pieces - 2, HV, K, K] fp32, or halves of it [..., HV, 2, K, K] bf16
    kept,  # of these pieces [sequences, pieces - 2, HV, K]
    cuts,  # packed: which sequence each is, -1: none
    HV, pieces,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MAPS: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    IP: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, block of BV values); pieces one after the other, in reverse from the last."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_nh = pid // NV
    i_v = pid - i_nh * NV
    i_n = (i_nh // HV).to(tl.int64)
    i_hv = i_nh - i_nh // HV * HV
    if PACKED:
        if tl.load(cuts + i_n) < 0:
            return
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m = (o_v < V)[:, None] & m_k[None, :]  # [BV, BK]
    p_S = states + (i_n * (pieces - 1) * HV + i_hv) * V * K + o_v[:, None] * K + o_k[None, :]  # [BV, BK] of [V, K]
    o_A = o_k[:, None] * K + o_k[None, :]  # [BK, BK]
    m_A = m_k[:, None] & m_k[None, :]
    b_S = tl.load(p_S, mask=m, other=0.0)  # [BV, BK]
    for i in range(pieces - 2):
        p_S += HV * V * K
        b_B = tl.load(p_S, mask=m, other=0.0)  # [BV, BK]
        i_map = pieces - 3 - i if MAPS and REVERSE else i
        at = (i_n * (pieces - 2) + i_map) * HV + i_hv
        if MAPS:
            if maps.dtype.element_ty == tl.float32:
                b_A = tl.load(maps + at * K * K + o_A, mask=m_A, other=0.0)  # [BK, BK]
                if REVERSE:
                    b_A = tl.trans(b_A)
                b_S = tl.dot(b_S, b_A, b_B, input_precision=IP)
            else:
                b_hi = tl.load(maps + 2 * at * K * K + o_A, mask=m_A, other=0.0)
                b_lo = tl.load(maps + (2 * at + 1) * K * K + o_A, mask=m_A, other=0.0)
                if REVERSE:
                    b_hi, b_lo = tl.trans(b_hi), tl.trans(b_lo)
                b_S = halved_product(b_S, b_hi, b_lo, b_B)
        else:
            b_kept = tl.load(kept + at * K + o_k, mask=m_k, other=0.0)  # [BK]
            b_S = joined(b_S, b_kept, b_B, True)
        tl.store(p_S, b_S, mask=m)
