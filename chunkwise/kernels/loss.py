"""Cross entropy of rows of logits: log-sum-exp, and the loss's slope in place of the logits. nn/vocabulary.py holds the same in PyTorch."""

import triton
import triton.language as tl


@triton.jit
def squash(b_z, scale, softcap, CAP: tl.constexpr):
    """s = softcap tanh(scale z / softcap), or scale z."""
    if CAP:
        b_e = tl.exp(-2.0 * tl.abs(b_z) * (scale / softcap))  # in (0, 1]: tanh without overflow
        b_t = softcap * (1.0 - b_e) / (1.0 + b_e)
        return tl.where(b_z < 0, -b_t, b_t)
    return b_z * scale


@triton.jit(do_not_specialize=["ignore_index", "first"])
def loss_kernel(
    z, target, lse, hit, total, weight, sz, ignore_index, first, scale, softcap, smoothing, spread, z_loss,
    V: tl.constexpr, BV: tl.constexpr, CAP: tl.constexpr, SUM: tl.constexpr, WEIGHT: tl.constexpr, MEASURE: tl.constexpr,
    SLOPE: tl.constexpr,
):  # fmt: skip
    """One program a row. z [R, V], rows sz apart, V neighbouring; target [R] int64; spread = smoothing / classes of the whole vocabulary.

    lse, hit (s_y - lse), total (sum of s), weight: [R] fp32.
    MEASURE: lse, hit and, with SUM, total are made, else read. SLOPE: weight dL/dz takes the place of z.
    """
    i_r = tl.program_id(0).to(tl.int64)
    p_z = z + i_r * sz
    o_v = tl.arange(0, BV)
    i_y = tl.load(target + i_r)
    valid = i_y != ignore_index
    own = i_y - first
    mine = (own >= 0) & (own < V)
    if MEASURE:
        b_hit = squash(tl.load(p_z + own, mask=mine, other=0.0).to(tl.float32), scale, softcap, CAP)
        b_most = tl.full([BV], float("-inf"), tl.float32)  # of each lane: one exponential an element, one reduction a row
        b_sum = tl.zeros([BV], tl.float32)
        b_total = tl.zeros([BV], tl.float32)
        for i_v in range(0, V, BV):
            m_v = i_v + o_v < V
            b_s = squash(tl.load(p_z + i_v + o_v, mask=m_v, other=0.0).to(tl.float32), scale, softcap, CAP)
            if SUM:
                b_total += tl.where(m_v, b_s, 0.0)
            b_s = tl.where(m_v, b_s, float("-inf"))
            b_new = tl.maximum(b_most, b_s)
            b_far = tl.exp(-tl.abs(b_most - b_s))  # either the old sum or the new term shrinks
            b_far = tl.where(b_s == b_most, 1.0, b_far)
            b_sum = tl.where(b_s > b_most, b_sum * b_far + 1.0, b_sum + b_far)
            b_most = b_new
        most = tl.max(b_most, 0)
        rest = tl.log(tl.sum(tl.where(b_most == float("-inf"), 0.0, b_sum * tl.exp(b_most - most)), 0))
        b_lse = most + rest
        tl.store(lse + i_r, b_lse)
        tl.store(hit + i_r, tl.where(mine, b_hit - most - rest, 0.0))
        if SUM:
            tl.store(total + i_r, tl.sum(b_total, 0))
    else:
        b_lse = tl.load(lse + i_r)
    if SLOPE:
        b_w = tl.load(weight + i_r) if WEIGHT else 1.0
        pull = 1.0 + 2.0 * z_loss * b_lse
        for i_v in range(0, V, BV):
            m_v = i_v + o_v < V
            b_s = squash(tl.load(p_z + i_v + o_v, mask=m_v, other=0.0).to(tl.float32), scale, softcap, CAP)
            b_d = tl.exp(b_s - b_lse) * pull - spread
            b_d = tl.where(i_v + o_v == own, b_d - (1.0 - smoothing), b_d)
            if CAP:
                b_t = b_s / softcap
                b_d *= 1.0 - b_t * b_t
            b_d = tl.where(valid, b_d * scale * b_w, 0.0)
            tl.store(p_z + i_v + o_v, b_d.to(z.dtype.element_ty), mask=m_v)
