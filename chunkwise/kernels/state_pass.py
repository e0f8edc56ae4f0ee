"""The scan over a sequence's chunks, forwards on states (with the output fused in) and backwards on their gradients.

    forward   R = beta (v - e^G e S);  X = T R;  o = scale (e^G q S + M_qk X);           S <- e^(G_C) S + (k e^(G_C - G))' X
    reverse   dX = scale M_qk' do + (k e^(G_C - G)) dS;  U = T' dX;      dS <- e^(G_C) dS - (beta e e^G)' U + scale (q e^G)' do

The additive rule has v in X's place, dv in dX's, and no T. Everything here is transposed: the state is held as S' [BV, BK] in registers,
where it is the left operand of its products, so neither S nor X passes through shared memory on its way from chunk to chunk.
With per-key gates q, e, k come decayed (qd with the scale, kd, kr) and M from memory, made by the score kernel.
LOW_RANK: a chunk is one affine map of the state, made by the affine kernel; q, e, k, w are its q~, w~, k~, b, and the scan is

    forward   X = w~ S;   o = q~ S + M v;   S <- e^(G_C) S + b' X + k~' v
    reverse   X = b dS;   dS <- e^(G_C) dS + w~' X + q~' do

Where the rule adds, dv is the reverse scan's output, and so are dq and dk of scans of the state transposed (TURNED), in which keys and
values have changed places: dq forwards with (do, v, k) as (q, k, v), dk in reverse with (do, v, q) as (q, k, do).

A sequence may be scanned in `pieces` of whole chunks, as if each were a sequence: see kernels/split.py. With ENDS nothing is made but what
that needs of a piece: its last state from an empty first one, and what it makes of another first one.
"""

import triton
import triton.language as tl

from .tile import decay_sums, early_sums, load_chunk, load_gate, mask2, pair_decay, start, store_chunk, whole


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
    b_y, b_x, b_D, b_G, b_F, o_c, L, scale, LOWER: tl.constexpr, GATE: tl.constexpr, SPLIT: tl.constexpr, IP: tl.constexpr
):  # fmt: skip
    """scale y_i.x_j e^(G_i - G_j) for j <= i, else 0 [C, C]: LOWER from y = q, x = k; else transposed, [j, i] from y = k, x = q.

    b_D: a head's `pairs`, the same for all chunks.
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
    else:
        b_M *= pairs(b_G, b_F, o_c, o_i, LOWER, SPLIT)
    return b_M


@triton.jit
def load_strength(beta, row, HV, i_hv, o_c, L, USE_BETA: tl.constexpr):
    """beta [C] as stored, zeros past the end; 1 where there is none."""
    if USE_BETA:
        b_beta = tl.load(beta + (row + o_c) * HV + i_hv, mask=o_c < L, other=0.0)
    else:
        b_beta = tl.where(o_c < L, 1.0, 0.0)
    return b_beta


@triton.jit
def shared_strength(b_beta, TYPE: tl.constexpr):
    """beta [C] as a product: what stands beside U where beta U is stored, 1 if beta is too small to divide by; and the rest."""
    LEAST: tl.constexpr = 2.0**-10 if TYPE == tl.float16 else 2.0**-40
    m = tl.abs(b_beta) < LEAST
    return tl.where(m, 1.0, b_beta), tl.where(m, b_beta, 1.0)


@triton.jit
def store_state(
    S, b_s, i_slot, i_hv, HV, i_v, o_k, m_vk, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """Values i_v * BV.. of one S' of [slots, HV, V, K], from b_s [BV, BK]."""
    if TMA:
        S.store([i_slot.to(tl.int32), i_hv, i_v * BV, 0], tl.reshape(b_s, [1, 1, BV, BK]))
    else:
        o_v = i_v * BV + tl.arange(0, BV)
        tl.store(S + (i_slot * HV + i_hv) * V * K + o_v[:, None] * K + o_k[None, :], b_s, mask=m_vk)


@triton.jit(do_not_specialize=["T", "HV", "pieces", "run"])
def state_pass_kernel(
    q, e, k, w, v, g, beta, Tinv, M, decay, S0, cu_seqlens, first,  # v: in reverse do. S0: [N, HV, K, V] or unused
    o, X, S, ST,  # o (in reverse dv), X (in reverse U): [B*T, HV, V]; S (dS in reverse): [slots, HV, V, K]; ST: [N, HV, K, V]
    kept,  # with ENDS: [N * run, HV, K], ST [N * run, HV, blocks * BV, K] fp32; S0 else [N * run, HV, K, V]
    sk, sv,  # rows of q, e, k and of v are so far apart
    T, HV, scale,
    pieces, run,  # of each sequence; so many of them are run: the first, in reverse the last
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, LOW_RANK: tl.constexpr, ERASE: tl.constexpr, BEFORE: tl.constexpr,
    USE_BETA: tl.constexpr, PACKED: tl.constexpr,
    SCALED: tl.constexpr,  # in reverse, delta: X is beta U, but for rows of a beta too small
    INITIAL: tl.constexpr, FINAL: tl.constexpr, OUTPUT: tl.constexpr, ENDS: tl.constexpr, REVERSE: tl.constexpr,
    STORE: tl.constexpr,  # the state of every so many chunks, and X; 0: nothing
    TURNED: tl.constexpr,  # v has the key heads, q and k the value heads; S0 is [N, HV, V, K]
    SPLIT: tl.constexpr, IP: tl.constexpr,
    TMA: tl.constexpr,  # q, e, k, w, v, Tinv, M, o, X are descriptors of [B, heads, T, columns], S of its shape, not pointers
):  # fmt: skip
    """One program a (sequence, piece, value head, block of BV values); chunks one after the other."""
    KEY: tl.constexpr = GATE == "key"
    DECAY: tl.constexpr = (GATE == "head") or (GATE == "scalar")
    CORRECTS: tl.constexpr = DELTA or LOW_RANK
    MAP: tl.constexpr = ENDS and CORRECTS and not REVERSE  # further blocks: the columns of what the piece makes of a state
    NV: tl.constexpr = (V + BV - 1) // BV
    NB: tl.constexpr = NV + (K + BV - 1) // BV if MAP else NV
    pid = tl.program_id(0)
    i_nh = pid // NB
    i_v = pid - i_nh * NB
    i_np = i_nh // HV
    i_hv = i_nh - i_np * HV
    i_n = i_np // run
    i_p = i_np - i_n * run + (pieces - run) * REVERSE
    i_h = i_hv // GROUP
    i_y = i_hv  # of v
    if TURNED:
        i_h, i_y = i_hv, i_h
    if PACKED:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        Tn = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
        slot = tl.load(first + i_n)
        c_end = tl.cdiv(Tn, C)
    else:
        c_end = tl.cdiv(T, C)
        bos = i_n.to(tl.int64) * T
        Tn = T
        slot = i_n.to(tl.int64) * (tl.cdiv(c_end, STORE) if STORE > 1 else c_end)
    c_last = c_end - 1
    c_0 = c_end * i_p // pieces  # the piece is chunks c_0 ... c_end - 1
    c_end = c_end * (i_p + 1) // pieces
    if MAP and not INITIAL:
        c_end = tl.where((i_p == 0) & (i_v >= NV), 0, c_end)  # nobody asks what the first piece makes of a state
    dtype: tl.constexpr = v.dtype if TMA else v.dtype.element_ty
    made: tl.constexpr = o.dtype if TMA else o.dtype.element_ty
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    m_vk = mask2(m_v, o_k, K, BK)  # [BV, BK]
    o_S = o_k[None, :] * V + o_v[:, None]  # [BV, BK] of [K, V]
    if MAP:
        b_S = tl.where(o_v[:, None] == o_k[None, :] + NV * BV, 1.0, 0.0)  # [BV, BK]; 1 in the further blocks only, where v is 0
    elif INITIAL and not ENDS:
        o_0 = o_v[:, None] * K + o_k[None, :] if TURNED else o_S
        b_S = tl.load(S0 + i_nh.to(tl.int64) * K * V + o_0, mask=m_vk, other=0.0).to(tl.float32)  # [BV, BK]
    else:
        b_S = tl.zeros([BV, BK], tl.float32)
    if ENDS and not CORRECTS:
        b_kept = tl.full([BK], 1.0, tl.float32)
    c = tl.maximum(c_end - 1, c_0) if REVERSE else c_0
    n_g = load_gate(g, bos + c * C, HV, i_hv, o_c, Tn - c * C, GATE)  # the next chunk's, loaded one chunk ahead
    n_beta = load_strength(beta, bos + c * C, HV, i_hv, o_c, Tn - c * C, USE_BETA)
    b_D = 0.0
    if GATE == "head":  # what all chunks have in common but for a last one that is shorter
        h_G, h_F = decay_sums(n_g, o_c, C, GATE, SPLIT)  # [C]
        h_all, h_end = whole(h_G, h_F, o_c, C, SPLIT)
        h_start = start(h_G, h_F, SPLIT)
        if OUTPUT or (DELTA and REVERSE):
            b_D = pairs(h_G, h_F, o_c, o_c, REVERSE, SPLIT)  # [C, C]
    for i in range(c_end - c_0):
        if REVERSE:
            c = c_end - 1 - i
            c_next = tl.maximum(c - 1, c_0)
        else:
            c = c_0 + i
            c_next = tl.minimum(c + 1, c_end - 1)
        row = bos + c * C
        L = tl.minimum(C, Tn - c * C)
        t = c * C
        if GATE == "head":
            b_G, b_F, b_all, b_end, b_start = h_G, h_F, h_all, h_end, h_start
            if L < C:
                b_G, b_F = decay_sums(n_g, o_c, L, GATE, SPLIT)
                b_all, b_end = whole(b_G, b_F, o_c, C, SPLIT)
        else:
            b_G, b_F = decay_sums(n_g, o_c, L, GATE, SPLIT)  # [C]
            b_all, b_end = whole(b_G, b_F, o_c, C, SPLIT)
            b_start = start(b_G, b_F, SPLIT)
        b_early = b_start  # of e
        if BEFORE and DECAY:
            b_Ge, b_Fe = early_sums(b_G, b_F, n_g, GATE, SPLIT)
            b_early = start(b_Ge, b_Fe, SPLIT)
        b_beta = n_beta.to(tl.float32)  # [C]
        if GATE == "scalar":
            n_g = load_gate(g, bos + c_next * C, HV, i_hv, o_c, Tn - c_next * C, GATE)
        n_beta = load_strength(beta, bos + c_next * C, HV, i_hv, o_c, Tn - c_next * C, USE_BETA)

        L_v = tl.where(i_v < NV, L, 0) if MAP else L
        b_v = tl.trans(load_chunk(v, row, sv, i_n, i_y, t, o_c, i_v * BV, L_v, V, C, BV, TMA))  # [BV, C]
        if OUTPUT or REVERSE:
            b_q = load_chunk(q, row, sk, i_n, i_h, t, o_c, 0, L, K, C, BK, TMA)  # [C, BK]
        if DELTA or OUTPUT or not REVERSE:
            b_k = load_chunk(k, row, sk, i_n, i_h, t, o_c, 0, L, K, C, BK, TMA)  # [C, BK]
        if LOW_RANK:
            b_e = load_chunk(e, row, sk, i_n, i_h, t, o_c, 0, L, K, C, BK, TMA)  # [C, BK]
            b_b = load_chunk(w, row, sk, i_n, i_h, t, o_c, 0, L, K, C, BK, TMA)  # [C, BK]
        if DELTA:
            if ERASE or KEY:
                b_e = load_chunk(e, row, sk, i_n, i_h, t, o_c, 0, L, K, C, BK, TMA)  # [C, BK]
            else:
                b_e = b_k
            b_T = load_chunk(Tinv, row, HV * C, i_n, i_hv, t, o_c, 0, L, C, C, C, TMA)  # [C, C]
        if OUTPUT and not REVERSE:
            if KEY:
                b_M = tl.trans(load_chunk(M, row, HV * C, i_n, i_hv, t, o_c, 0, L, C, C, C, TMA))  # [C, C], transposed
            else:
                b_M = scores(b_k, b_q, b_D, b_G, b_F, o_c, L, scale, False, GATE, SPLIT, IP).to(dtype)
        elif DELTA and REVERSE or OUTPUT:
            if KEY:
                b_M = load_chunk(M, row, HV * C, i_n, i_hv, t, o_c, 0, L, C, C, C, TMA)  # [C, C]
            else:
                b_M = scores(b_q, b_k, b_D, b_G, b_F, o_c, L, scale, True, GATE, SPLIT, IP).to(dtype)
        b_s = b_S.to(dtype)
        if STORE:
            if STORE == 1:
                store_state(S, b_s, slot + c, i_hv, HV, i_v, o_k, m_vk, K, V, BK, BV, TMA)
            elif (c % STORE == STORE - 1) | (c == c_last) if REVERSE else c % STORE == 0:
                store_state(S, b_s, slot + c // STORE, i_hv, HV, i_v, o_k, m_vk, K, V, BK, BV, TMA)
        if KEY:
            b_all = tl.exp2(tl.load(decay + ((slot + c) * HV + i_hv) * K + o_k, mask=o_k < K, other=0.0))  # [BK]

        if LOW_RANK:
            b_x = tl.dot(b_s, tl.trans(b_b if REVERSE else b_e), input_precision=IP).to(dtype)  # [BV, C]
            if STORE:
                store_chunk(X, b_x, row, HV, i_n, i_hv, t, o_c, i_v * BV, L, V, C, BV, TMA)
        if REVERSE:
            if DELTA or OUTPUT:
                b_x = tl.dot(b_s, tl.trans(b_k), input_precision=IP)  # [BV, C]
                if DECAY:
                    b_x *= b_end[None, :]
                b_x = tl.dot(b_v, b_M, b_x, input_precision=IP)
                if not DELTA:
                    store_chunk(o, b_x.to(made), row, HV, i_n, i_hv, t, o_c, i_v * BV, L, V, C, BV, TMA)
            if DELTA:
                b_u = tl.dot(b_x.to(dtype), b_T, input_precision=IP)  # [BV, C]
                b_f = b_beta
                if SCALED and USE_BETA:
                    b_unit, b_f = shared_strength(b_beta, dtype)
                    b_u *= b_unit[None, :]
                if STORE:
                    store_chunk(X, b_u.to(dtype), row, HV, i_n, i_hv, t, o_c, i_v * BV, L, V, C, BV, TMA)
                if DECAY:
                    b_f *= b_early
                b_u = b_u * -b_f[None, :]
            if KEY:
                b_w = b_v
            elif DECAY:
                b_w = b_v.to(tl.float32) * (b_start * scale)[None, :]
            else:
                b_w = b_v.to(tl.float32) * scale
        else:
            if DELTA:
                b_x = tl.dot(b_s, tl.trans(b_e), input_precision=IP)  # [BV, C]
            if OUTPUT:
                b_o = tl.dot(b_s, tl.trans(b_q), input_precision=IP)  # [BV, C]
                if DECAY:
                    b_o *= (b_start * scale)[None, :]
                elif not KEY:
                    b_o *= scale
            if DELTA:
                if DECAY:
                    b_x *= b_early[None, :]
                b_x = (b_v.to(tl.float32) - b_x) * b_beta[None, :]
                b_w = tl.dot(b_x.to(dtype), tl.trans(b_T), input_precision=IP)  # [BV, C]
                if STORE:
                    store_chunk(X, b_w.to(dtype), row, HV, i_n, i_hv, t, o_c, i_v * BV, L, V, C, BV, TMA)
            else:
                b_w = b_v
            if OUTPUT:
                b_o = tl.dot(b_w.to(dtype), b_M, b_o, input_precision=IP)
                store_chunk(o, b_o.to(made), row, HV, i_n, i_hv, t, o_c, i_v * BV, L, V, C, BV, TMA)
            if DECAY:
                b_w = b_w.to(tl.float32) * b_end[None, :]

        if ENDS and not CORRECTS:
            if KEY or DECAY:
                b_kept *= b_all
        if KEY:
            b_S *= b_all[None, :]
        elif DECAY:
            b_S *= b_all
        if LOW_RANK:
            b_S = tl.dot(b_x, b_e if REVERSE else b_b, b_S, input_precision=IP)
        if REVERSE:
            if DELTA:
                b_S = tl.dot(b_u.to(dtype), b_e, b_S, input_precision=IP)
            b_S = tl.dot(b_w.to(dtype), b_q, b_S, input_precision=IP)
        else:
            b_S = tl.dot(b_w.to(dtype), b_k, b_S, input_precision=IP)
    if ENDS:
        tl.store(ST + (i_nh.to(tl.int64) * NB * BV + o_v[:, None]) * K + o_k[None, :], b_S, mask=o_k[None, :] < K)
        if not CORRECTS:
            tl.store(kept + i_nh.to(tl.int64) * K + o_k, b_kept, mask=(o_k < K) & (i_v == 0))
    elif FINAL:
        if i_p == (0 if REVERSE else pieces - 1):
            tl.store(ST + (i_n.to(tl.int64) * HV + i_hv) * K * V + o_S, b_S, mask=m_vk)
