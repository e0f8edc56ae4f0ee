"""A state in blocks of KB keys, [KB, BV] each, a tuple of them; vectors of keys are such tuples of [KB]. Values first (V_FIRST): [BV, KB].

Products add up block by block, entry by entry, and are summed over a block's keys at the end: threads meet once a token.
"""

import triton
import triton.language as tl

from .exact import exp, left_over
from .ready import activated


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
def singles_anew(b_x, zero, PTX: tl.constexpr):
    """Not before they are wanted: nothing moves this out of a branch."""
    b_y: tl.tuple = ()
    for j in tl.static_range(len(b_x)):
        b_y = b_y + (once_more(b_x[j], zero, PTX),)
    return b_y


@triton.jit
def keep(p_S, b_s, j, live, o_k, m_v, STEP: tl.constexpr, K: tl.constexpr, V_FIRST: tl.constexpr):
    """Block j into memory."""
    m_k = o_k + j * o_k.shape[0] < K
    tl.store(p_S + j * STEP, b_s.to(p_S.dtype.element_ty), mask=on_keys(m_k, V_FIRST) & on_values(m_v, V_FIRST) & live)


@triton.jit
def put(p_o, b_o, o_k, o_v, m_v, MEET: tl.constexpr):
    """Numbers of values into memory: keys first by the threads that have a block's first key, which need not MEET for it. They must where
    those would store them in other vectors than they have of the state: the compiler may then sum once more in that order of threads."""
    b_o = b_o.to(p_o.dtype.element_ty)
    if MEET:
        tl.store(p_o + o_v, b_o, mask=m_v)
    else:
        o_b = o_v[None, :] + o_k[:, None] * 0
        tl.store(p_o + o_b, tl.broadcast_to(b_o[None, :], o_b.shape), mask=m_v[None, :] & (o_k == 0)[:, None])


@triton.jit
def at(p_x, j, o_k, K: tl.constexpr):
    """Block j of a vector of keys in fp32."""
    o_j = o_k + j * o_k.shape[0]
    return tl.load(p_x + o_j, mask=o_j < K, other=0.0).to(tl.float32)


@triton.jit
def times(b_x, number):
    b_z: tl.tuple = ()
    for j in tl.static_range(len(b_x)):
        b_z = b_z + (b_x[j] * number,)
    return b_z


@triton.jit
def both(b_a, b_b, b_c, b_d):
    return b_a + b_c, b_b + b_d


@triton.jit
def few(p_x, K: tl.constexpr):
    """A vector of keys as it is stored, all of it in each warp."""
    FEW: tl.constexpr = 32 if K > 16 else 16
    o_k = tl.arange(0, FEW)
    b_x: tl.tuple = ()
    for j in tl.static_range((K + FEW - 1) // FEW):
        b_x = b_x + (tl.load(p_x + j * FEW + o_k, mask=o_k + j * FEW < K, other=0.0),)
    return b_x


@triton.jit
def total(b_x, b_y, b_z, TWO: tl.constexpr):
    """The sum over all keys of x y, or of x y z, of vectors that each warp has."""
    b_o = tl.zeros(b_x[0].shape, tl.float32)
    for j in tl.static_range(len(b_x)):
        b_p = b_x[j].to(tl.float32)
        if not TWO:
            b_p *= b_z[j].to(tl.float32)
        b_o = tl.fma(b_p, b_y[j].to(tl.float32), b_o)
    return tl.sum(b_o, 0)


@triton.jit
def unit(b_x, NORM: tl.constexpr):
    """1 / sqrt(sum of squares + 1e-6), where asked for."""
    return tl.div_rn(1.0, tl.sqrt_rn(total(b_x, b_x, b_x, True) + 1e-6)) if NORM else 1.0


@triton.jit
def forgets(b_g, A, b_bias, bound, RAW: tl.constexpr):
    """e^g in fp32 of a log decay, or of a raw gate."""
    return exp(activated(b_g.to(tl.float32), A, b_bias, bound, RAW))


@triton.jit
def key_and_gate(
    j, p_k, p_g, p_bias, r_k, A, b_f, bound, o_k, K: tl.constexpr, GATE: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr,
    KEYS: tl.constexpr, first, ROWS: tl.constexpr,
):  # fmt: skip
    """Block j of what a token's row writes along and of what it leaves (all but the first of ROWS: everything): b_f where that is no matter
    of keys."""
    if GATE == "key":
        b_g = at(p_g, j, o_k, K)
        b_f = forgets(b_g, A, at(p_bias, j, o_k, K) if BIAS else 0.0, bound, RAW)
        if ROWS > 1:
            b_f = tl.where(first, b_f, 1.0)
    b_k = left_over(b_g) if KEYS else at(p_k, j, o_k, K) * r_k
    return b_k, b_f


@triton.jit
def rescaled(b_k, b_z, centre, log_most, eps):
    """Keys by what each channel has seen: k most^(-softsign(log(z + eps) - centre))."""
    b_r = tl.log(b_z + eps) - centre
    return b_k * exp(-log_most * tl.div_rn(b_r, 1.0 + tl.abs(b_r)))


@triton.jit
def rounded(b_S, dtype: tl.constexpr):
    b_R: tl.tuple = ()
    for j in tl.static_range(len(b_S)):
        b_R = b_R + (b_S[j].to(dtype).to(tl.float32),)
    return b_R


@triton.jit
def column(p_z, live, o_k, APART: tl.constexpr, K: tl.constexpr, NK: tl.constexpr):
    """The further column of a state, a vector of keys that lie APART; p_z: where it begins."""
    b_z: tl.tuple = ()
    for j in tl.static_range(NK):
        o_j = o_k + j * o_k.shape[0]
        b_z = b_z + (tl.load(p_z + o_j * APART, mask=(o_j < K) & live, other=0.0).to(tl.float32),)
    return b_z


@triton.jit
def keep_column(p_z, b_z, live, o_k, APART: tl.constexpr, K: tl.constexpr):
    for j in tl.static_range(len(b_z)):
        o_j = o_k + j * o_k.shape[0]
        tl.store(p_z + o_j * APART, b_z[j].to(p_z.dtype.element_ty), mask=(o_j < K) & live)


@triton.jit
def nothing(like, NK: tl.constexpr):
    b_x: tl.tuple = ()
    for _ in tl.static_range(NK):
        b_x = b_x + (tl.zeros(like.shape, tl.float32),)
    return b_x
