"""Pairs of a chunk's tokens under gates of one number a token or a head, or none: their decays, and scores of readers and writers."""

import triton
import triton.language as tl

from .tile import NEAR, pair_decay


@triton.jit
def pairs(b_G, b_F, o_c, o_i, LOWER: tl.constexpr, SPLIT: tl.constexpr):
    """e^(G_i - G_j) for j <= i, else 0 [C, C]: LOWER [i, j], else [j, i]. o_i: the readers' rows."""
    if LOWER:
        b_D = pair_decay(b_G[:, None], b_F[:, None], b_G[None, :], b_F[None, :], o_c[None, :] <= o_i[:, None], SPLIT)
    else:
        b_D = pair_decay(b_G[None, :], b_F[None, :], b_G[:, None], b_F[:, None], o_c[:, None] <= o_i[None, :], SPLIT)
    return b_D


@triton.jit
def scores(
    b_y, b_x, b_D, b_G, b_F, o_c, L, scale, C: tl.constexpr, LOWER: tl.constexpr, GATE: tl.constexpr, SPLIT: tl.constexpr,
    FACTORS: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """scale y_i.x_j e^(G_i - G_j) for j <= i, else 0 [C, C]: LOWER from y = q, x = k; else transposed, [j, i] from y = k, x = q.

    b_D: a head's `pairs`, the same for all chunks. FACTORS (scalar): e^G_i e^-G_j where that stays within fp32, a factor a token instead of
    one a pair. That is decided for each reader by its own G, so that no later token changes its bits.
    """
    o_i = tl.minimum(o_c, L - 1)  # hangs on the chunk, so that no mask of [C, C] is kept in registers from chunk to chunk
    b_M = tl.dot(b_y, tl.trans(b_x), input_precision=IP) * scale  # [C, C]
    # Behind a branch Triton lays M out over all warps; straight on the way to the next product, each half of 8 warps would compute it all.
    if GATE == "head":
        if L > 0:
            b_M *= b_D
    elif GATE == "none":
        if L > 0:
            b_M = tl.where((o_c[None, :] <= o_i[:, None]) if LOWER else (o_c[:, None] <= o_i[None, :]), b_M, 0.0)
    elif FACTORS:
        b_r, b_w = tl.exp2(b_G), tl.exp2(-b_G)  # [C]
        if tl.sum(tl.where(o_c == C - 1, b_G, 0.0), 0) > NEAR:
            if LOWER:
                b_M = tl.where(o_c[None, :] <= o_i[:, None], b_M * (b_r[:, None] * b_w[None, :]), 0.0)
            else:
                b_M = tl.where(o_c[:, None] <= o_i[None, :], b_M * (b_r[None, :] * b_w[:, None]), 0.0)
        else:
            b_far = b_M * pairs(b_G, b_F, o_c, o_i, LOWER, SPLIT)
            if LOWER:
                b_M = tl.where((o_c[None, :] <= o_i[:, None]) & (b_G > NEAR)[:, None], b_M * (b_r[:, None] * b_w[None, :]), b_far)
            else:
                b_M = tl.where((o_c[:, None] <= o_i[None, :]) & (b_G > NEAR)[None, :], b_M * (b_r[None, :] * b_w[:, None]), b_far)
    else:
        b_M *= pairs(b_G, b_F, o_c, o_i, LOWER, SPLIT)
    return b_M
