"""Rotary position embedding: a program finds the angles of a few tokens once, exactly, and turns all their heads."""

import triton
import triton.language as tl


@triton.jit
def circle(b_r):
    """Cosine and sine of r quarter turns, |r| <= 1/2, by their series, without the far arguments' code that tl.cos brings."""
    b_x = b_r * 1.5707963267948966
    b_z = b_x * b_x
    b_cos = 1.0 + b_z * (-1 / 2 + b_z * (1 / 24 + b_z * (-1 / 720 + b_z * (1 / 40320 - b_z * (1 / 3628800)))))
    b_sin = b_x + b_x * b_z * (-1 / 6 + b_z * (1 / 120 + b_z * (-1 / 5040 + b_z * (1 / 362880))))
    return b_cos, b_sin


@triton.jit(do_not_specialize=["T"])
def rotary_kernel(
    x, positions, y, sx, sp, T, H, log2_theta, rest, sign,
    K: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """x, y: [B * T, H, K], rows of x sx apart, heads K apart; positions [B or 1, T], batches sp apart. Grid (blocks of BT tokens, B).

    Pair i of a head, (x_i, x_{i + K/2}) or INTERLEAVED (x_2i, x_2i+1), turns by sign * position * theta^(-2i/K). Turns are counted in
    float64 and only their fraction is rounded, so far positions keep their phase.
    """
    i_b = tl.program_id(1).to(tl.int64)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_p = tl.arange(0, BP)  # pairs
    m_t = o_t < T
    m = m_t[:, None] & (o_p < K // 2)[None, :]
    b_at = tl.load(positions + i_b * sp + o_t, mask=m_t, other=0).to(tl.float64)
    b_theta = tl.full([BP], log2_theta, tl.float64) + tl.full([BP], rest, tl.float64)  # arguments come as float32: in two parts
    b_rate = tl.exp2(o_p.to(tl.float64) * (-2.0 / K) * b_theta) * 0.15915494309189535  # turns a token: over 2 pi
    b_quarter = 4.0 * b_at[:, None] * b_rate[None, :]  # [BT, BP] quarters of a turn
    b_whole = tl.floor(b_quarter + 0.5)
    b_cos, b_sin = circle((b_quarter - b_whole).to(tl.float32))
    b_side = (b_whole - 4.0 * tl.floor(b_whole * 0.25)).to(tl.int32)  # 0 to 3 whole quarters come on top
    b_swap = b_side % 2 == 1
    b_cos, b_sin = tl.where(b_swap, b_sin, b_cos), tl.where(b_swap, b_cos, b_sin)
    b_cos = tl.where((b_side == 1) | (b_side == 2), -b_cos, b_cos)
    b_sin = tl.where(b_side >= 2, -b_sin, b_sin) * sign
    row = (i_b * T + o_t.to(tl.int64))[:, None]
    for i_h in range(0, H):
        p_x, p_y = x + row * sx + i_h * K, y + row * H * K + i_h * K
        if INTERLEAVED:
            o_k = tl.arange(0, 2 * BP)
            m_k = m_t[:, None] & (o_k < K)[None, :]
            b_x = tl.load(p_x + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)
            b_a, b_b = tl.split(tl.reshape(b_x, [BT, BP, 2]))
            b_y = tl.reshape(tl.join(b_a * b_cos - b_b * b_sin, b_a * b_sin + b_b * b_cos), [BT, 2 * BP])
            tl.store(p_y + o_k[None, :], b_y.to(y.dtype.element_ty), mask=m_k)
        else:
            b_a = tl.load(p_x + o_p[None, :], mask=m, other=0.0).to(tl.float32)
            b_b = tl.load(p_x + K // 2 + o_p[None, :], mask=m, other=0.0).to(tl.float32)
            tl.store(p_y + o_p[None, :], (b_a * b_cos - b_b * b_sin).to(y.dtype.element_ty), mask=m)
            tl.store(p_y + K // 2 + o_p[None, :], (b_a * b_sin + b_b * b_cos).to(y.dtype.element_ty), mask=m)
