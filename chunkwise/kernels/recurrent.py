"""The recurrence token by token, the state in registers: decoding in a pool of states, and short inputs.

    forget   S <- e^g S                        g: none | per head | scalar | per key channel | per value channel
    write    add    S <- S + k v'
             delta  S <- S + k x',  x = beta (v - S'e)            BEFORE: S as it was before the token forgot
             dplr   S <- S + k v' + b x',  x = S'a                S as it was before the token forgot
    read     o = scale S'q                                        BONUS: S as it was before, and (q u).k v for the token's own pair

A token reads the state once, for o and for x together and before it has forgotten: e^g goes into q and e, or into what was read. To o
it adds what it is about to write: o = (q e^g) S + (q.k) x. Built without the compilers' own fusing of products and sums, so that several
tokens at once give the bits of one at a time. The state lies in blocks of keys, see block.py.

Of members whose streams are computed from what a token brings, that is done here too:
    KEYS     k = 1 - e^g                       ERASES   e is a strength, the erase key e k         WRITES   v is writes v
    TIME     g is a step dt: e^(rate dt) is left of the state, dt v is written                    SKIP     o + skip v
    ROWS     of k, v and beta to a token, which forgets before the first and is read after the last
    COLUMN   "sum"   z <- z + k, o / (q.z + eps)
             "seen"  z <- e^g_seen z + beta_seen k^2, what is written goes along k most^(-softsign(log(z + eps) - centre))
A column lies behind the values and is one for all of them, so a program has all blocks of values, one after the other.
"""

import triton
import triton.language as tl

from .block import (
    at,
    both,
    column,
    few,
    forgets,
    keep,
    keep_column,
    key_and_gate,
    nothing,
    on_keys,
    on_values,
    once_more,
    put,
    rescaled,
    rounded,
    single,
    singles,
    singles_anew,
    state,
    times,
    total,
    unit,
)
from .exact import exp, sigmoid, softplus
from .tile import sequence


@triton.jit(do_not_specialize=["T", "HV", "columns"])
def recurrent_kernel(
    q, k, v, g, beta, a, b, u, A_log, dt_bias,  # a: whatever erases; g: by GATE; A_log: with TIME the rate
    writes, skip, g_seen, beta_seen, centre,
    S0, ST,  # states of one layout; without INDEXED slot i is sequence i
    cu_seqlens, index, into, accepted, parents,
    o,  # [rows, HV, V]
    sq, sk, sv, sg, sbeta, sa, sb, swrites, sg_seen, sbeta_seen,  # rows are so far apart
    s0, sT,  # slots are so far apart
    T, HV, columns,  # of `into` and `parents`, and of `index` with ACCEPTED
    scale, bound, strength,  # beta is multiplied by it
    middle, log_most, eps,  # of the column
    K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, GROUP_A: tl.constexpr, GROUP_B: tl.constexpr, GROUP_G: tl.constexpr,
    LINE: tl.constexpr, HEAD: tl.constexpr,  # a state's lines are so far apart, and the states of two heads of a slot
    GATE: tl.constexpr, RULE: tl.constexpr, ERASE: tl.constexpr, BEFORE: tl.constexpr, BONUS: tl.constexpr, USE_BETA: tl.constexpr,
    PACKED: tl.constexpr, V_FIRST: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, INDEXED: tl.constexpr,
    EACH: tl.constexpr,  # the state after every token t goes to slot into[i_n, t], where that is not negative
    ACCEPTED: tl.constexpr,  # the first state is in slot index[i_n, accepted[i_n] - 1]; else in index[i_n]
    TREE: tl.constexpr,  # token t goes on from the state after token parents[i_n, t]; -1: from the first
    NORM: tl.constexpr, NORM_A: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    TIME: tl.constexpr, SOFTPLUS: tl.constexpr, SKIP: tl.constexpr, KEYS: tl.constexpr, ERASES: tl.constexpr, WRITES: tl.constexpr,
    ROWS: tl.constexpr, COLUMN: tl.constexpr, CENTRE: tl.constexpr,
    ONE: tl.constexpr,  # T and ROWS are 1
    MEET: tl.constexpr,  # numbers of the output are no vectors of the state's: see put
    PTX: tl.constexpr,  # built for a card that has it
):  # fmt: skip
    """One program a (sequence, value head, block of BV values). A negative slot: output 0, nothing read or stored."""
    NB: tl.constexpr = (V + BV - 1) // BV
    TURNS: tl.constexpr = 1 if COLUMN == "" else NB
    AXIS: tl.constexpr = 1 if V_FIRST else 0
    pid = tl.program_id(0)
    i_nh = pid // (NB // TURNS)
    o_k = tl.arange(0, KB)
    i_n = i_nh // HV
    i_hv = i_nh - i_n * HV
    i_n = i_n.to(tl.int64)
    k_apart, v_apart = (1, LINE) if V_FIRST else (LINE, 1)
    STEP: tl.constexpr = KB * (1 if V_FIRST else LINE)
    bos, Tn, i_slot, live = sequence(cu_seqlens, index, accepted, i_n, T, columns, PACKED, INDEXED, ACCEPTED)
    zero = T - 1  # with ONE
    A = 0.0
    if TIME:
        A = tl.load(A_log + i_hv).to(tl.float32)
    elif RAW != "":
        A = exp(tl.load(A_log + i_hv).to(tl.float32))
    b_bias = tl.load(dt_bias + i_hv).to(tl.float32) if BIAS and GATE != "key" else 0.0
    if GATE == "head":
        b_head = exp(tl.load(g + i_hv).to(tl.float32))
    if COLUMN != "":
        o_z = i_hv * HEAD + V * v_apart
        b_first_z = column(S0 + i_slot * s0 + o_z, live, o_k, k_apart, K, NK) if INITIAL else nothing(o_k, NK)
    for i_v in range(TURNS):
        o_v = (pid - i_nh * (NB // TURNS) + i_v) * BV + tl.arange(0, BV)
        m_v = o_v < V
        o_S = i_hv * HEAD + on_keys(o_k * k_apart, V_FIRST) + on_values(o_v * v_apart, V_FIRST)  # the first block
        LATE: tl.constexpr = ONE and not TREE  # after all else that a token brings, none of which waits for its slot
        b_first = nothing(o_S, NK)
        if INITIAL and not LATE:
            b_first = state(S0 + i_slot * s0 + o_S, live, o_k, m_v, STEP, K, NK, V_FIRST)
        b_S = singles(b_first)
        if COLUMN != "":
            b_z = b_first_z
        for i in range(1 if ONE else Tn * ROWS):
            t = i // ROWS
            row, i_row = bos + t, bos * ROWS + i
            first, last = i - t * ROWS == 0, i - t * ROWS == ROWS - 1  # of a token's rows
            p_q, p_k = q + row * sq + (i_hv // GROUP) * K, k + i_row * sk + (i_hv // GROUP) * K
            p_g, p_bias = g + row * sg + (i_hv // GROUP_G) * K, dt_bias + i_hv * K  # of gates of keys
            p_a, p_b = a + row * sa + (i_hv // GROUP_A) * K, b + row * sb + (i_hv // GROUP_B) * K
            b_v = tl.load(v + i_row * sv + i_hv * V + o_v, mask=m_v, other=0.0).to(tl.float32)  # values
            b_f = 1.0
            if GATE == "scalar":
                b_f = tl.load(g + row * sg + i_hv).to(tl.float32)
            elif GATE == "value":
                b_f = tl.load(g + row * sg + i_hv * V + o_v, mask=m_v, other=0.0)  # values
            b_beta = 1.0
            if RULE == "delta" and USE_BETA:
                b_beta = tl.load(beta + i_row * sbeta + i_hv).to(tl.float32)
            t_q, t_k = few(p_q, K), few(p_k, K)
            t_a = few(p_a, K) if NORM_A else t_k
            t_b = few(p_b, K) if RULE == "dplr" else t_k
            t_u = few(u + i_hv * K, K) if BONUS else t_k
            if LATE:
                b_late = state(S0 + i_slot * s0 + o_S, live, o_k, m_v, STEP, K, NK, V_FIRST) if INITIAL else nothing(o_S, NK)
                if not V_FIRST:
                    tl.debug_barrier()  # all loads are under way before one is waited for: the compiler would put off most of them
            r_q, r_k, r_a = unit(t_q, NORM) * scale, unit(t_k, NORM), unit(t_a, NORM_A)
            if TREE:
                i_p = tl.load(parents + i_n * columns + t, mask=t < columns, other=t).to(tl.int64)
                if first & (i_p < 0):
                    b_S = singles_anew(b_first, 0, PTX)
                    if COLUMN != "":
                        b_z = b_first_z
                elif first & (i_p != t - 1):  # the token before has left its state in the registers
                    tl.debug_barrier()
                    i_s = tl.load(into + i_n * columns + i_p, mask=live & (i_p < t), other=-1).to(tl.int64)
                    lost = tl.where(i_s >= 0, 1.0, float("nan"))  # that state was never made, or not kept
                    b_S = state(ST + i_s * sT + o_S, i_s >= 0, o_k, m_v, STEP, K, NK, V_FIRST)
                    b_S = times(singles(b_S), lost)
                    if COLUMN != "":
                        b_z = times(column(ST + i_s * sT + o_z, i_s >= 0, o_k, k_apart, K, NK), lost)
            if GATE == "head":
                b_f = b_head
            elif GATE == "scalar":
                if TIME:
                    b_dt = b_f + b_bias
                    b_dt = softplus(b_dt) if SOFTPLUS else b_dt
                    b_f = b_dt * A
                b_f = forgets(b_f, A, b_bias, bound, RAW)
            elif GATE == "value":
                b_f = forgets(b_f, A, b_bias, bound, RAW)
            if ROWS > 1 and GATE != "none" and GATE != "key":
                b_f = tl.where(first, b_f, 1.0)
            if COLUMN == "seen":
                left = exp(tl.load(g_seen + row * sg_seen + i_hv // GROUP).to(tl.float32))
                strong = tl.load(beta_seen + row * sbeta_seen + i_hv // GROUP).to(tl.float32)
                c = tl.load(centre + i_hv // GROUP).to(tl.float32) if CENTRE else middle
            if not (KEYS or COLUMN == "seen"):
                b_own = total(t_q, t_k, t_u, not BONUS) * r_q * r_k
            if RULE == "dplr":
                b_other = total(t_q, t_b, t_b, True) * r_q
            b_was = b_late if LATE else b_S
            b_o = tl.zeros(o_S.shape, tl.float32)  # to be summed over the keys of a block
            b_x = b_o
            b_qk, b_qz = tl.zeros([KB], tl.float32), tl.zeros([KB], tl.float32)
            b_now: tl.tuple = ()
            b_ks: tl.tuple = ()
            b_fs: tl.tuple = ()
            for j in tl.static_range(NK):
                b_k, b_fk = key_and_gate(j, p_k, p_g, p_bias, r_k, A, b_f, bound, o_k, K, GATE, RAW, BIAS, KEYS, first, ROWS)
                b_q = at(p_q, j, o_k, K) * r_q
                b_e = b_k
                if ERASE:
                    b_e = at(p_a, j, o_k, K) * r_a
                    b_e = b_e * b_k if ERASES else b_e
                if COLUMN == "sum":
                    b_now = b_now + (b_z[j] + b_k,)
                    b_qz = tl.fma(b_q, b_now[j], b_qz)
                elif COLUMN == "seen":
                    b_now = b_now + (tl.fma(b_z[j], tl.zeros_like(b_k) + left, b_k * b_k * strong),)
                    b_k = rescaled(b_k, b_now[j], c, log_most, eps)
                if KEYS or COLUMN == "seen":
                    b_qk = tl.fma(b_q, b_k, b_qk)
                b_ks, b_fs = b_ks + (b_k,), b_fs + (b_fk,)
                b_s = single(b_was[j])
                if GATE == "key":
                    b_q = b_q if BONUS else b_q * b_fk
                    b_e = b_e if BEFORE else b_e * b_fk
                b_o = tl.fma(b_s, tl.broadcast_to(on_keys(b_q, V_FIRST), b_o.shape), b_o)
                if RULE != "add":
                    b_x = tl.fma(b_s, tl.broadcast_to(on_keys(b_e, V_FIRST), b_o.shape), b_x)
            if COLUMN != "":
                b_z = b_now
            if KEYS or COLUMN == "seen":
                b_own = tl.sum(b_qk, 0)
            b_w = b_v  # what is written along k
            if WRITES:
                b_w *= tl.load(writes + row * swrites + i_hv * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            if TIME:
                b_w *= b_dt
            if RULE == "add":
                b_o = tl.sum(b_o, AXIS)  # values
            else:
                b_o, b_x = tl.reduce((b_o, b_x), AXIS, both)  # values
                if not (GATE == "key" or BEFORE):
                    b_x *= b_f
                b_w = b_w - b_x if RULE == "delta" else b_w
            if not (GATE == "key" or BONUS):
                b_o *= b_f
            if RULE == "delta" and USE_BETA:
                b_w *= (sigmoid(b_beta) if SIGMOID else b_beta) * strength
            b_o = tl.fma(tl.zeros_like(b_o) + b_own, b_w, b_o)
            if RULE == "dplr":
                b_o = tl.fma(tl.zeros_like(b_o) + b_other, b_x, b_o)
            if COLUMN == "sum":
                b_o = tl.div_rn(b_o, tl.zeros_like(b_o) + (tl.sum(b_qz, 0) + eps))
            if SKIP:
                b_o = tl.fma(tl.zeros_like(b_o) + tl.load(skip + i_hv).to(tl.float32), b_v, b_o)
            put(o + (row * HV + i_hv) * V, tl.where(live, b_o, 0.0), o_k, o_v, m_v & last, V_FIRST or MEET)
            b_S = ()
            for j in tl.static_range(NK):
                b_k, b_fk = b_ks[j], b_fs[j]
                b_s = once_more(b_was[j], zero, PTX)
                if GATE == "key":
                    b_s *= on_keys(b_fk, V_FIRST)
                elif GATE == "value":
                    b_s *= on_values(b_f, V_FIRST)
                elif GATE != "none":
                    b_s *= b_f
                b_s = tl.fma(tl.broadcast_to(on_keys(b_k, V_FIRST), b_s.shape), tl.broadcast_to(on_values(b_w, V_FIRST), b_s.shape), b_s)
                if RULE == "dplr":
                    b_b = tl.broadcast_to(on_keys(at(p_b, j, o_k, K), V_FIRST), b_s.shape)
                    b_s = tl.fma(b_b, tl.broadcast_to(on_values(b_x, V_FIRST), b_s.shape), b_s)
                if ONE and FINAL:
                    keep(ST + i_slot * sT + o_S, b_s, j, live, o_k, m_v, STEP, K, V_FIRST)
                b_S = b_S + (b_s,)
            if EACH:
                if last:
                    b_S = rounded(b_S, ST.dtype.element_ty)  # the next token goes on from what is stored, as it would in a step of its own
                    i_s = tl.load(into + i_n * columns + t, mask=live & (t < columns), other=-1).to(tl.int64)
                    for j in tl.static_range(NK):
                        keep(ST + i_s * sT + o_S, b_S[j], j, i_s >= 0, o_k, m_v, STEP, K, V_FIRST)
                    if COLUMN != "":
                        b_z = rounded(b_z, ST.dtype.element_ty)
                        keep_column(ST + i_s * sT + o_z, b_z, i_s >= 0, o_k, k_apart, K)
        if FINAL:
            if not ONE:
                for j in tl.static_range(NK):
                    keep(ST + i_slot * sT + o_S, b_S[j], j, live, o_k, m_v, STEP, K, V_FIRST)
            if COLUMN != "":
                keep_column(ST + i_slot * sT + o_z, b_z, live, o_k, k_apart, K)
