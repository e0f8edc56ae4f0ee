"""Rotary position embedding: a program finds the angles of a few tokens once, exactly, and turns all their heads."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def rotary_kernel(
    x, positions, y, sx, sp, T, H, log2_theta, sign,
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
    b_rate = tl.exp2(o_p.to(tl.float64) * (-2.0 / K) * log2_theta) * 0.15915494309189535  # turns a token: over 2 pi
    b_turn = b_at[:, None] * b_rate[None, :]  # [BT, BP]
    b_turn = (b_turn - tl.floor(b_turn)).to(tl.float32)
    b_angle = tl.where(b_turn > 0.5, b_turn - 1.0, b_turn) * 6.283185307179586
    b_cos, b_sin = tl.cos(b_angle), tl.sin(b_angle) * sign
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
