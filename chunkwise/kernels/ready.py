"""What a layer hands over raw, made ready where a kernel reads it: gates, write strengths, lengths of keys. In PyTorch: engine/prologue.py.

RAW: "" (gates are log decays), "softplus" or "bounded". BIAS: dt_bias is added first. SIGMOID: write strengths are raw. NORM: keys are.
"""

import triton
import triton.language as tl

from .exact import exp, sigmoid, softplus


@triton.jit
def activated(b_g, A, b_bias, bound, RAW: tl.constexpr):
    """Log decay from a raw gate in fp32: "softplus" -A softplus(g + bias), "bounded" bound sigmoid(A (g + bias)); else g."""
    if RAW == "softplus":
        b_g = -A * softplus(b_g + b_bias)
    elif RAW == "bounded":
        b_g = bound * sigmoid(A * (b_g + b_bias))
    return b_g


@triton.jit
def ready_gate(b_g, A_log, dt_bias, bound, i_hv, m_c, RAW: tl.constexpr, BIAS: tl.constexpr):
    """A chunk's scalar gates [C] as stored -> log decays; 0 past the end."""
    if RAW != "":
        b_bias = tl.load(dt_bias + i_hv).to(tl.float32) if BIAS else 0.0
        b_g = activated(b_g.to(tl.float32), exp(tl.load(A_log + i_hv).to(tl.float32)), b_bias, bound, RAW)
        b_g = tl.where(m_c, b_g, 0.0)
    return b_g


@triton.jit
def ready_strength(b_beta, strength, m_c, SIGMOID: tl.constexpr):
    """Write strengths [C] in fp32; 0 past the end."""
    if SIGMOID:
        b_beta = tl.where(m_c, sigmoid(b_beta) * strength, 0.0)
    return b_beta


@triton.jit
def over_length(b_square):
    """What brings rows to unit length, from their sums of squares; rows of zeros stay zeros."""
    return tl.div_rn(1.0, tl.sqrt_rn(b_square + 1e-6))


@triton.jit(do_not_specialize=["R", "H"])
def length_kernel(
    x, r, sx, R, H, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,  # x: token rows, sx apart; r: fp32 [R]
):  # fmt: skip
    """1 / |x| of every token and head, R of them; ROWS a program. The kernel that makes T has no registers left for rows of q."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, BK)
    p_x = x + (o_r // H * sx + o_r % H * K)[:, None] + o_k[None, :]
    b_x = tl.load(p_x, mask=(o_r < R)[:, None] & (o_k < K)[None, :], other=0.0).to(tl.float32)  # [ROWS, BK]
    tl.store(r + o_r, over_length(tl.sum(b_x * b_x, 1)), mask=o_r < R)
