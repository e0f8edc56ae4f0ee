"""The recurrence token by token, the state in registers: decoding in a pool of states, and short inputs.

    forget   S <- e^g S                        g: none | per head | scalar | per key channel | per value channel
    write    add    S <- S + k v'
             delta  S <- S + k x',  x = beta (v - S'e)            BEFORE: S as it was before the token forgot
             dplr   S <- S + k v' + b x',  x = S'a                S as it was before the token forgot
    read     o = scale S'q                                        BONUS: S as it was before, and (q u).k v for the token's own pair

A token reads the state once, for o and for x together, and adds to o what it is about to write: o = q e^g S + (q.k) x.
Built without the compilers' own fusing of products and sums, so that several tokens at once give the bits of one at a time.
The tile follows the state's lines in memory. Values first (STRIP = 0): [BV, BK]. Keys first: [SIDE, BV / STRIP, BK / SIDE, STRIP]; as
Triton hands it out, a warp has a strip of values with all of its keys, so warps add up nothing together, and how many strips there are
changes no bit.
"""

import triton
import triton.language as tl

SIDE = tl.constexpr(8)  # keys that a warp's threads have side by side, 16 bytes of four values each beside them


@triton.jit
def places(i_v, BK: tl.constexpr, BV: tl.constexpr, STRIP: tl.constexpr):
    """The numbers of the keys and of the i_v-th block of values: [BK] and [BV], or [SIDE, BK / SIDE] and [BV / STRIP, STRIP]."""
    if STRIP == 0:
        o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    else:
        o_k = tl.arange(0, SIDE)[:, None] + SIDE * tl.arange(0, BK // SIDE)[None, :]
        o_v = i_v * BV + STRIP * tl.arange(0, BV // STRIP)[:, None] + tl.arange(0, STRIP)[None, :]
    return o_k, o_v


@triton.jit
def on_keys(b_x, STRIP: tl.constexpr):
    """Numbers of keys against the tile."""
    return b_x[None, :] if STRIP == 0 else b_x[:, None, :, None]


@triton.jit
def on_values(b_x, STRIP: tl.constexpr):
    """Numbers of values against the tile."""
    return b_x[:, None] if STRIP == 0 else b_x[None, :, None, :]


@triton.jit
def read(b_S, b_x, STRIP: tl.constexpr):
    """S'x, a number a value."""
    b_o = b_S * on_keys(b_x, STRIP)
    if STRIP == 0:
        b_o = tl.sum(b_o, 1)
    else:
        b_o = tl.permute(b_o, (1, 3, 0, 2))
        b_o = tl.sum(tl.reshape(b_o, [b_o.shape[0], STRIP, SIDE * b_o.shape[3]]), 2)
    return b_o


@triton.jit
def write(b_S, b_k, b_x, STRIP: tl.constexpr):
    """S + k x', rounded once."""
    return tl.fma(on_keys(b_k, STRIP), on_values(b_x, STRIP), b_S)


@triton.constexpr_function
def halvings(n):
    return n.bit_length() - 1


@triton.jit
def total(b_x, STRIP: tl.constexpr):
    """Over all keys. Keys first: in halves, each sum of two numbers, since warps may share these sums."""
    if STRIP == 0:
        b_o = tl.sum(b_x, 0)
    else:
        b_x = tl.reshape(b_x, [SIDE * b_x.shape[1]])
        for _ in tl.static_range(halvings(b_x.shape[0])):
            b_x = tl.sum(tl.reshape(b_x, [2, b_x.shape[0] // 2]), 0)
        b_o = tl.sum(b_x, 0)
    return b_o


@triton.jit
def unit(b_x, NORM: tl.constexpr, STRIP: tl.constexpr):
    """x / sqrt(sum of squares + 1e-6), where asked for."""
    return tl.div_rn(b_x, tl.sqrt_rn(tl.zeros_like(b_x) + total(b_x * b_x, STRIP) + 1e-6)) if NORM else b_x


# Functions to a rounding or two, where the hardware's are good to 22 bits: a head that always forgets at one rate adds their errors up.
@triton.jit
def exp(b_x):
    """e^x in fp32: x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its series, 2^n exact. 0 below e^-104."""
    b_x = tl.where(b_x < -104.0, -104.0, b_x)  # NaN stays
    b_n = tl.floor(b_x * 1.4426950408889634 + 0.5)
    b_r = tl.fma(b_n, -0.693145751953125, b_x)  # ln 2 in two parts: n times the first is exact
    b_r = tl.fma(b_n, -1.42860677e-06, b_r)
    b_p = tl.fma(b_r, 1.0 / 5040, 1.0 / 720)
    b_p = tl.fma(b_r, b_p, 1.0 / 120)
    b_p = tl.fma(b_r, b_p, 1.0 / 24)
    b_p = tl.fma(b_r, b_p, 1.0 / 6)
    b_p = tl.fma(b_r, b_p, 0.5)
    b_p = tl.fma(b_r * b_r, b_p, b_r)
    return tl.exp2(b_n) * (b_p + 1.0)


@triton.jit
def sigmoid(b_x):
    """1 / (1 + e^-x)."""
    b_z = exp(-tl.abs(b_x))
    return tl.div_rn(tl.where(b_x < 0, b_z, tl.where(b_x >= 0, 1.0, b_x)), 1.0 + b_z)  # NaN stays


@triton.jit
def softplus(b_x):
    """log(1 + e^x) = max(x, 0) + log(1 + z), z = e^-|x| <= 1; log(1 + z) = 2 artanh s by its series, s = z / (2 + z) <= 1/3."""
    b_z = exp(-tl.abs(b_x))
    b_s = tl.div_rn(b_z, 2.0 + b_z)
    b_2 = b_s * b_s
    b_p = tl.fma(b_2, 1.0 / 15, 1.0 / 13)
    b_p = tl.fma(b_2, b_p, 1.0 / 11)
    b_p = tl.fma(b_2, b_p, 1.0 / 9)
    b_p = tl.fma(b_2, b_p, 1.0 / 7)
    b_p = tl.fma(b_2, b_p, 1.0 / 5)
    b_p = tl.fma(b_2, b_p, 1.0 / 3)
    b_p = tl.fma(b_2 * b_s, b_p, b_s)
    return tl.where(b_x < 0, 0.0, b_x) + 2.0 * b_p


@triton.jit
def forgets(b_g, A, b_bias, bound, RAW: tl.constexpr):
    """e^g in fp32 of a log decay, or of a raw gate: "softplus" g = -A softplus(g + bias), "bounded" g = bound sigmoid(A (g + bias))."""
    b_g = b_g.to(tl.float32)
    if RAW == "softplus":
        b_g = -A * softplus(b_g + b_bias)
    elif RAW == "bounded":
        b_g = bound * sigmoid(A * (b_g + b_bias))
    return exp(b_g)


@triton.jit(do_not_specialize=["T", "HV", "columns"])
def recurrent_kernel(
    q, k, v, g, beta, a, b, u, A_log, dt_bias,  # a: whatever erases; g: by GATE
    S0, ST,  # states of one layout; without INDEXED slot i is sequence i
    cu_seqlens, index, into, accepted, parents,
    o,  # [rows, HV, V]
    sq, sk, sv, sg, sbeta, sa, sb,  # rows are so far apart
    s0, sT,  # slots are so far apart
    T, HV, columns,  # of `into` and `parents`, and of `index` with ACCEPTED
    scale, bound, strength,  # beta is multiplied by it
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, GROUP_A: tl.constexpr, GROUP_B: tl.constexpr,
    LINE: tl.constexpr, HEAD: tl.constexpr,  # a state's lines are so far apart, and the states of two heads of a slot
    GATE: tl.constexpr, RULE: tl.constexpr, ERASE: tl.constexpr, BEFORE: tl.constexpr, BONUS: tl.constexpr, USE_BETA: tl.constexpr,
    PACKED: tl.constexpr, STRIP: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, INDEXED: tl.constexpr,
    EACH: tl.constexpr,  # the state after every token t goes to slot into[i_n, t], where that is not negative
    ACCEPTED: tl.constexpr,  # the first state is in slot index[i_n, accepted[i_n] - 1]; else in index[i_n]
    TREE: tl.constexpr,  # token t goes on from the state after token parents[i_n, t]; -1: from the first
    NORM: tl.constexpr, NORM_A: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    ONE: tl.constexpr,  # T is 1
):  # fmt: skip
    """One program a (sequence, value head, block of BV values). A negative slot: output 0, nothing read or stored."""
    NB: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_nh = pid // NB
    o_k, o_v = places(pid - i_nh * NB, BK, BV, STRIP)
    i_n = i_nh // HV
    i_hv = i_nh - i_n * HV
    i_n = i_n.to(tl.int64)
    m_k, m_v = o_k < K, o_v < V
    k_apart, v_apart = (1, LINE) if STRIP == 0 else (LINE, 1)
    o_S = i_hv * HEAD + on_keys(o_k * k_apart, STRIP) + on_values(o_v * v_apart, STRIP)  # the tile
    m_S = on_keys(m_k, STRIP) & on_values(m_v, STRIP)
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
    if INITIAL:
        b_S = tl.load(S0 + i_slot * s0 + o_S, mask=m_S & live, other=0.0).to(tl.float32)  # the tile
    else:
        b_S = tl.zeros(o_S.shape, tl.float32)
    if TREE:
        b_root = b_S
    A = exp(tl.load(A_log + i_hv).to(tl.float32)) if RAW != "" else 0.0
    b_bias = 0.0
    if BIAS:
        if GATE == "key":
            b_bias = tl.load(dt_bias + i_hv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        else:
            b_bias = tl.load(dt_bias + i_hv).to(tl.float32)
    if GATE == "head":
        b_f = exp(tl.load(g + i_hv).to(tl.float32))
    if BONUS:
        b_u = tl.load(u + i_hv * K + o_k, mask=m_k, other=0.0).to(tl.float32)  # keys
    for t in range(1 if ONE else Tn):
        row = bos + t
        b_q = tl.load(q + row * sq + (i_hv // GROUP) * K + o_k, mask=m_k, other=0.0).to(tl.float32)  # keys
        b_k = tl.load(k + row * sk + (i_hv // GROUP) * K + o_k, mask=m_k, other=0.0).to(tl.float32)  # keys
        b_v = tl.load(v + row * sv + i_hv * V + o_v, mask=m_v, other=0.0).to(tl.float32)  # values
        b_q, b_k = unit(b_q, NORM, STRIP) * scale, unit(b_k, NORM, STRIP)
        if TREE:
            i_p = tl.load(parents + i_n * columns + t, mask=t < columns, other=t).to(tl.int64)
            if i_p < 0:
                b_S = b_root
            elif i_p != t - 1:  # the token before has left its state in the registers
                tl.debug_barrier()
                i_s = tl.load(into + i_n * columns + i_p, mask=live & (i_p < t), other=-1).to(tl.int64)
                b_S = tl.load(ST + i_s * sT + o_S, mask=m_S & (i_s >= 0), other=0.0).to(tl.float32)
                b_S = tl.where(i_s >= 0, b_S, float("nan"))  # that state was never made, or not kept
        b_e = b_k
        if ERASE:
            b_e = tl.load(a + row * sa + (i_hv // GROUP_A) * K + o_k, mask=m_k, other=0.0).to(tl.float32)  # keys
            b_e = unit(b_e, NORM_A, STRIP)
        if BEFORE:
            b_x = read(b_S, b_e, STRIP)  # values
        if BONUS:
            b_o = read(b_S, b_q, STRIP)  # values
        if GATE == "head":
            b_S *= b_f
        elif GATE == "scalar":
            b_S *= forgets(tl.load(g + row * sg + i_hv), A, b_bias, bound, RAW)
        elif GATE == "key":
            b_S *= on_keys(forgets(tl.load(g + row * sg + i_hv * K + o_k, mask=m_k, other=0.0), A, b_bias, bound, RAW), STRIP)
        elif GATE == "value":
            b_S *= on_values(forgets(tl.load(g + row * sg + i_hv * V + o_v, mask=m_v, other=0.0), A, b_bias, bound, RAW), STRIP)
        if not BONUS:
            b_o = read(b_S, b_q, STRIP)
        if RULE == "delta":
            if not BEFORE:
                b_x = read(b_S, b_e, STRIP)
            b_w = b_v - b_x  # what is written along k
            if USE_BETA:
                b_beta = tl.load(beta + row * sbeta + i_hv).to(tl.float32)
                b_w *= (sigmoid(b_beta) if SIGMOID else b_beta) * strength
        else:
            b_w = b_v
        b_o = tl.fma(total(b_q * b_u * b_k if BONUS else b_q * b_k, STRIP), b_w, b_o)
        b_S = write(b_S, b_k, b_w, STRIP)
        if RULE == "dplr":
            b_b = tl.load(b + row * sb + (i_hv // GROUP_B) * K + o_k, mask=m_k, other=0.0).to(tl.float32)  # keys
            b_o = tl.fma(total(b_q * b_b, STRIP), b_x, b_o)
            b_S = write(b_S, b_b, b_x, STRIP)
        tl.store(o + (row * HV + i_hv) * V + o_v, tl.where(live, b_o, 0.0).to(o.dtype.element_ty), mask=m_v)
        if EACH:
            b_s = b_S.to(ST.dtype.element_ty)
            b_S = b_s.to(tl.float32)  # the next token goes on from what was stored, as it would in a step of its own
            i_s = tl.load(into + i_n * columns + t, mask=live & (t < columns), other=-1).to(tl.int64)
            tl.store(ST + i_s * sT + o_S, b_s, mask=m_S & (i_s >= 0))
    if FINAL:
        tl.store(ST + i_slot * sT + o_S, b_S.to(ST.dtype.element_ty), mask=m_S & live)
