"""The recurrence token by token, the state in registers: decoding in a pool of states, and short inputs.

    forget   S <- e^g S                        g: none | per head | scalar | per key channel | per value channel
    write    add    S <- S + k v'
             delta  S <- S + k x',  x = beta (v - S'e)            BEFORE: S as it was before the token forgot
             dplr   S <- S + k v' + b x',  x = S'a                S as it was before the token forgot
    read     o = scale S'q                                        BONUS: S as it was before, and (q u).k v for the token's own pair

A token reads the state once, for o and for x together and before it has forgotten: e^g goes into q and e, or into what was read. To o
it adds what it is about to write: o = (q e^g) S + (q.k) x. Built without the compilers' own fusing of products and sums, so that several
tokens at once give the bits of one at a time.
The state lies in blocks of KB keys, [KB, BV] each, a tuple of them; vectors of keys are such tuples of [KB]. Products add up block by
block, entry by entry, and are summed over a block's keys at the end: threads meet once a token. Values first (V_FIRST): [BV, KB].
"""

import triton
import triton.language as tl


@triton.jit
def on_keys(b_x, V_FIRST: tl.constexpr):
    """Numbers of keys against a block."""
    return b_x[None, :] if V_FIRST else b_x[:, None]


@triton.jit
def on_values(b_x, V_FIRST: tl.constexpr):
    """Numbers of values against a block."""
    return b_x[:, None] if V_FIRST else b_x[None, :]


@triton.jit
def single(b_x):
    """To fp32; of bf16 by its bits, an instruction a number."""
    if b_x.dtype == tl.bfloat16:
        b_x = (b_x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return b_x.to(tl.float32)


@triton.jit
def once_more(b_x, zero, PTX: tl.constexpr):
    """To fp32 anew, for all the compiler knows of zero, so that numbers of 16 bits lie two in a register till then."""
    if not PTX or b_x.dtype != tl.bfloat16:
        return single(b_x)
    b_0 = tl.zeros(b_x.shape, tl.int32) + zero
    halves: tl.constexpr = "prmt.b32 $0, $2, $3, 0x1044; prmt.b32 $1, $2, $4, 0x3244;"
    return tl.inline_asm_elementwise(halves, "=r,=r,r,r,r", [b_x, b_0], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def state(p_S, live, o_k, m_v, STEP: tl.constexpr, K: tl.constexpr, NK: tl.constexpr, V_FIRST: tl.constexpr):
    """The blocks of a state as they are stored, p_S points to the first."""
    b_S: tl.tuple = ()
    for j in tl.static_range(NK):
        m_k = o_k + j * o_k.shape[0] < K
        b_S = b_S + (tl.load(p_S + j * STEP, mask=on_keys(m_k, V_FIRST) & on_values(m_v, V_FIRST) & live, other=0.0),)
    return b_S


@triton.jit
def singles(b_x):
    b_y: tl.tuple = ()
    for j in tl.static_range(len(b_x)):
        b_y = b_y + (single(b_x[j]),)
    return b_y


@triton.jit
def keep(p_S, b_S, live, o_k, m_v, STEP: tl.constexpr, K: tl.constexpr, V_FIRST: tl.constexpr):
    """Blocks into memory."""
    for j in tl.static_range(len(b_S)):
        m_k = o_k + j * o_k.shape[0] < K
        tl.store(p_S + j * STEP, b_S[j].to(p_S.dtype.element_ty), mask=on_keys(m_k, V_FIRST) & on_values(m_v, V_FIRST) & live)


@triton.jit
def keys(p_x, o_k, K: tl.constexpr, NK: tl.constexpr):
    """A vector of keys in fp32."""
    b_x: tl.tuple = ()
    for j in tl.static_range(NK):
        b_x = b_x + (tl.load(p_x + j * o_k.shape[0] + o_k, mask=o_k + j * o_k.shape[0] < K, other=0.0).to(tl.float32),)
    return b_x


@triton.jit
def times(b_x, number):
    b_z: tl.tuple = ()
    for j in tl.static_range(len(b_x)):
        b_z = b_z + (b_x[j] * number,)
    return b_z


@triton.jit
def product(b_x, b_y):
    b_z: tl.tuple = ()
    for j in tl.static_range(len(b_x)):
        b_z = b_z + (b_x[j] * b_y[j],)
    return b_z


@triton.jit
def read(b_S, b_x, V_FIRST: tl.constexpr):
    """S'x, entry by entry, still to be summed over the keys of a block."""
    b_o = single(b_S[0]) * on_keys(b_x[0], V_FIRST)
    for j in tl.static_range(1, len(b_S)):
        b_o = tl.fma(single(b_S[j]), tl.broadcast_to(on_keys(b_x[j], V_FIRST), b_o.shape), b_o)
    return b_o


@triton.jit
def both(b_a, b_b, b_c, b_d):
    return b_a + b_c, b_b + b_d


@triton.jit
def written(b_S, b_k, b_x, V_FIRST: tl.constexpr):
    """S + k x', rounded once."""
    b_W: tl.tuple = ()
    for j in tl.static_range(len(b_S)):
        b_kj = tl.broadcast_to(on_keys(b_k[j], V_FIRST), b_S[j].shape)
        b_W = b_W + (tl.fma(b_kj, tl.broadcast_to(on_values(b_x, V_FIRST), b_kj.shape), b_S[j]),)
    return b_W


@triton.jit
def total(p_x, p_y, p_z, K: tl.constexpr, FEW: tl.constexpr):
    """The sum over all keys of x y, or where z is given of x y z: each warp by itself, from memory."""
    FEW_K: tl.constexpr = 32 if K > 16 else 16
    o_k = tl.arange(0, FEW_K)
    b_o = tl.zeros([FEW_K], tl.float32)
    for j in tl.static_range((K + FEW_K - 1) // FEW_K):
        m_k = o_k + j * FEW_K < K
        b_x = tl.load(p_x + j * FEW_K + o_k, mask=m_k, other=0.0).to(tl.float32)
        if not FEW:
            b_x *= tl.load(p_z + j * FEW_K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_o = tl.fma(b_x, tl.load(p_y + j * FEW_K + o_k, mask=m_k, other=0.0).to(tl.float32), b_o)
    return tl.sum(b_o, 0)


@triton.jit
def unit(p_x, K: tl.constexpr, NORM: tl.constexpr):
    """1 / sqrt(sum of squares + 1e-6), where asked for."""
    return tl.div_rn(1.0, tl.sqrt_rn(total(p_x, p_x, p_x, K, True) + 1e-6)) if NORM else 1.0


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


@triton.jit
def forget(b_g, A, b_bias, bound, RAW: tl.constexpr, BIAS: tl.constexpr):
    """`forgets` of a vector of keys."""
    b_f: tl.tuple = ()
    for j in tl.static_range(len(b_g)):
        b_f = b_f + (forgets(b_g[j], A, b_bias[j] if BIAS else 0.0, bound, RAW),)
    return b_f


@triton.jit
def forgotten(b_S, b_f, zero, GATE: tl.constexpr, V_FIRST: tl.constexpr, PTX: tl.constexpr):
    """e^g S."""
    b_R: tl.tuple = ()
    for j in tl.static_range(len(b_S)):
        b_s = once_more(b_S[j], zero, PTX)
        if GATE == "key":
            b_s *= on_keys(b_f[j], V_FIRST)
        elif GATE == "value":
            b_s *= on_values(b_f, V_FIRST)
        elif GATE != "none":
            b_s *= b_f
        b_R = b_R + (b_s,)
    return b_R


@triton.jit
def rounded(b_S, dtype: tl.constexpr):
    b_R: tl.tuple = ()
    for j in tl.static_range(len(b_S)):
        b_R = b_R + (b_S[j].to(dtype).to(tl.float32),)
    return b_R


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
    K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, GROUP_A: tl.constexpr, GROUP_B: tl.constexpr,
    LINE: tl.constexpr, HEAD: tl.constexpr,  # a state's lines are so far apart, and the states of two heads of a slot
    GATE: tl.constexpr, RULE: tl.constexpr, ERASE: tl.constexpr, BEFORE: tl.constexpr, BONUS: tl.constexpr, USE_BETA: tl.constexpr,
    PACKED: tl.constexpr, V_FIRST: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, INDEXED: tl.constexpr,
    EACH: tl.constexpr,  # the state after every token t goes to slot into[i_n, t], where that is not negative
    ACCEPTED: tl.constexpr,  # the first state is in slot index[i_n, accepted[i_n] - 1]; else in index[i_n]
    TREE: tl.constexpr,  # token t goes on from the state after token parents[i_n, t]; -1: from the first
    NORM: tl.constexpr, NORM_A: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    ONE: tl.constexpr,  # T is 1
    PTX: tl.constexpr,  # built for a card that has it
):  # fmt: skip
    """One program a (sequence, value head, block of BV values). A negative slot: output 0, nothing read or stored."""
    NB: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_nh = pid // NB
    o_k, o_v = tl.arange(0, KB), (pid - i_nh * NB) * BV + tl.arange(0, BV)
    i_n = i_nh // HV
    i_hv = i_nh - i_n * HV
    i_n = i_n.to(tl.int64)
    m_v = o_v < V
    k_apart, v_apart = (1, LINE) if V_FIRST else (LINE, 1)
    STEP: tl.constexpr = KB * (1 if V_FIRST else LINE)
    o_S = i_hv * HEAD + on_keys(o_k * k_apart, V_FIRST) + on_values(o_v * v_apart, V_FIRST)  # the first block
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
    b_first: tl.tuple = ()
    if INITIAL:
        b_first = state(S0 + i_slot * s0 + o_S, live, o_k, m_v, STEP, K, NK, V_FIRST)
    else:
        for _ in tl.static_range(NK):
            b_first = b_first + (tl.zeros(o_S.shape, tl.float32),)
    b_S = singles(b_first)
    zero = T - 1  # with ONE
    if TREE:
        b_root = b_S
    A = exp(tl.load(A_log + i_hv).to(tl.float32)) if RAW != "" else 0.0
    b_bias = 0.0
    if BIAS:
        if GATE == "key":
            b_bias = keys(dt_bias + i_hv * K, o_k, K, NK)
        else:
            b_bias = tl.load(dt_bias + i_hv).to(tl.float32)
    if GATE == "head":
        b_head = exp(tl.load(g + i_hv).to(tl.float32))
    for t in range(1 if ONE else Tn):
        row = bos + t
        p_q, p_k = q + row * sq + (i_hv // GROUP) * K, k + row * sk + (i_hv // GROUP) * K
        b_v = tl.load(v + row * sv + i_hv * V + o_v, mask=m_v, other=0.0).to(tl.float32)  # values
        r_q, r_k = unit(p_q, K, NORM) * scale, unit(p_k, K, NORM)
        b_q, b_k = times(keys(p_q, o_k, K, NK), r_q), times(keys(p_k, o_k, K, NK), r_k)
        if TREE:
            i_p = tl.load(parents + i_n * columns + t, mask=t < columns, other=t).to(tl.int64)
            if i_p < 0:
                b_S = b_root
            elif i_p != t - 1:  # the token before has left its state in the registers
                tl.debug_barrier()
                i_s = tl.load(into + i_n * columns + i_p, mask=live & (i_p < t), other=-1).to(tl.int64)
                b_S = state(ST + i_s * sT + o_S, i_s >= 0, o_k, m_v, STEP, K, NK, V_FIRST)
                b_S = times(singles(b_S), tl.where(i_s >= 0, 1.0, float("nan")))  # that state was never made, or not kept
        b_e = b_k
        if ERASE:
            p_a = a + row * sa + (i_hv // GROUP_A) * K
            b_e = times(keys(p_a, o_k, K, NK), unit(p_a, K, NORM_A))
        b_f = 1.0
        if GATE == "head":
            b_f = b_head
        elif GATE == "scalar":
            b_f = forgets(tl.load(g + row * sg + i_hv), A, b_bias, bound, RAW)
        elif GATE == "key":
            b_f = forget(keys(g + row * sg + i_hv * K, o_k, K, NK), A, b_bias, bound, RAW, BIAS)  # keys
        elif GATE == "value":
            b_f = forgets(tl.load(g + row * sg + i_hv * V + o_v, mask=m_v, other=0.0), A, b_bias, bound, RAW)  # values
        b_was = b_first if ONE and not TREE else b_S
        b_o = read(b_was, product(b_q, b_f) if GATE == "key" and not BONUS else b_q, V_FIRST)
        AXIS: tl.constexpr = 1 if V_FIRST else 0
        if RULE == "add":
            b_o = tl.sum(b_o, AXIS)  # values
            b_w = b_v  # what is written along k
        else:
            b_x = read(b_was, product(b_e, b_f) if GATE == "key" and not BEFORE else b_e, V_FIRST)
            b_o, b_x = tl.reduce((b_o, b_x), AXIS, both)  # values
            if not (GATE == "key" or BEFORE):
                b_x *= b_f
            b_w = b_v - b_x if RULE == "delta" else b_v
        if not (GATE == "key" or BONUS):
            b_o *= b_f
        if RULE == "delta" and USE_BETA:
            b_beta = tl.load(beta + row * sbeta + i_hv).to(tl.float32)
            b_w *= (sigmoid(b_beta) if SIGMOID else b_beta) * strength
        b_o = tl.fma(tl.zeros_like(b_o) + total(p_q, p_k, u + i_hv * K, K, not BONUS) * r_q * r_k, b_w, b_o)
        b_S = forgotten(b_was, b_f, zero, GATE, V_FIRST, PTX)
        b_S = written(b_S, b_k, b_w, V_FIRST)
        if RULE == "dplr":
            p_b = b + row * sb + (i_hv // GROUP_B) * K
            b_o = tl.fma(tl.zeros_like(b_o) + total(p_q, p_b, p_b, K, True) * r_q, b_x, b_o)
            b_S = written(b_S, keys(p_b, o_k, K, NK), b_x, V_FIRST)
        tl.store(o + (row * HV + i_hv) * V + o_v, tl.where(live, b_o, 0.0).to(o.dtype.element_ty), mask=m_v)
        if EACH:
            b_S = rounded(b_S, ST.dtype.element_ty)  # the next token goes on from what is stored, as it would in a step of its own
            i_s = tl.load(into + i_n * columns + t, mask=live & (t < columns), other=-1).to(tl.int64)
            keep(ST + i_s * sT + o_S, b_S, i_s >= 0, o_k, m_v, STEP, K, V_FIRST)
    if FINAL:
        keep(ST + i_slot * sT + o_S, b_S, live, o_k, m_v, STEP, K, V_FIRST)
