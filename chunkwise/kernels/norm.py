"""Norms of rows, with the residual added before and the gate applied after, in one pass; nn/norm.py holds the formulas in PyTorch."""

import triton
import triton.language as tl


@triton.jit
def gated(b_g, GATE: tl.constexpr):
    """act(g) and its slope; GATE: "silu" or "sigmoid"."""
    b_s = tl.sigmoid(b_g)
    if GATE == "silu":
        return b_g * b_s, b_s * (1.0 + b_g * (1.0 - b_s))
    return b_s, b_s * (1.0 - b_s)


@triton.jit
def normalize(b_h, m_d, eps, D: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr):
    """Rows [BR, BD] over their root mean square (MEAN) or length, and one over that [BR]. CENTER: their mean is taken off first."""
    if CENTER:
        b_h = tl.where(m_d[None, :], b_h - (tl.sum(b_h, 1) / D)[:, None], 0.0)
    b_square = tl.sum(b_h * b_h, 1)
    b_r = tl.rsqrt((b_square / D if MEAN else b_square) + eps)
    return b_h * b_r[:, None], b_r


@triton.jit(do_not_specialize=["R"])
def norm_kernel(
    x, residual, weight, bias, gate, y, h, sx, sr, sg, R, eps,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """y = act(gate) (norm(x + residual) weight + bias). Grid (blocks of BR rows, groups of D channels).

    x, residual, gate: rows sx, sr, sg apart; y, h = x + residual: dense. SHARED: weight and bias are [D], those of every group.
    """
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    i_d = tl.program_id(1) * D
    o_w = o_d if SHARED else i_d + o_d
    m = (o_r < R)[:, None] & m_d[None, :]
    row = tl.num_programs(1) * D
    b_h = tl.load(x + o_r[:, None] * sx + (i_d + o_d)[None, :], mask=m, other=0.0).to(tl.float32)  # [BR, BD]
    if RESIDUAL:
        b_h += tl.load(residual + o_r[:, None] * sr + (i_d + o_d)[None, :], mask=m, other=0.0).to(tl.float32)
        b_sum = b_h.to(h.dtype.element_ty)
        tl.store(h + o_r[:, None] * row + (i_d + o_d)[None, :], b_sum, mask=m)
        b_h = b_sum.to(tl.float32)  # what the backward pass will read
    b_n, _ = normalize(b_h, m_d, eps, D, CENTER, MEAN)
    if WEIGHT:
        b_n *= tl.load(weight + o_w, mask=m_d, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        b_n += tl.load(bias + o_w, mask=m_d, other=0.0).to(tl.float32)[None, :]
    if GATE != "":
        b_a, _ = gated(tl.load(gate + o_r[:, None] * sg + (i_d + o_d)[None, :], mask=m, other=0.0).to(tl.float32), GATE)
        b_n *= b_a
    tl.store(y + o_r[:, None] * row + (i_d + o_d)[None, :], b_n.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["R", "blocks"])
def norm_grad_kernel(
    h, weight, bias, gate, dy, dh, dx, dgate, dweight, dbias, sh, sg, sy, sd, R, blocks, eps,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, DH: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Gradients; dh is that of h itself. Grid (programs, groups): each program takes `blocks` blocks of BR rows, one after the other.

    dweight, dbias: [programs, groups * D] fp32, each program's own sum over its rows.
    """
    i_p = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_c = tl.program_id(1) * D + o_d
    o_w = o_d if SHARED else o_c
    row = tl.num_programs(1) * D
    if WEIGHT:
        b_w = tl.load(weight + o_w, mask=m_d, other=0.0).to(tl.float32)[None, :]
        b_dw = tl.zeros([BR, BD], tl.float32)
    if BIAS:
        b_b = tl.load(bias + o_w, mask=m_d, other=0.0).to(tl.float32)[None, :]
        b_db = tl.zeros([BR, BD], tl.float32)
    for i in range(0, blocks):
        o_r = (i_p * blocks + i) * BR + tl.arange(0, BR)
        m = (o_r < R)[:, None] & m_d[None, :]
        b_h = tl.load(h + o_r[:, None] * sh + o_c[None, :], mask=m, other=0.0).to(tl.float32)  # [BR, BD]
        b_dm = tl.load(dy + o_r[:, None] * sy + o_c[None, :], mask=m, other=0.0).to(tl.float32)
        if GATE != "":
            b_g = tl.load(gate + o_r[:, None] * sg + o_c[None, :], mask=m, other=0.0).to(tl.float32)
        if DH:
            b_dh = tl.load(dh + o_r[:, None] * sd + o_c[None, :], mask=m, other=0.0).to(tl.float32)
        b_n, b_r = normalize(b_h, m_d, eps, D, CENTER, MEAN)
        if GATE != "":
            b_a, b_slope = gated(b_g, GATE)
            b_m = b_n
            if WEIGHT:
                b_m = b_n * b_w
            if BIAS:
                b_m += b_b
            tl.store(dgate + o_r[:, None] * row + o_c[None, :], (b_dm * b_m * b_slope).to(dgate.dtype.element_ty), mask=m)
            b_dm *= b_a
        if BIAS:
            b_db += b_dm
        if WEIGHT:
            b_dw += b_dm * b_n
            b_dm *= b_w
        b_dot = tl.sum(b_dm * b_n, 1)
        b_d = b_dm - b_n * (b_dot / D if MEAN else b_dot)[:, None]
        if CENTER:
            b_d -= (tl.sum(b_dm, 1) / D)[:, None]
        b_d *= b_r[:, None]
        if DH:
            b_d += b_dh
        tl.store(dx + o_r[:, None] * row + o_c[None, :], b_d.to(dx.dtype.element_ty), mask=m)
    if WEIGHT:
        tl.store(dweight + i_p * row + o_c, tl.sum(b_dw, 0), mask=m_d)
    if BIAS:
        tl.store(dbias + i_p * row + o_c, tl.sum(b_db, 0), mask=m_d)
