"""A bounded memory of M slots, each with a key and a value, token by token in a pool of states: reading is a softmax over the slots.

    keys [M, K] <- e^g keys + s k',   p = softmax(scale keys q),   values [M, V] <- e^g values + s v',   o = values' p
    RUNNING  s are logits: z' = log(e^z + e^s), e^g = e^(z - z'), and e^(s - z') is written; z is kept behind the values

A state [M, K + V] (+ 1) is larger than the registers, so it is read from memory and written there for every token, BD channels of all
slots at a time; what the next token goes on from is what is stored. No slot for the state after a token: it goes to `spare`. There
lies the first state too where several tokens may go on from it: what one makes may be stored in its slot.
"""

import triton
import triton.language as tl

from .exact import exp
from .tile import sequence


@triton.jit
def place(p_S, p_spare, i_at, away, s0, HEAD, i_nh, i_hv, live):
    """Of a head's state in its slot and in the spare one: where they begin and which it is."""
    return p_S + i_at * s0 + i_hv * HEAD, p_spare + i_nh * HEAD, live & (i_at >= 0) & (away == 0), live & (away != 0)


@triton.jit
def load(p_S, p_spare, o_x, here, there, m, EACH: tl.constexpr):
    b_x = tl.load(p_S + o_x, mask=m & here, other=0.0).to(tl.float32)
    if EACH:
        b_x += tl.load(p_spare + o_x, mask=m & there, other=0.0).to(tl.float32)  # one of the two is zeros
    return b_x


@triton.jit
def store(p_S, p_spare, o_x, b_x, here, there, m, EACH: tl.constexpr):
    b_x = b_x.to(p_S.dtype.element_ty)
    tl.store(p_S + o_x, b_x, mask=m & here)
    if EACH:
        tl.store(p_spare + o_x, b_x, mask=m & there)


@triton.jit(do_not_specialize=["T", "HV", "columns"])
def slot_kernel(
    q, k, v, s, g,
    pool, spare,  # [N, HV, M, K + V] (+ 1) for states that are not kept, then with TREE as many for first states
    cu_seqlens, index, into, accepted, parents,
    o,  # [rows, HV, V]
    sq, sk, sv, ss, sg,  # rows are so far apart
    s0,  # slots are so far apart
    T, HV, columns,  # of `into` and `parents`, and of `index` with ACCEPTED
    scale,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr,
    LINE: tl.constexpr, HEAD: tl.constexpr,  # a state's lines are so far apart, and the states of two heads of a slot
    RUNNING: tl.constexpr, PACKED: tl.constexpr, TURNED: tl.constexpr,  # lines of slots
    INDEXED: tl.constexpr, EACH: tl.constexpr, ACCEPTED: tl.constexpr, TREE: tl.constexpr,  # as in recurrent_kernel
):  # fmt: skip
    """One program a (sequence, value head). A negative slot: output 0, nothing read or stored."""
    i_nh = tl.program_id(0)
    i_n = i_nh // HV
    i_hv = i_nh - i_n * HV
    i_n, i_nh = i_n.to(tl.int64), i_nh.to(tl.int64)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, BD)
    m_m = o_m < M
    m_apart, d_apart = (1, LINE) if TURNED else (LINE, 1)
    o_S = o_m[:, None] * m_apart + o_d[None, :] * d_apart  # [BM, BD]
    bos, Tn, i_slot, live = sequence(cu_seqlens, index, accepted, i_n, T, columns, PACKED, INDEXED, ACCEPTED)
    i_at, away = i_slot, i_slot * 0  # the state that the next token goes on from; whether it is the spare one, or 2: the first's copy
    if TREE:
        far_off = tl.num_programs(0).to(tl.int64) * HEAD  # copies lie behind the spare states
        p_S, p_spare, here, there = place(pool, spare, i_at, away, s0, HEAD, i_nh, i_hv, live)
        WIDE: tl.constexpr = K + V + 1 if RUNNING else K + V
        for j in tl.static_range((WIDE + BD - 1) // BD):
            m = m_m[:, None] & (j * BD + o_d < WIDE)[None, :] & here
            o_x = o_S + j * BD * d_apart
            tl.store(p_spare + far_off + o_x, tl.load(p_S + o_x, mask=m, other=0.0), mask=m)
        tl.debug_barrier()
    for t in range(Tn):
        row = bos + t
        if t > 0:
            tl.debug_barrier()  # what other threads have stored
        lost = 0.0
        if TREE:
            i_p = tl.load(parents + i_n * columns + t, mask=t < columns, other=t).to(tl.int64)
            if i_p < 0:
                i_at, away = i_slot, i_slot * 0 + 2
            elif i_p != t - 1:
                i_at, away = tl.load(into + i_n * columns + i_p, mask=live & (i_p < t), other=-1).to(tl.int64), i_slot * 0
                lost = tl.where(i_at >= 0, 0.0, float("nan"))  # that state was never made, or not kept
        i_to, far = i_slot, i_slot * 0
        if EACH:
            i_to = tl.load(into + i_n * columns + t, mask=live & (t < columns), other=-1).to(tl.int64)
            far = tl.where(i_to >= 0, i_slot * 0, i_slot * 0 + 1)
        p_S, p_spare, here, there = place(pool, spare, i_at, away, s0, HEAD, i_nh, i_hv, live)
        p_to, p_far, here_to, there_to = place(pool, spare, i_to, far, s0, HEAD, i_nh, i_hv, live)
        if TREE:
            p_spare += tl.maximum(away - 1, 0) * far_off
        b_s = tl.load(s + row * ss + i_hv * M + o_m, mask=m_m, other=0.0).to(tl.float32)  # [BM]
        if RUNNING:
            o_z = (K + V) * d_apart + o_m * m_apart
            b_z = load(p_S, p_spare, o_z, here, there, m_m, EACH)
            b_top = tl.maximum(b_z, b_s)
            b_sum = exp(b_z - b_top) + exp(b_s - b_top)
            b_f, b_s = tl.div_rn(exp(b_z - b_top), b_sum), tl.div_rn(exp(b_s - b_top), b_sum)
            store(p_to, p_far, o_z, b_top + tl.log(b_sum), here_to, there_to, m_m, EACH)
        else:
            b_f = exp(tl.load(g + row * sg + i_hv * M + o_m, mask=m_m, other=0.0).to(tl.float32))
        b_f += lost
        b_read = tl.zeros([BM, BD], tl.float32)
        for j in tl.static_range((K + BD - 1) // BD):
            m_d = j * BD + o_d < K
            m = m_m[:, None] & m_d[None, :]
            b_k = tl.load(k + row * sk + (i_hv // GROUP) * K + j * BD + o_d, mask=m_d, other=0.0).to(tl.float32)  # [BD]
            b_q = tl.load(q + row * sq + (i_hv // GROUP) * K + j * BD + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_S = load(p_S, p_spare, o_S + j * BD * d_apart, here, there, m, EACH) * b_f[:, None]
            b_S = tl.fma(tl.broadcast_to(b_s[:, None], [BM, BD]), tl.broadcast_to(b_k[None, :], [BM, BD]), b_S)
            store(p_to, p_far, o_S + j * BD * d_apart, b_S, here_to, there_to, m, EACH)
            b_read = tl.fma(b_S, tl.broadcast_to(b_q[None, :], [BM, BD]), b_read)
        b_l = tl.where(m_m, tl.sum(b_read, 1) * scale, float("-inf"))  # [BM]
        b_p = exp(b_l - tl.max(b_l, 0))
        b_p = tl.div_rn(b_p, tl.zeros_like(b_p) + tl.sum(b_p, 0))
        for j in tl.static_range((V + BD - 1) // BD):
            m_d = j * BD + o_d < V
            m = m_m[:, None] & m_d[None, :]
            b_v = tl.load(v + row * sv + i_hv * V + j * BD + o_d, mask=m_d, other=0.0).to(tl.float32)  # [BD]
            b_S = load(p_S, p_spare, o_S + (K + j * BD) * d_apart, here, there, m, EACH) * b_f[:, None]
            b_S = tl.fma(tl.broadcast_to(b_s[:, None], [BM, BD]), tl.broadcast_to(b_v[None, :], [BM, BD]), b_S)
            store(p_to, p_far, o_S + (K + j * BD) * d_apart, b_S, here_to, there_to, m, EACH)
            b_o = tl.where(live, tl.sum(b_S * b_p[:, None], 0), 0.0)  # [BD]
            tl.store(o + (row * HV + i_hv) * V + j * BD + o_d, b_o.to(o.dtype.element_ty), mask=m_d)
        i_at, away = i_to, far
