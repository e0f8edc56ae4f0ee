"""Short depthwise causal convolution. A program walks down the rows of its channels with the last W - 1 of them in registers.

Rows are tokens of all sequences, one after the other: [R, D]. Sequences are T rows each, or PACKED: first [R] holds the first row of each
row's own sequence, sequence [R] its number, offsets [N + 1] where sequences begin. weight [D, W], its last column meets the current row.
ALIGNED: sequences begin only at multiples of the rows loaded at a time. Elsewhere a block of rows is asked whether it begins deep inside a
sequence and ends in it: most do, and their rows need not be asked one by one what they see.
"""

# mypy: ignore-errors
# Tuples grow in unrolled loops here.
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R", "N", "steps"])
def place_kernel(offsets, first, sequence, R, N, steps, BLOCK: tl.constexpr):
    """The tables of packed rows: of each the last sequence that begins at it or before, sought bit by bit. N < 2^steps. Grid (blocks of
    rows)."""
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_t = o_t < R
    b_n = tl.zeros([BLOCK], tl.int32)
    for i in range(0, steps):
        b_try = b_n + (1 << (steps - 1 - i))
        m_n = m_t & (b_try < N)
        b_n = tl.where(m_n & (tl.load(offsets + b_try, mask=m_n, other=0) <= o_t), b_try, b_n)
    tl.store(first + o_t, tl.load(offsets + b_n, mask=m_t, other=0).to(tl.int32), mask=m_t)
    tl.store(sequence + o_t, b_n, mask=m_t)


@triton.jit
def beginning(t, first, R, T, PACKED: tl.constexpr):
    """The first row of row t's sequence."""
    return tl.load(first + t, mask=t < R, other=0) if PACKED else t - t % T


@triton.jit
def number(t, sequence, R, T, PACKED: tl.constexpr):
    """The number of row t's sequence."""
    return tl.load(sequence + t, mask=t < R, other=0).to(tl.int64) if PACKED else (t // T).to(tl.int64)


@triton.jit
def columns(p, o_d, m_d, W: tl.constexpr):
    """The W columns of [D, W], each [BD] fp32."""
    b = ()
    for j in tl.static_range(W):
        b = b + (tl.load(p + o_d.to(tl.int64) * W + j, mask=m_d, other=0.0).to(tl.float32),)
    return b


@triton.jit
def squash(b_z):
    """sigmoid(z). One over a square root is one instruction where a quotient is six; far below -40 it is 0."""
    b_e = 1.0 + tl.exp2(b_z * -1.4426950408889634)
    return tl.rsqrt(b_e * b_e)


@triton.jit
def seen(past, j: tl.constexpr, n, p_state, o_d, m, W: tl.constexpr, STATE: tl.constexpr, SURE: tl.constexpr):
    """What row t sees j rows back, t being row n of its sequence: an earlier row, or the initial state (else zeros) before the sequence.

    SURE: n >= j.
    """
    b_x = past
    if not SURE:
        b_x = tl.where(n >= j, past, 0.0)
        if STATE:
            b_x += tl.load(p_state + o_d.to(tl.int64) * (W - 1) + (W - 1) + n - j, mask=m & (n < j), other=0.0).to(tl.float32)
    return b_x


@triton.jit
def inside(t0, first, R, T, U: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr):
    """Whether U rows from t0 on are of one sequence and none of its first W - 1."""
    begin = beginning(t0, first, R, T, PACKED)
    if PACKED:
        one = (t0 + U <= R) & (tl.load(first + tl.minimum(t0 + U, R) - 1) == begin)
    else:
        one = t0 + U - begin <= T
    return one & (t0 - begin >= W - 1)


@triton.jit
def conv_rows(
    x, whole, part, state, dlast, first, sequence, offsets, sx, sw, sp, R, T, D, start, t0, o_d, m_d, b_w, b_b, past, owed, b_dw, b_db,
    KNOWN: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr,
    LAST: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    """ROWS rows from t0 on; past: rows t - (W - 1) to t - 1. KNOWN: row t0 + u is at least row KNOWN + u of its sequence, -1: who knows.

    GRAD: owed is what rows t - (W - 1) to t - 1 have of their gradients; each is stored with the last row that saw it. OWN: the rows are
    the program's own, and count for the gradients of weight and bias.
    """
    new, up = (), ()
    p_x, p_p = x + t0.to(tl.int64) * sx + o_d, part + t0.to(tl.int64) * sp + o_d
    p_w = whole + (t0 - (W - 1 if GRAD else 0)).to(tl.int64) * sw + o_d
    for u in tl.static_range(ROWS):
        m = m_d & (t0 + u < R)
        new = new + (tl.load(p_x + u * sx, mask=m, other=0.0),)
        if GRAD:
            up = up + (tl.load(p_p + u * sp, mask=m, other=0.0),)
    n_0 = t0 - beginning(t0, first, R, T, PACKED)
    p_state = state
    for u in tl.static_range(ROWS):
        t = t0 + u
        n = t - beginning(t, first, R, T, PACKED) if KNOWN < 0 else n_0 + u
        if STATE:
            p_state = state + number(t, sequence, R, T, PACKED) * D * (W - 1)
        b_x = new[u].to(tl.float32)
        see = ()
        for j in tl.static_range(W - 1):
            sure = KNOWN >= 0 and KNOWN + u >= W - 1 - j
            see = see + (seen(past[j], W - 1 - j, n, p_state, o_d, m_d & (t < R), W, STATE, sure),)
        see = see + (b_x,)
        past = past[1:] + (b_x,)
        if SILU or not GRAD:
            b_z = b_b
            for j in tl.static_range(W):
                b_z += b_w[j] * see[j]
        if SILU:
            b_s = squash(b_z)
        if GRAD:
            b_dz = up[u].to(tl.float32)
            if SILU:
                b_dz *= b_s * (1.0 + b_z * (1.0 - b_s))
            if OWN:
                sums = ()
                for j in tl.static_range(W):
                    sums = sums + (b_dw[j] + b_dz * see[j],)
                b_dw = sums
                if BIAS:
                    b_db += b_dz
            rest = ()
            for j in tl.static_range(W - 1):
                b_to = b_dz if KNOWN >= 0 and KNOWN + u >= W - 1 - j else tl.where(n >= W - 1 - j, b_dz, 0.0)
                rest = rest + (owed[j] + b_w[j] * b_to,)
            owed = rest[1:] + (b_w[W - 1] * b_dz,)
            r = t - (W - 1)
            m = m_d & (r >= start) & (r < R)
            b_d = rest[0]
            if LAST and KNOWN < W - 1:
                i_n = number(tl.maximum(r, 0), sequence, R, T, PACKED)
                if PACKED:
                    end = tl.load(offsets + i_n + 1, mask=r < R, other=0).to(tl.int32)
                else:
                    end = (r // T + 1) * T
                c = W - 1 - (end - r)
                b_d += tl.load(dlast + (i_n * D + o_d) * (W - 1) + c, mask=m & (c >= 0), other=0.0).to(tl.float32)
            tl.store(p_w + u * sw, b_d.to(whole.dtype.element_ty), mask=m)
        else:
            m = m_d & (t < R)
            if SILU:
                b_z *= b_s
            if RESIDUAL:
                b_z += tl.load(p_w + u * sw, mask=m, other=0.0).to(tl.float32)
            tl.store(p_p + u * sp, b_z.to(part.dtype.element_ty), mask=m)
    return past, owed, b_dw, b_db


@triton.jit(do_not_specialize=["R"])
def conv_kernel(
    x, weight, bias, whole, part, part1, part2, state, dlast, first, sequence, offsets, dweight, sx, sw, sp, sp1, sp2, E1, E2, R, T, D, L,
    W: tl.constexpr, U: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr, ALIGNED: tl.constexpr, STATE: tl.constexpr,
    LAST: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr, PARTS: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    """y = act(conv(x) + bias) + residual: part is y, whole the residual. Grid (pieces of L rows, blocks of BD channels); U rows are loaded
    at a time.

    GRAD: gradients of x, weight and bias: part is dy, whole dx; dlast [N, D, W - 1]: the incoming gradient of the final state; dweight
    [pieces, W + BIAS, D] fp32: each piece's own sum, the bias's last.
    PARTS: part1 is part of the channels from E1 on, part2 of those from E2 on; both are multiples of BD.
    """
    i_l = tl.program_id(0)
    start = i_l * L
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    if PARTS:
        if tl.program_id(1) * BD >= E2:
            part = part2 - E2
            sp = sp2
        elif tl.program_id(1) * BD >= E1:
            part = part1 - E1
            sp = sp1
    b_w = columns(weight, o_d, m_d, W)
    b_b = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32) if BIAS else tl.zeros([BD], tl.float32)
    b_db = tl.zeros([BD], tl.float32)
    past, owed, b_dw = (), (), (b_db,)
    for j in tl.static_range(W - 1):
        t = start - (W - 1) + j
        past = past + (tl.load(x + t.to(tl.int64) * sx + o_d, mask=m_d & (t >= 0), other=0.0).to(tl.float32),)
        owed, b_dw = owed + (b_db,), b_dw + (b_db,)
    for i in range(0, L, U):
        if ALIGNED:
            past, owed, b_dw, b_db = conv_rows(
                x, whole, part, state, dlast, first, sequence, offsets, sx, sw, sp, R, T, D, start, start + i, o_d, m_d, b_w, b_b, past,
                owed, b_dw, b_db, 0, U, True, W, PACKED, STATE, LAST, BIAS, RESIDUAL, SILU, GRAD,
            )  # fmt: skip
        elif inside(start + i, first, R, T, U, W, PACKED):
            past, owed, b_dw, b_db = conv_rows(
                x, whole, part, state, dlast, first, sequence, offsets, sx, sw, sp, R, T, D, start, start + i, o_d, m_d, b_w, b_b, past,
                owed, b_dw, b_db, W - 1, U, True, W, PACKED, STATE, LAST, BIAS, RESIDUAL, SILU, GRAD,
            )  # fmt: skip
        else:
            past, owed, b_dw, b_db = conv_rows(
                x, whole, part, state, dlast, first, sequence, offsets, sx, sw, sp, R, T, D, start, start + i, o_d, m_d, b_w, b_b, past,
                owed, b_dw, b_db, -1, U, True, W, PACKED, STATE, LAST, BIAS, RESIDUAL, SILU, GRAD,
            )  # fmt: skip
    if GRAD:
        conv_rows(
            x, whole, part, state, dlast, first, sequence, offsets, sx, sw, sp, R, T, D, start, start + L, o_d, m_d, b_w, b_b, past, owed,
            b_dw, b_db, 0 if ALIGNED and U >= W - 1 else -1, W - 1, False, W, PACKED, STATE, LAST, BIAS, RESIDUAL, SILU, GRAD,
        )  # fmt: skip
        p_dw = dweight + i_l.to(tl.int64) * (W + BIAS) * D + o_d
        for j in tl.static_range(W):
            tl.store(p_dw + j * D, b_dw[j], mask=m_d)
        if BIAS:
            tl.store(p_dw + W * D, b_db, mask=m_d)


@triton.jit
def conv_state_kernel(
    x, state, offsets, last, sx, T, D, W: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """last [N, D, W - 1]: the last rows of each sequence, those of its initial state where it is shorter. Grid (N, blocks of channels)."""
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    begin = tl.load(offsets + i_n).to(tl.int64) if PACKED else i_n * T
    end = tl.load(offsets + i_n + 1).to(tl.int64) if PACKED else begin + T
    p = (i_n * D + o_d) * (W - 1)
    for c in tl.static_range(W - 1):
        t = end - (W - 1) + c
        b_x = tl.load(x + t * sx + o_d, mask=m_d & (t >= begin), other=0.0)
        if STATE:
            b_s = tl.load(state + p + (W - 1) + t - begin, mask=m_d & (t < begin), other=0.0)
            b_x = tl.where(t < begin, b_s.to(b_x.dtype), b_x)
        tl.store(last + p + c, b_x, mask=m_d)


@triton.jit
def conv_state_grad_kernel(
    x, weight, bias, dy, state, dlast, offsets, dstate, sx, sy, T, D,
    W: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr, LAST: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The initial state's gradient [N, D, W - 1]: column c is seen by rows 0 to c of its sequence, by weight c - row. Grid as before."""
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    begin = tl.load(offsets + i_n).to(tl.int64) if PACKED else i_n * T
    end = tl.load(offsets + i_n + 1).to(tl.int64) if PACKED else begin + T
    p = (i_n * D + o_d) * (W - 1)
    b_w = columns(weight, o_d, m_d, W)
    inputs, slopes = (), ()  # the state's columns, then the rows; dL/dz of the rows
    for c in tl.static_range(W - 1):
        inputs = inputs + (tl.load(state + p + c, mask=m_d, other=0.0).to(tl.float32),)
    for a in tl.static_range(W - 1):
        m = m_d & (begin + a < end)
        inputs = inputs + (tl.load(x + (begin + a) * sx + o_d, mask=m, other=0.0).to(tl.float32),)
        b_dz = tl.load(dy + (begin + a) * sy + o_d, mask=m, other=0.0).to(tl.float32)
        if SILU:
            b_z = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32) if BIAS else tl.zeros([BD], tl.float32)
            for j in tl.static_range(W):
                b_z += b_w[j] * inputs[a + j]
            b_s = squash(b_z)
            b_dz *= b_s * (1.0 + b_z * (1.0 - b_s))
        slopes = slopes + (b_dz,)
    for c in tl.static_range(W - 1):
        b_d = tl.zeros([BD], tl.float32)
        for a in tl.static_range(c + 1):
            b_d += b_w[c - a] * slopes[a]
        if LAST:
            n = end - begin
            b_d += tl.load(dlast + p + c - n, mask=m_d & (c >= n), other=0.0).to(tl.float32)
        tl.store(dstate + p + c, b_d.to(dstate.dtype.element_ty), mask=m_d)


@triton.jit
def together(p, o_d, m, N: tl.constexpr):
    """[D, N] that lie side by side, N a power of two: one load a channel. N times [BD] fp32."""
    o_c = tl.arange(0, N)[None, :]
    b = tl.load(p + o_d[:, None] * N + o_c, mask=m[:, None], other=0.0).to(tl.float32)
    out = ()
    for c in tl.static_range(N):
        out = out + (tl.sum(tl.where(o_c == c, b, 0.0), 1),)
    return out


@triton.jit
def conv_update_kernel(
    x, state, weight, bias, index, y, sx, st, s0, s1, s2, T, D,
    S: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr, INDEX: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """T new rows of each sequence: x, y [B, T, D]; state [slots, D, S], S >= W - 1, moves on in place. Grid (B, blocks of channels).

    index [B]: the slot of each sequence; a negative one is left alone, and its output is zero. WHOLE: a slot's [D, S] lie side by side, S
    and W are powers of two, and a thread moves all of a channel at once.
    """
    i_b = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    i_s = tl.load(index + i_b).to(tl.int64) if INDEX else i_b
    m_s = m_d & (i_s >= 0)
    b_b = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32) if BIAS else tl.zeros([BD], tl.float32)
    p_s = state + i_s * s0
    if WHOLE:
        b_w = together(weight, o_d, m_d, W)
        past = together(p_s, o_d, m_s, S)
    else:
        b_w = columns(weight, o_d, m_d, W)
        past = ()
        for c in tl.static_range(S):
            past = past + (tl.load(p_s + o_d.to(tl.int64) * s1 + c * s2, mask=m_s, other=0.0).to(tl.float32),)
    p_x = x + i_b * sx + o_d
    p_y = y + i_b * T * D + o_d
    for _ in range(0, T):
        b_x = tl.load(p_x, mask=m_s, other=0.0).to(tl.float32)
        b_z = b_b
        for j in tl.static_range(W - 1):
            b_z += b_w[j] * past[S - (W - 1) + j]
        b_z += b_w[W - 1] * b_x
        if SILU:
            b_z *= squash(b_z)
        b_z = tl.where(i_s >= 0, b_z, 0.0)
        tl.store(p_y, b_z.to(y.dtype.element_ty), mask=m_d)
        past = past[1:] + (b_x,)
        p_x += st
        p_y += D
    if WHOLE:
        o_c = tl.arange(0, S)[None, :]
        b_S = tl.zeros([BD, S], tl.float32)
        for c in tl.static_range(S):
            b_S = tl.where(o_c == c, past[c][:, None], b_S)
        tl.store(p_s + o_d[:, None] * S + o_c, b_S.to(state.dtype.element_ty), mask=m_s[:, None])
    else:
        for c in tl.static_range(S):
            tl.store(p_s + o_d.to(tl.int64) * s1 + c * s2, past[c].to(state.dtype.element_ty), mask=m_s)
