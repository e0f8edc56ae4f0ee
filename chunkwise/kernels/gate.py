"""What a layer's projections say of forgetting and of write strengths, activated in one pass; nn/gate.py holds the formulas in PyTorch."""

import triton
import triton.language as tl

from .exact import exp, sigmoid, softplus


@triton.jit
def _slope(b_z, b_A, bound, KIND: tl.constexpr):
    """y and dy/dx = dy/dbias of z = x + bias, and dy/dA_log, A = e^A_log."""
    if KIND == "softplus":
        b_y = -b_A * softplus(b_z)
        return b_y, -b_A * sigmoid(b_z), b_y
    b_az = b_z * b_A if KIND == "bounded" else b_z
    b_s = sigmoid(b_az)
    b_d = bound * b_s * sigmoid(-b_az)
    return bound * b_s, (b_d * b_A if KIND == "bounded" else b_d), b_d * b_az


@triton.jit(do_not_specialize=["R"])
def gate_kernel(
    x, A_log, dt_bias, y, sx, R, bound, D: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """y [R, D] fp32 of x, rows sx apart, D = heads * K channels. Grid (blocks of BR rows, blocks of BD channels).

    KIND: "softplus": -e^A_log softplus(x + dt_bias); "bounded": bound sigmoid(e^A_log (x + dt_bias)); "sigmoid": bound sigmoid(x).
    """
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    m = (o_r < R)[:, None] & m_d[None, :]
    b_z = tl.load(x + o_r[:, None] * sx + o_d[None, :], mask=m, other=0.0).to(tl.float32)  # [BR, BD]
    b_A = tl.full([BD], 1.0, tl.float32)
    if KIND != "sigmoid":
        b_A = exp(tl.load(A_log + o_d // K, mask=m_d, other=0.0).to(tl.float32))
    if BIAS:
        b_z += tl.load(dt_bias + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    b_y, _, _ = _slope(b_z, b_A[None, :], bound, KIND)
    tl.store(y + o_r[:, None] * D + o_d[None, :], b_y, mask=m)


@triton.jit(do_not_specialize=["R", "blocks"])
def gate_grad_kernel(
    x, A_log, dt_bias, dy, dx, parts, sx, sy, R, blocks, bound, D: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    KIND: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """dx [R, D]. Grid (programs, blocks of BD channels): each program takes `blocks` blocks of BR rows, one after the other.

    parts [programs, 2, D] fp32: each program's sums over its rows of dA_log and of ddt_bias, channel by channel; none for "sigmoid".
    """
    i_p = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_A = tl.full([BD], 1.0, tl.float32)
    if KIND != "sigmoid":
        b_A = exp(tl.load(A_log + o_d // K, mask=m_d, other=0.0).to(tl.float32))
        b_sums, b_bias = tl.zeros([BR, BD], tl.float32), tl.zeros([BR, BD], tl.float32)
    for i in range(0, blocks):
        o_r = (i_p * blocks + i) * BR + tl.arange(0, BR)
        m = (o_r < R)[:, None] & m_d[None, :]
        b_z = tl.load(x + o_r[:, None] * sx + o_d[None, :], mask=m, other=0.0).to(tl.float32)  # [BR, BD]
        b_dy = tl.load(dy + o_r[:, None] * sy + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        if BIAS:
            b_z += tl.load(dt_bias + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
        _, b_dx, b_dA = _slope(b_z, b_A[None, :], bound, KIND)
        b_dx *= b_dy
        if KIND != "sigmoid":
            b_sums += b_dy * b_dA
            b_bias += b_dx
        tl.store(dx + o_r[:, None] * D + o_d[None, :], b_dx.to(dx.dtype.element_ty), mask=m)
    if KIND != "sigmoid":
        tl.store(parts + i_p * 2 * D + o_d, tl.sum(b_sums, 0), mask=m_d)
        tl.store(parts + (i_p * 2 + 1) * D + o_d, tl.sum(b_bias, 0), mask=m_d)
