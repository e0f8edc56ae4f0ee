"""Stage `grads` for gates per key channel, of chunks that forget too much for grad_key.py, and where that one does not serve.

One program a (chunk, value head, block of keys): channels have nothing to do with each other beyond dM, which every program makes for
itself in the pass over values that also reads the states. D is dv = beta U, as in grad.py.

The pairs of a chunk meet level by level as in score.py, down to blocks in which no channel forgets more than 2^LIMIT either side of the
middle: all pairs there meet around it. In each level x~ = x e^(sum of its gates), so the gate's gradient is the sum, over the same sets of
tokens, of x~ dx~: nothing is added only to be subtracted again, except around the middle. A pair i = j does not decay and is kept apart.

NEAR: the chunks in reach (bounded.py notes which), where all pairs meet around the chunk's middle; a kernel each does those and the others.

Everything of a block of channels is held transposed, [BK, C]: what is computed is the left operand of its products, from registers, and dM
serves as itself and transposed from one copy in shared memory. In chunks of 64, blocks of fewer than 64 keys make ptxas 12.8 build wgmma
descriptors from registers nobody wrote: on Hopper always 64 of them, however few there are. Chunks of 16 and 32 are narrow operands
themselves: with 64 some of their gradients were built that way, so they have 32 at most.
"""

import triton
import triton.language as tl

from .grad import load_state
from .score import add_sums, chosen, fitting, gate_parts, is_chosen, load_sets, meets
from .tile import RCP_LN2, chunk_rows, dense_place, load_chunk, load_rows, load_strength, shared_strength


@triton.jit
def sums(b_hi, b_lo, b_R, EXACT: tl.constexpr, IP: tl.constexpr):
    """Sums of gates [BK, C] over the sets in R's rows, in log2 units: [BK, C]."""
    b_E = tl.dot(b_hi, tl.trans(b_R), input_precision=IP)
    if not EXACT:
        b_E = tl.dot(b_lo, tl.trans(b_R), b_E, input_precision=IP)
    return b_E * RCP_LN2


@triton.jit
def widest_level(b_hi, b_lo, sets, o_c, C: tl.constexpr, LIMIT: tl.constexpr, EXACT: tl.constexpr, IP: tl.constexpr):
    """log2 of how many rows a block may have for its decays to stay within 2^LIMIT of those at its middle."""
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    found = 0
    for n in range(LEVELS):
        if found == 0:
            b_E = sums(b_hi, b_lo, load_sets(sets, 2 * LEVELS - n, o_c, C), EXACT, IP)  # [BK, C]
            found = tl.where(tl.max(tl.max(tl.abs(b_E), 1), 0) <= LIMIT, LEVELS - n, 0)  # of NaN nothing is known
    return found


@triton.jit
def met_grads(
    b_A, b_B, m,  # [C, C] dM_qk, dM_rw, the pairs that meet
    b_q, b_r, b_k, b_row, b_col, SIGN: tl.constexpr,  # [BK, C]; decays of rows and columns; SIGN: of the gates in the columns'
    b_dq, b_dr, b_dk,  # [BK, C] to add to
    DELTA: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of pairs that meet to dq, dr, dk; and the gradient of the decays' exponent, [BK, C]."""
    TYPE: tl.constexpr = b_k.dtype
    b_qx, b_ky = (b_q * b_row).to(TYPE), (b_k * b_col).to(TYPE)
    b_M = tl.where(m, b_A, 0.0).to(TYPE)
    b_dx = tl.dot(b_ky, tl.trans(b_M), input_precision=IP)
    b_dq += b_row * b_dx
    b_z = b_qx * b_dx
    b_dy = tl.dot(b_qx, b_M, input_precision=IP)
    if DELTA:
        b_rx = (b_r * b_row).to(TYPE)
        b_M = tl.where(m, b_B, 0.0).to(TYPE)
        b_dx = tl.dot(b_ky, tl.trans(b_M), input_precision=IP)
        b_dr += b_row * b_dx
        b_z += b_rx * b_dx
        b_dy = tl.dot(b_rx, b_M, b_dy, input_precision=IP)
    b_dk += b_col * b_dy
    return b_dq, b_dr, b_dk, b_z + SIGN * (b_ky * b_dy)


@triton.jit
def block_grads(
    q, e, k, g, beta, v, do, y, D, D_rows, chunks, sets, decay, S, dS, dq, de, dk, dg, dbeta,  # as grad_key_blocks_kernel
    sk, sv, sy, T, HV, scale, rest, i_slot, i_hv, i_k,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    DELTA: tl.constexpr, ERASE: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr,
    NEAR: tl.constexpr, LIMIT: tl.constexpr, IP: tl.constexpr, IPG: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk in one block of keys, and its share of those of values."""
    TYPE: tl.constexpr = k.dtype.element_ty
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    EXACT: tl.constexpr = (TYPE == tl.float32) or (g.dtype.element_ty == TYPE)
    row, L = chunk_rows(chunks, i_slot.to(tl.int64), T, C, PACKED)
    if L > 0:
        i_b, t = dense_place(i_slot, T, C)
        i_h = i_hv // GROUP
        o_c = tl.arange(0, C)
        o_k = i_k * BK + tl.arange(0, BK)
        o_i, o_j = o_c[:, None], o_c[None, :]
        m_c, m_k = o_c < L, o_k < K
        b_A = tl.zeros([C, C], tl.float32)
        b_B = tl.zeros([C, C], tl.float32)
        b_dq = tl.zeros([BK, C], tl.float32)
        b_dk = tl.zeros([BK, C], tl.float32)
        b_dr = tl.zeros([BK, C], tl.float32)
        b_through = tl.zeros([BK], tl.float32)  # S dS
        for i_v in range(NV):
            b_do = load_chunk(do, row, sv, i_b, i_hv, t, o_c, i_v * BV, L, V, C, BV, TMA)  # [C, BV]
            b_y = load_chunk(y, row, sy, i_b, i_hv, t, o_c, i_v * BV, L, V, C, BV, TMA)  # [C, BV]
            b_S = load_state(S, i_slot, i_hv, HV, i_v, i_k, K, V, BK, BV, TMA)  # [BV, BK]
            b_dS = load_state(dS, i_slot, i_hv, HV, i_v, i_k, K, V, BK, BV, TMA)  # [BV, BK]
            b_A = tl.dot(b_do, tl.trans(b_y), b_A, input_precision=IP)
            b_dq = tl.dot(tl.trans(b_S), tl.trans(b_do), b_dq, input_precision=IP)
            b_dk = tl.dot(tl.trans(b_dS), tl.trans(b_y), b_dk, input_precision=IP)
            if DELTA:
                b_u = load_chunk(D, row, HV * V, i_b, i_hv, t, o_c, i_v * BV, L, V, C, BV, TMA)  # [C, BV]
                b_B = tl.dot(b_u, tl.trans(b_y), b_B, input_precision=IP)
                b_dr = tl.dot(tl.trans(b_S), tl.trans(b_u), b_dr, input_precision=IP)
            b_through += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 0)
        if not DELTA:
            b_dk *= rest
            b_through *= rest
        o_h = (row + o_c) * HV + i_hv  # [C]
        o_out = o_h[None, :] * K + o_k[:, None]  # [BK, C]
        m_out = m_c[None, :] & m_k[:, None]
        b_A *= scale
        if NEAR:
            b_A = tl.where(o_i >= o_j, b_A, 0.0)
        else:
            b_met = tl.sum(tl.where(o_i == o_j, b_A, 0.0), 0)  # [C]
            b_A = tl.where(o_i > o_j, b_A, 0.0)
        b_B = tl.where(o_i > o_j, b_B, 0.0)
        if TYPE == tl.float16:  # all gradients are made so many times too small, and brought back where they are stored
            fit, back = fitting(tl.maximum(tl.abs(b_A), tl.abs(b_B)))
            b_A *= fit
            b_B *= fit
            b_dq *= fit
            b_dk *= fit
            b_dr *= fit
            b_through *= fit
            if not NEAR:
                b_met *= fit
        b_A, b_B = b_A.to(TYPE), b_B.to(TYPE)
        b_hi, b_lo = gate_parts(tl.trans(load_rows(g + i_hv * K, row, HV * K, o_c, o_k, L, K, BK)), TYPE)  # [BK, C]
        b_k = tl.trans(load_rows(k + i_h * K, row, sk, o_c, o_k, L, K, BK))  # [BK, C]
        b_all = tl.load(decay + (i_slot.to(tl.int64) * HV + i_hv) * K + o_k, mask=m_k, other=0.0)  # [BK] G_C
        b_unit, b_rest = shared_strength(load_strength(beta, row, HV, i_hv, o_c, L, USE_BETA).to(tl.float32), TYPE)  # [C]
        if NEAR:
            b_E = sums(b_hi, b_lo, load_sets(sets, 2 * LEVELS, o_c, C), EXACT, IPG)  # [BK, C] G - a
            b_after = tl.sum(tl.where(o_j == C - 1, b_E, 0.0), 1)  # [BK] G_C - a
            b_before = tl.exp2(b_all - b_after)
            # x dx of readers less y dy of writers: what is left of it from t on decays across t. With the rounded operands of the products,
            # so that what meets on both sides of t cancels
            b_ky = (b_k * tl.exp2(-b_E)).to(TYPE)
            b_dk *= tl.exp2(b_after)[:, None]
            b_through = b_through * tl.exp2(b_all) + tl.sum(b_ky * b_dk, 1)  # with k dk of the state at the chunk's end
            b_q = tl.trans(load_rows(q + i_h * K, row, sk, o_c, o_k, L, K, BK))  # [BK, C]
            b_qx = (b_q * tl.exp2(b_E)).to(TYPE)
            b_dq = tl.dot(b_ky, tl.trans(b_A), b_dq * (b_before * scale)[:, None], input_precision=IP)
            b_z = b_qx * b_dq
            b_x = b_dq * (tl.exp2(b_E) * back) if TYPE == tl.float16 else b_dq * tl.exp2(b_E)
            tl.store(dq + o_out, b_x.to(dq.dtype.element_ty), mask=m_out)
            b_dk = tl.dot(b_qx, b_A, b_dk, input_precision=IP)
            b_e = b_k
            if DELTA:
                if ERASE:
                    b_e = tl.trans(load_rows(e + i_h * K, row, sk, o_c, o_k, L, K, BK))  # [BK, C]
                b_rx = (b_e * (tl.exp2(b_E) * -b_rest[None, :])).to(TYPE)
                b_dr = tl.dot(b_ky, tl.trans(b_B), b_dr * b_before[:, None], input_precision=IP)
                b_z += b_rx * b_dr
                b_dr *= tl.exp2(b_E)
                b_dk = tl.dot(b_rx, b_B, b_dk, input_precision=IP)
            b_z -= b_ky * b_dk
            b_dk *= tl.exp2(-b_E)
            b_R = load_sets(sets, 2 * LEVELS + 1, o_c, C)
            b_dg = tl.zeros([BK, C], tl.float32) + b_through[:, None]
        else:
            b_q = tl.trans(load_rows(q + i_h * K, row, sk, o_c, o_k, L, K, BK))  # [BK, C]
            b_e = b_k
            if ERASE:
                b_e = tl.trans(load_rows(e + i_h * K, row, sk, o_c, o_k, L, K, BK))  # [BK, C]
            middle = widest_level(b_hi, b_lo, sets, o_c, C, LIMIT, EXACT, IPG)
            b_r = (b_e * -b_rest[None, :]).to(TYPE)
            b_R = load_sets(sets, 2 * LEVELS + 1, o_c, C)
            b_D = tl.exp2(sums(b_hi, b_lo, b_R, EXACT, IPG))  # [BK, C] e^G
            b_dq *= b_D * scale
            b_z = b_q * b_dq
            if DELTA:
                b_dr *= b_D
                b_z += b_r * b_dr
            b_dg = add_sums(b_R, b_z, None, TYPE, True, False, IP) + (b_through * tl.exp2(b_all))[:, None]
            b_R = load_sets(sets, 2 * LEVELS + 2, o_c, C)
            b_dk *= tl.exp2(sums(b_hi, b_lo, b_R, EXACT, IPG))
            b_dg = add_sums(b_R, b_k * b_dk, b_dg, TYPE, True, False, IP)
            for level in range(middle, LEVELS):
                b_R = load_sets(sets, level, o_c, C)
                b_D = tl.exp2(sums(b_hi, b_lo, b_R, EXACT, IPG))
                o_row, o_col = meets(o_c, level)
                m = o_row[:, None] == o_col[None, :]
                b_dq, b_dr, b_dk, b_z = met_grads(b_A, b_B, m, b_q, b_r, b_k, b_D, b_D, 1, b_dq, b_dr, b_dk, DELTA, IP)
                b_dg = add_sums(b_R, b_z, b_dg, TYPE, True, False, IP)
            b_R = load_sets(sets, LEVELS + middle, o_c, C)
            b_E = sums(b_hi, b_lo, b_R, EXACT, IPG)
            _, o_col = meets(o_c, middle)
            m = o_col[:, None] == o_col[None, :]
            b_D, b_I = tl.exp2(b_E), tl.exp2(-b_E)
            b_dq, b_dr, b_dk, b_z = met_grads(b_A, b_B, m, b_q, b_r, b_k, b_D, b_I, -1, b_dq, b_dr, b_dk, DELTA, IP)
            b_dq += b_met[None, :] * b_k
            b_dk += b_met[None, :] * b_q
            tl.store(dq + o_out, (b_dq * back if TYPE == tl.float16 else b_dq).to(dq.dtype.element_ty), mask=m_out)
        if TYPE == tl.float16:
            b_dk *= back
            b_dr *= back
            b_z *= back
            b_dg *= back
        if DELTA:
            b_dbeta = -tl.sum(b_e * b_dr, 0)  # [C]
            b_dr *= -b_rest[None, :]
            if ERASE:
                tl.store(de + o_out, b_dr.to(de.dtype.element_ty), mask=m_out)
            else:
                b_dk += b_dr
        tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=m_out)
        b_dg = add_sums(b_R, b_z, b_dg, TYPE, True, True, IPG)  # terms of both signs
        tl.store(dg + o_out, b_dg.to(dg.dtype.element_ty), mask=m_out)
        if DELTA and USE_BETA:
            for i_v in range(i_k, NV, NK):
                o_v = i_v * BV + tl.arange(0, BV)
                b_u = load_rows(D_rows + i_hv * V, row, HV * V, o_c, o_v, L, V, BV).to(tl.float32)  # [C, BV]
                b_dbeta += tl.sum(b_u * load_rows(v + i_hv * V, row, sv, o_c, o_v, L, V, BV).to(tl.float32), 1)
            tl.store(dbeta + (o_h * NK + i_k), b_dbeta / b_unit, mask=m_c)


@triton.jit(do_not_specialize=["T", "HV", "each", "blocks"])
def grad_key_blocks_kernel(
    q, e, k, g, beta, v, do, y, D, D_rows, chunks,  # q, e, k, v, do, y (v or X): token rows; g [B*T, HV, K]; beta [B*T, HV]; D [B*T, HV, V]
    sets, near, decay,  # sets as in score.py; near [slots, HV] uint8; decay [slots, HV, K]
    S, dS,  # [slots, HV, V, K]
    dq, de, dk, dg, dbeta,  # dq, de, dk, dg [B*T, HV, K]; dbeta [B*T, HV, NK] fp32, to be summed
    sk, sv, sy, T, HV, scale,  # rows of q, e, k; of v, do; of y are so far apart
    rest,  # what dS lacks, where the rule adds
    each, blocks,  # (chunk, value head, block of keys)s of a program; of all
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    DELTA: tl.constexpr, ERASE: tl.constexpr, USE_BETA: tl.constexpr, PACKED: tl.constexpr,
    NEAR: tl.constexpr, LIMIT: tl.constexpr,  # exponents up to so much may be positive
    IP: tl.constexpr, IPG: tl.constexpr,  # of products; of sums of gates
    TMA: tl.constexpr,  # do, y, D are descriptors of [B, heads, T, columns], S, dS of their shape, not pointers
):  # fmt: skip
    """One program a (chunk, value head, block of keys), or not NEAR `each` of them."""
    NK: tl.constexpr = (K + BK - 1) // BK
    if NEAR:
        mine = tl.load(near + tl.program_id(0) // NK) == C
        each = 1
        turns = mine.to(tl.int32)
    else:
        b_chosen = chosen(near, C, each, blocks, NK)
        turns = tl.where(tl.max(b_chosen, 0) > 0, each, 0)
    for i in range(turns):
        if not NEAR:
            mine = is_chosen(b_chosen, i)
        if mine:
            i_block = tl.program_id(0) * each + i
            i_slot = i_block // (HV * NK)
            i_hv = (i_block - i_slot * (HV * NK)) // NK
            block_grads(
                q, e, k, g, beta, v, do, y, D, D_rows, chunks, sets, decay, S, dS, dq, de, dk, dg, dbeta,
                sk, sv, sy, T, HV, scale, rest, i_slot, i_hv, i_block % NK,
                K, V, C, BK, BV, GROUP, DELTA, ERASE, USE_BETA, PACKED, NEAR, LIMIT, IP, IPG, TMA,
            )  # fmt: skip
