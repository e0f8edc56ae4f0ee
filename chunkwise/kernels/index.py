"""The table of chunks of packed sequences, built on the device: nothing is known on the host, nothing waits for it."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N", "slots", "most", "long"])
def index_kernel(cu_seqlens, first, chunks, cuts, N, slots, most, long, C: tl.constexpr, BLOCK: tl.constexpr):
    """One program a sequence, and one more for the slots that are not used.

    cu_seqlens [N+1]; first [N+1]: first slot of each sequence; chunks [slots, 2]: (first row, valid rows) of each slot.
    cuts [most + N]: the sequences of `long` tokens or more (-1: no more of them); then of each sequence, how many such lie before it.
    """
    i_n = tl.program_id(0).to(tl.int64)
    o_b = tl.arange(0, BLOCK)
    i_first = tl.zeros([], tl.int64)
    i_long = tl.zeros([], tl.int32)
    for i in range(0, i_n, BLOCK):
        o_n = i + o_b
        m_n = o_n < i_n
        b_len = tl.load(cu_seqlens + o_n + 1, mask=m_n, other=0) - tl.load(cu_seqlens + o_n, mask=m_n, other=0)  # [BLOCK]
        i_first += tl.sum(tl.cdiv(b_len.to(tl.int64), C), 0)
        i_long += tl.sum((b_len >= long).to(tl.int32), 0)
    tl.store(first + i_n, i_first)
    if i_n < N:
        row = tl.load(cu_seqlens + i_n).to(tl.int64)
        end = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        n = tl.cdiv(end - row, C)
        tl.store(cuts + most + i_n, i_long)
        tl.store(cuts + i_long, i_n.to(tl.int32), mask=(end - row >= long) & (i_long < most))
    else:
        row = tl.zeros([], tl.int64)
        end = row
        n = slots - i_first
        for i_cut in range(i_long, most):
            tl.store(cuts + i_cut, -1)
    for i in range(0, n, BLOCK):
        o_c = i + o_b
        b_row = row + o_c * C  # [BLOCK]
        p_c = chunks + 2 * (i_first + o_c)
        tl.store(p_c, b_row, mask=o_c < n)
        tl.store(p_c + 1, tl.maximum(tl.minimum(end - b_row, C), 0), mask=o_c < n)
