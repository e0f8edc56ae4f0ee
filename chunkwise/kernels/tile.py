"""Words the kernels share: where a chunk lies, what its gates sum to. Log decays are in log2 units (natural / ln 2), at most 0.

Letters: C rows of a chunk, L of them valid. GATE is a `Gate` value: "none", "head", "scalar" or "key".
"""

import triton
import triton.language as tl

RCP_LN2 = tl.constexpr(1.4426950408889634)
FLOOR = tl.constexpr(-150.0)  # exp2 of it is 0 in fp32: -inf and -1e4 forget just as much
NEVER = tl.constexpr(-1.0e4)  # log decay of a pair that does not meet
NEAR = tl.constexpr(-100.0)  # log2: readers that keep more of the chunk's first state have factors a token


@triton.jit
def chunk_rows(chunks, i_slot, T, C: tl.constexpr, PACKED: tl.constexpr):
    """First row of the slot's chunk among all B * T rows, and its valid rows (0: a slot that is not used)."""
    if PACKED:
        row = tl.load(chunks + 2 * i_slot)
        L = tl.load(chunks + 2 * i_slot + 1).to(tl.int32)
    else:
        NC = tl.cdiv(T, C)
        i_b = i_slot // NC
        i_c = i_slot - i_b * NC
        row = i_b.to(tl.int64) * T + i_c * C
        L = tl.minimum(C, T - i_c * C)
    return row, L


@triton.jit
def chunk_place(pid, chunks, HV, T, C: tl.constexpr, PACKED: tl.constexpr, BLOCKS: tl.constexpr = 1):
    """Of a program a (chunk, value head, block): block, slot in 64 bits, head, and of the chunk what `chunk_rows` says."""
    i_block = pid % BLOCKS
    i_slot = (pid // BLOCKS // HV).to(tl.int64)
    i_hv = pid // BLOCKS % HV
    row, L = chunk_rows(chunks, i_slot, T, C, PACKED)
    return i_block, i_slot, i_hv, row, L


@triton.jit
def dense_place(i_slot, T, C: tl.constexpr):
    """Sequence and token that a slot of dense sequences begins at, for the copy engine, which counts in 32 bits."""
    i_slot = i_slot.to(tl.int32)
    NC = tl.cdiv(T, C)
    i_b = i_slot // NC
    return i_b, (i_slot - i_b * NC) * C


@triton.jit
def sequence_of(first, i_slot, N):
    """The sequence of a slot that is used: first[n] <= i_slot < first[n + 1], of empty ones the last."""
    low = 0
    high = N
    while high - low > 1:
        middle = (low + high) // 2
        before_it = tl.load(first + middle) <= i_slot
        low = tl.where(before_it, middle, low)
        high = tl.where(before_it, high, middle)
    return low


@triton.jit
def sequence(
    cu_seqlens, index, accepted, i_n, T, columns, PACKED: tl.constexpr, INDEXED: tl.constexpr, ACCEPTED: tl.constexpr,
):  # fmt: skip
    """Of sequence i_n: its first row, its rows, the slot of its first state, and whether there is one. ACCEPTED: it is in column
    accepted[i_n] - 1 of index [N, columns]."""
    if PACKED:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        Tn = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
    else:
        bos = i_n * T
        Tn = T
    i_slot = i_n
    live = i_n >= 0
    if INDEXED:
        if ACCEPTED:
            i_c = tl.load(accepted + i_n).to(tl.int64) - 1
            live = (i_c >= 0) & (i_c < columns)
            i_slot = tl.load(index + i_n * columns + i_c, mask=live, other=-1).to(tl.int64)
        else:
            i_slot = tl.load(index + i_n).to(tl.int64)
        live = i_slot >= 0
    return bos, Tn, i_slot, live


@triton.jit
def mask2(m_row, o_col, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows that are valid, and columns below COLS where the block is wider."""
    if COLS % BLOCK == 0:
        m = m_row[:, None]
    else:
        m = m_row[:, None] & (o_col < COLS)[None, :]
    return m


@triton.jit
def load_rows(p, row, stride, o_c, o_col, L, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """[C, BLOCK] of a matrix whose rows are `stride` apart; zeros past the end. p: at its first column."""
    o = o_c[:, None] * stride + o_col[None, :]  # 32 bits: the host keeps C * stride below 2^31
    return tl.load(p + row * stride + o, mask=mask2(o_c < L, o_col, COLS, BLOCK), other=0.0)


@triton.jit
def load_chunk(
    x, row, stride, i_b, i_h, t, o_c, col, L, COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """Columns col.. of one head in a chunk's rows: [ROWS, BLOCK], zeros past the end.

    x with TMA: a descriptor of [B, heads, T, COLS], read at sequence i_b and token t; else a pointer, read at `row`, rows `stride` apart.
    """
    if TMA:
        b_x = tl.reshape(x.load([i_b, i_h, t, col]), [ROWS, BLOCK])
    else:
        b_x = load_rows(x + i_h * COLS, row, stride, o_c, col + tl.arange(0, BLOCK), L, COLS, BLOCK)
    return b_x


@triton.jit
def store_chunk(
    x, b_x, row, heads, i_b, i_h, t, o_c, col, L, COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """The mirror of `load_chunk` for a contiguous tensor of so many heads, from its transpose b_x [BLOCK, ROWS]."""
    if TMA:
        x.store([i_b, i_h, t, col], tl.reshape(tl.trans(b_x), [1, 1, ROWS, BLOCK]))
    else:
        o_col = col + tl.arange(0, BLOCK)
        o = o_c[None, :] * (heads * COLS) + o_col[:, None]
        tl.store(x + (row * heads + i_h) * COLS + o, b_x, mask=(o_col < COLS)[:, None] & (o_c < L)[None, :])


@triton.jit
def row_sums(b_x):
    """Sums along the rows of [R, 2^n]. Neighbours first, so the bits do not hang on how b_x lies over the threads, nor on what is fused:
    0.0 + a product is rounded before it is added to another."""
    b_x += 0.0
    for _ in tl.static_range(12):
        if b_x.shape[1] > 1:
            b_x = tl.sum(tl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // 2, 2]), 2)
    return tl.reshape(b_x, [b_x.shape[0]])


@triton.jit
def column_sums(b_x):
    """The same down the columns of [2^n, R], one half and the other first."""
    b_x += 0.0
    for _ in tl.static_range(12):
        if b_x.shape[0] > 1:
            b_x = tl.sum(tl.reshape(b_x, [2, b_x.shape[0] // 2, b_x.shape[1]]), 0)
    return tl.reshape(b_x, [b_x.shape[1]])


@triton.jit
def log2_gate(b_g):
    """Natural-log gates -> log2 units in fp32, no lower than FLOOR; NaN stays NaN."""
    b_g = b_g.to(tl.float32) * RCP_LN2
    return tl.where(b_g < FLOOR, FLOOR, b_g)


@triton.jit
def coarse(b_g):
    """The multiple of 1/16 nearest to a gate: 64 of them sum exactly in fp32, so small decays behind a huge one are not lost."""
    return tl.floor(b_g * 16.0 + 0.5) * 0.0625


@triton.jit
def load_gate(g, row, HV, i_hv, o_c, L, GATE: tl.constexpr, SPREAD: tl.constexpr = False):
    """One chunk's scalar gates [C] as stored (zeros past the end), or the head's gate, SPREAD over such rows; whatever, without gates."""
    if GATE == "scalar":
        b_g = tl.load(g + (row + o_c) * HV + i_hv, mask=o_c < L, other=0.0)
    elif GATE == "head" and SPREAD:
        b_g = tl.load(g + i_hv + o_c * 0, mask=o_c < L, other=0.0)
    elif GATE == "head":
        b_g = tl.load(g + i_hv)
    else:
        b_g = 0.0
    return b_g


@triton.jit
def decay_sums(b_g, o_c, L, GATE: tl.constexpr, SPLIT: tl.constexpr):
    """G cumulated over the chunk, inclusive, as coarse + fine, each [C]; rows past the end add nothing.

    Without SPLIT all is in the first part. Differences of G must be taken part by part.
    """
    if GATE == "scalar":
        b_g = log2_gate(b_g)
        if SPLIT:
            b_c = coarse(b_g)
            b_G = tl.cumsum(b_c, 0)
            b_F = tl.cumsum(b_g - b_c, 0)
        else:
            b_G = tl.cumsum(b_g, 0)
            b_F = b_G
    else:
        n = tl.minimum(o_c + 1, L).to(tl.float32)
        if GATE == "head":
            b_g = log2_gate(b_g)
            if SPLIT:
                b_c = coarse(b_g)
                b_G = n * b_c
                b_F = n * (b_g - b_c) + 0.0
            else:
                b_G = n * b_g + 0.0  # rounded here, whatever it is added to: some kernels fused the two, others did not
                b_F = b_G
        else:
            b_G = n * 0.0
            b_F = b_G
    return b_G, b_F


@triton.jit
def early_sums(b_G, b_F, b_g, GATE: tl.constexpr, SPLIT: tl.constexpr):
    """`decay_sums` less every row's own gate b_g: what a reader meets that reads before its token forgets."""
    if GATE != "none":
        b_g = log2_gate(b_g)
        if SPLIT:
            b_c = coarse(b_g)
            b_G -= b_c
            b_F -= b_g - b_c
        else:
            b_G -= b_g
            b_F = b_G
    return b_G, b_F


@triton.jit
def whole(b_G, b_F, o_c, C: tl.constexpr, SPLIT: tl.constexpr):
    """(e^(G_C), e^(G_C - G) [C]): what the chunk forgets, and what it forgets of each row. b_G + b_F is G."""
    b_all = tl.sum(tl.where(o_c == C - 1, b_G, 0.0), 0)
    b_end = b_all - b_G
    if SPLIT:
        b_fine = tl.sum(tl.where(o_c == C - 1, b_F, 0.0), 0)
        b_end += b_fine - b_F
        b_all += b_fine
    return tl.exp2(b_all), tl.exp2(b_end)


@triton.jit
def start(b_G, b_F, SPLIT: tl.constexpr):
    """e^G [C]: what is left of the state at the chunk's start."""
    if SPLIT:
        b_G += b_F
    return tl.exp2(b_G)


@triton.jit
def pair_decay(b_G, b_F, b_Gy, b_Fy, m, SPLIT: tl.constexpr):
    """e^(G - Gy) where m, else 0. All of one broadcastable shape."""
    b_d = b_G - b_Gy
    if SPLIT:
        b_d += b_F - b_Fy
    return tl.exp2(tl.where(m, b_d, NEVER))


@triton.jit
def load_strength(beta, row, HV, i_hv, o_c, L, USE_BETA: tl.constexpr):
    """beta [C] as stored, zeros past the end; 1 where there is none."""
    if USE_BETA:
        b_beta = tl.load(beta + (row + o_c) * HV + i_hv, mask=o_c < L, other=0.0)
    else:
        b_beta = tl.where(o_c < L, 1.0, 0.0)
    return b_beta


@triton.jit
def shared_strength(b_beta, TYPE: tl.constexpr):
    """beta [C] as a product: what stands beside U where beta U is stored, 1 if beta is too small to divide by; and the rest."""
    LEAST: tl.constexpr = 2.0**-10 if TYPE == tl.float16 else 2.0**-40
    m = tl.abs(b_beta) < LEAST
    return tl.where(m, 1.0, b_beta), tl.where(m, b_beta, 1.0)
