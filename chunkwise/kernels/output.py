"""Stage `output` where a scan leaves it to chunks side by side (the rule adds): a chunk's rows from the state it met.

    o_i = scale e^(G_i) x_i S + sum_{j <= i} scale (x_i.y_j) e^(G_i - G_j) z_j                          o: x, y, z = q, k, v; dq: do, v, k
    REVERSE, from the gradient dS of the state that the chunk left:
    o_j = e^(G_C - G_j) x_j dS + sum_{i >= j} scale (y_i.x_j) e^(G_i - G_j) z_i                         dv: k, q, do; dk: v, do, q

TURNED: keys and values have changed places (dq, dk): x and y are of value heads, z of key heads.
"""

import triton
import triton.language as tl

from .tile import chunk_place, decay_sums, load_gate, load_rows, pair_decay, start, whole


@triton.jit(do_not_specialize=["T", "HV"])
def output_kernel(
    x, y, z, g, chunks, S, o,  # x, y, z: token rows; g [HV] | [B*T, HV]; S [slots, HV, V, K]; o [B*T, HV, Z]
    sx, sz,  # rows of x and y, of z are so far apart
    T, HV, scale, rest,  # rest: what dS and the scale lack
    X: tl.constexpr, Z: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BZ: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, REVERSE: tl.constexpr, TURNED: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head, block of z's columns)."""
    NZ: tl.constexpr = (Z + BZ - 1) // BZ
    i_z, i_slot, i_hv, row, L = chunk_place(tl.program_id(0), chunks, HV, T, C, PACKED, NZ)
    if L <= 0:
        return
    i_x, i_y = i_hv // GROUP, i_hv
    if TURNED:
        i_x, i_y = i_y, i_x
    S += (i_slot * HV + i_hv) * X * Z
    o_c, o_z = tl.arange(0, C), i_z * BZ + tl.arange(0, BZ)
    b_M = tl.zeros([C, C], tl.float32)
    b_o = tl.zeros([C, BZ], tl.float32)
    for i in range((X + BX - 1) // BX):
        o_x = i * BX + tl.arange(0, BX)
        b_x = load_rows(x + i_x * X, row, sx, o_c, o_x, L, X, BX)  # [C, BX]
        b_y = load_rows(y + i_x * X, row, sx, o_c, o_x, L, X, BX)  # [C, BX]
        if TURNED:
            b_S = load_rows(S, 0, Z, o_x, o_z, X, Z, BZ)  # [BX, BZ]
        else:
            b_S = tl.trans(load_rows(S, 0, X, o_z, o_x, Z, X, BX))  # [BX, BZ]
        b_M = tl.dot(b_x, tl.trans(b_y), b_M, input_precision=IP)
        b_o = tl.dot(b_x, b_S, b_o, input_precision=IP)
    i, j = o_c[:, None], o_c[None, :]
    if GATE == "none":
        b_M = tl.where(i <= j if REVERSE else i >= j, b_M * scale, 0.0)
        if not REVERSE:
            b_o *= scale
    else:
        b_G, b_F = decay_sums(load_gate(g, row, HV, i_hv, o_c, L, GATE), o_c, L, GATE, SPLIT)  # [C]
        if REVERSE:
            _, b_D = whole(b_G, b_F, o_c, C, SPLIT)
            b_M *= pair_decay(b_G[None, :], b_F[None, :], b_G[:, None], b_F[:, None], i <= j, SPLIT) * scale
        else:
            b_D = start(b_G, b_F, SPLIT) * scale
            b_M *= pair_decay(b_G[:, None], b_F[:, None], b_G[None, :], b_F[None, :], i >= j, SPLIT) * scale
        b_o *= b_D[:, None]
    b_z = load_rows(z + i_y * Z, row, sz, o_c, o_z, L, Z, BZ)  # [C, BZ]
    b_o = tl.dot(b_M.to(b_z.dtype), b_z, b_o, input_precision=IP) * rest
    o_out = ((row + o_c) * HV + i_hv)[:, None] * Z + o_z[None, :]
    tl.store(o + o_out, b_o, mask=(o_c < L)[:, None] & (o_z < Z)[None, :])
