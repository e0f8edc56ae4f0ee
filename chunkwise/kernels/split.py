"""Few heads: a long sequence is cut into pieces of whole chunks, scanned side by side as if each were a sequence.

What a piece makes of its first state is affine and known without it. With the state transposed, S' [V, K]:

    S_last' = S_first' A' + B'        B: the last state from an empty first one;  A: the decays' product (added), or [K, K] (delta rule)

So one scan finds every piece's A and B (kernels/state_pass.py with ENDS), the kernel here goes from piece to piece, and the scan proper
starts every piece from its true first state. Backwards, dS_first' = dS_last' A + B' with the same A. Nothing is left out, whatever
the gates.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["HV", "run", "held", "known", "every"])
def carry_kernel(
    ends, maps, kept, S0, firsts,  # S0: [N, HV, K, V] or unused; firsts: [N * (run / every + 1), HV, K, V]
    HV, run,
    held,  # ends: [N * held, HV, ROWS, K], B' in the first V rows; kept: [N * held, HV, K]; held >= run
    known,  # maps: [N * known, HV, MAP_ROWS, K], A' from row MAP on, of a sequence's first pieces
    every,  # so many pieces here are one piece of the scan proper
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, MAP: tl.constexpr, MAP_ROWS: tl.constexpr,
    DELTA: tl.constexpr, INITIAL: tl.constexpr, REVERSE: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, block of BV values); pieces one after the other, in reverse from the last."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_nh = pid // NV
    i_v = pid - i_nh * NV
    i_n = i_nh // HV
    i_hv = i_nh - i_n * HV
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m = (o_v < V)[:, None] & m_k[None, :]  # [BV, BK]
    o_S = o_k[None, :] * V + o_v[:, None]  # [BV, BK] of [K, V]
    o_B = o_v[:, None] * K + o_k[None, :]  # [BV, BK] of [V, K]
    o_A = (MAP + o_k[:, None]) * K + o_k[None, :]  # [BK, BK]
    m_A = m_k[:, None] & m_k[None, :]
    if INITIAL:
        b_S = tl.load(S0 + i_nh.to(tl.int64) * K * V + o_S, mask=m, other=0.0).to(tl.float32)  # [BV, BK]
    else:
        b_S = tl.zeros([BV, BK], tl.float32)
    big = run // every  # the last of the scan's pieces
    for i in range(run):
        j = run - 1 - i if REVERSE else i  # among those run: in reverse the first `every` are missing
        if i % every == 0:
            i_big = big - i // every if REVERSE else i // every
            tl.store(firsts + ((i_n * (big + 1) + i_big).to(tl.int64) * HV + i_hv) * K * V + o_S, b_S, mask=m)
        at = (i_n * held + j).to(tl.int64) * HV + i_hv
        b_B = tl.load(ends + at * ROWS * K + o_B, mask=m, other=0.0)  # [BV, BK]
        if DELTA:
            i_map = j
            if REVERSE:
                i_map = tl.minimum(j + every, known - 1)  # the last piece's is missing where it meets an empty state: any will do
            at = (i_n * known + i_map).to(tl.int64) * HV + i_hv
            b_A = tl.load(maps + at * MAP_ROWS * K + o_A, mask=m_A, other=0.0)  # [BK, BK]
            if REVERSE:
                b_A = tl.trans(b_A)
            b_S = tl.dot(b_S, b_A, b_B, input_precision=IP)
        else:
            b_kept = tl.load(kept + at * K + o_k, mask=m_k, other=0.0)  # [BK]
            b_S = b_S * b_kept[None, :] + b_B
    i_big = 0 if REVERSE else big
    tl.store(firsts + ((i_n * (big + 1) + i_big).to(tl.int64) * HV + i_hv) * K * V + o_S, b_S, mask=m)
