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
    both,
    column,
    dot,
    forget,
    forgets,
    forgotten,
    keep,
    keep_column,
    keys,
    more,
    nothing,
    on_keys,
    on_values,
    product,
    read,
    rescaled,
    rounded,
    singles,
    state,
    times,
    total,
    unit,
    what_is_left,
    written,
)  # fmt: skip
from .exact import exp, sigmoid, softplus


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
    zero = T - 1  # with ONE
    A = 0.0
    if TIME:
        A = tl.load(A_log + i_hv).to(tl.float32)
    elif RAW != "":
        A = exp(tl.load(A_log + i_hv).to(tl.float32))
    b_bias = 0.0
    if BIAS:
        if GATE == "key":
            b_bias = keys(dt_bias + i_hv * K, o_k, K, NK)
        else:
            b_bias = tl.load(dt_bias + i_hv).to(tl.float32)
    if GATE == "head":
        b_head = exp(tl.load(g + i_hv).to(tl.float32))
    if COLUMN != "":
        o_z = i_hv * HEAD + V * v_apart
        b_first_z = column(S0 + i_slot * s0 + o_z, live, o_k, k_apart, K, NK) if INITIAL else nothing(o_k, NK)
    for i_v in range(TURNS):
        o_v = (pid - i_nh * (NB // TURNS) + i_v) * BV + tl.arange(0, BV)
        m_v = o_v < V
        o_S = i_hv * HEAD + on_keys(o_k * k_apart, V_FIRST) + on_values(o_v * v_apart, V_FIRST)  # the first block
        if INITIAL:
            b_first = state(S0 + i_slot * s0 + o_S, live, o_k, m_v, STEP, K, NK, V_FIRST)
        else:
            b_first = nothing(o_S, NK)
        b_S = singles(b_first)
        if TREE:
            b_root = b_S
        if COLUMN != "":
            b_z = b_first_z
        for i in range(1 if ONE else Tn * ROWS):
            t = i // ROWS
            row, i_row = bos + t, bos * ROWS + i
            first, last = i - t * ROWS == 0, i - t * ROWS == ROWS - 1  # of a token's rows
            p_q, p_k = q + row * sq + (i_hv // GROUP) * K, k + i_row * sk + (i_hv // GROUP) * K
            b_v = tl.load(v + i_row * sv + i_hv * V + o_v, mask=m_v, other=0.0).to(tl.float32)  # values
            r_q, r_k = unit(p_q, K, NORM) * scale, unit(p_k, K, NORM)
            b_q, b_k = times(keys(p_q, o_k, K, NK), r_q), times(keys(p_k, o_k, K, NK), r_k)
            if TREE:
                i_p = tl.load(parents + i_n * columns + t, mask=t < columns, other=t).to(tl.int64)
                if first & (i_p < 0):
                    b_S = b_root
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
            b_f = 1.0
            if GATE == "head":
                b_f = b_head
            elif GATE == "scalar":
                b_f = tl.load(g + row * sg + i_hv)
                if TIME:
                    b_dt = b_f.to(tl.float32) + b_bias
                    b_dt = softplus(b_dt) if SOFTPLUS else b_dt
                    b_f = b_dt * A
                b_f = forgets(b_f, A, b_bias, bound, RAW)
                if ROWS > 1:
                    b_f = tl.where(first, b_f, 1.0)
            elif GATE == "key":
                b_g = keys(g + row * sg + (i_hv // GROUP_G) * K, o_k, K, NK)
                b_f = forget(b_g, A, b_bias, bound, RAW, BIAS)  # keys
                if KEYS:
                    b_k = what_is_left(b_g)
            elif GATE == "value":
                b_f = forgets(tl.load(g + row * sg + i_hv * V + o_v, mask=m_v, other=0.0), A, b_bias, bound, RAW)  # values
            b_e = b_k
            if ERASE:
                p_a = a + row * sa + (i_hv // GROUP_A) * K
                b_e = times(keys(p_a, o_k, K, NK), unit(p_a, K, NORM_A))
                if ERASES:
                    b_e = product(b_e, b_k)
            if COLUMN == "sum":
                b_z = more(b_z, b_k, 1.0, 1.0)
            elif COLUMN == "seen":
                b_left = exp(tl.load(g_seen + row * sg_seen + i_hv // GROUP).to(tl.float32))
                b_z = more(b_z, product(b_k, b_k), b_left, tl.load(beta_seen + row * sbeta_seen + i_hv // GROUP).to(tl.float32))
                b_k = rescaled(b_k, b_z, tl.load(centre + i_hv // GROUP).to(tl.float32) if CENTRE else middle, log_most, eps)
            b_was = b_first if ONE and not TREE else b_S
            b_o = read(b_was, product(b_q, b_f) if GATE == "key" and not BONUS else b_q, V_FIRST)
            b_w = b_v  # what is written along k
            if WRITES:
                b_w *= tl.load(writes + row * swrites + i_hv * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            if TIME:
                b_w *= b_dt
            if RULE == "add":
                b_o = tl.sum(b_o, AXIS)  # values
            else:
                b_x = read(b_was, product(b_e, b_f) if GATE == "key" and not BEFORE else b_e, V_FIRST)
                b_o, b_x = tl.reduce((b_o, b_x), AXIS, both)  # values
                if not (GATE == "key" or BEFORE):
                    b_x *= b_f
                b_w = b_w - b_x if RULE == "delta" else b_w
            if not (GATE == "key" or BONUS):
                b_o *= b_f
            if RULE == "delta" and USE_BETA:
                b_beta = tl.load(beta + i_row * sbeta + i_hv).to(tl.float32)
                b_w *= (sigmoid(b_beta) if SIGMOID else b_beta) * strength
            if KEYS or COLUMN == "seen":
                b_own = dot(b_q, b_k)
            else:
                b_own = total(p_q, p_k, u + i_hv * K, K, not BONUS) * r_q * r_k
            b_o = tl.fma(tl.zeros_like(b_o) + b_own, b_w, b_o)
            b_S = forgotten(b_was, b_f, zero, GATE, V_FIRST, PTX)
            b_S = written(b_S, b_k, b_w, V_FIRST)
            if RULE == "dplr":
                p_b = b + row * sb + (i_hv // GROUP_B) * K
                b_o = tl.fma(tl.zeros_like(b_o) + total(p_q, p_b, p_b, K, True) * r_q, b_x, b_o)
                b_S = written(b_S, keys(p_b, o_k, K, NK), b_x, V_FIRST)
            if COLUMN == "sum":
                b_o = tl.div_rn(b_o, tl.zeros_like(b_o) + (dot(b_q, b_z) + eps))
            if SKIP:
                b_o = tl.fma(tl.zeros_like(b_o) + tl.load(skip + i_hv).to(tl.float32), b_v, b_o)
            tl.store(o + (row * HV + i_hv) * V + o_v, tl.where(live, b_o, 0.0).to(o.dtype.element_ty), mask=m_v & last)
            if EACH:
                if last:
                    b_S = rounded(b_S, ST.dtype.element_ty)  # the next token goes on from what is stored, as it would in a step of its own
                    i_s = tl.load(into + i_n * columns + t, mask=live & (t < columns), other=-1).to(tl.int64)
                    keep(ST + i_s * sT + o_S, b_S, i_s >= 0, o_k, m_v, STEP, K, V_FIRST)
                    if COLUMN != "":
                        b_z = rounded(b_z, ST.dtype.element_ty)
                        keep_column(ST + i_s * sT + o_z, b_z, i_s >= 0, o_k, k_apart, K)
        if FINAL:
            keep(ST + i_slot * sT + o_S, b_S, live, o_k, m_v, STEP, K, V_FIRST)
            if COLUMN != "":
                keep_column(ST + i_slot * sT + o_z, b_z, live, o_k, k_apart, K)
