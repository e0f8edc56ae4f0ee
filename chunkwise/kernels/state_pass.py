"""The scan over a sequence's chunks, forwards on states (with the output fused in) and backwards on their gradients.

    forward   R = beta (v - e^G e S);  X = T R;  o = scale (e^G q S + M_qk X);           S <- e^(G_C) S + (k e^(G_C - G))' X
    reverse   dX = scale M_qk' do + (k e^(G_C - G)) dS;  U = T' dX;      dS <- e^(G_C) dS - (beta e e^G)' U + scale (q e^G)' do

The additive rule has v in X's place, dv in dX's, and no T. Everything here is transposed: the state is held as S' [BV, BK] in registers,
where it is the left operand of its products, so neither S nor X passes through shared memory on its way from chunk to chunk.
With per-key gates q, e, k come decayed (qd with the scale, kd, kr) and M from memory, made by the score kernel.
LOW_RANK: a chunk's map of the state is made by the affine kernel; q, e, k, w, Tinv are its q^, w~, k^, b, A:

    forward   X = w~ S + A v;           o = q^ S + M v + M_qw X;   S <- e^(G_C) S + b' X + k^' v
    reverse   dX = b dS + M_qw' do;     dS <- e^(G_C) dS + w~' dX + q^' do

Where the rule adds, dv is the reverse scan's output, and so are dq and dk of scans of the state transposed (TURNED), in which keys and
values have changed places: dq forwards with (do, v, k) as (q, k, v), dk in reverse with (do, v, q) as (q, k, do).

A sequence may be scanned in pieces of whole chunks, side by side: see kernels/split.py. With ENDS it is found what pieces make of a state.
PARTED (rules that add): the state is kept as what a piece began with, less what was forgotten since, and what the piece has added, so that
a program that scans piece after piece gives the bits of programs that scan them side by side.
"""

import triton
import triton.language as tl

from . import token
from .inverse import parts as two_parts
from .pair import pairs, scores
from .split import begins, four_bits, joined, last_asked, units
from .tile import NEAR, decay_sums, early_sums, load_chunk, load_gate, load_strength, mask2, shared_strength, start, store_chunk, whole
from .token import token_place, token_scores


@triton.jit
def store_state(
    S, b_s, i_slot, i_hv, HV, col, o_k, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """Values col.. of one S' of [slots, HV, V, K], from b_s [BV, BK]."""
    if TMA:
        S.store([i_slot.to(tl.int32), i_hv, col, 0], tl.reshape(b_s, [1, 1, BV, BK]))
    else:
        o_v = col + tl.arange(0, BV)
        tl.store(S + (i_slot * HV + i_hv) * V * K + o_v[:, None] * K + o_k[None, :], b_s, mask=mask2(o_v < V, o_k, K, BK))


@triton.jit(do_not_specialize=["T", "HV", "pieces", "lengths", "parts", "order", "firsts", "most", "long"])
def state_pass_kernel(
    q, e, k, w, v, g, beta, tokens, Tinv, M, Mqw, decay, S0, cu_seqlens, first, cuts,  # v: in reverse do. S0: [N, HV, K, V] or unused
    o, X, S, ST,  # o (in reverse dv), X (in reverse U): [B*T, HV, V]; S (dS in reverse): [slots, HV, V, K]; ST: [N, HV, K, V]
    states, maps, kept,  # of pieces, in the scan's order: fp32 [most, pieces - 1, HV, V, K], maps as in split.py, [most, pieces - 2, HV, K]
    sk, sv,  # rows of q, e, k and of v are so far apart
    T, HV, scale, rest,  # rest: of the scale, what multiplies results where the rule adds: o under gates per key; reversed o and ST
    pieces, lengths, parts,  # of a sequence that is cut; their lengths, 4 bits each, and what they sum to
    order,  # pieces of sequences cut, in the order of the scan, as their programs come; 4 bits each
    firsts, most, long,  # sequences whose first piece is scanned: all or none; that are cut, at most; packed: tokens from which one is
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, LOW_RANK: tl.constexpr, ERASE: tl.constexpr, BEFORE: tl.constexpr,
    USE_BETA: tl.constexpr, PACKED: tl.constexpr,
    SCALED: tl.constexpr,  # in reverse, delta: X is beta U, but for rows of a beta too small
    INITIAL: tl.constexpr, FINAL: tl.constexpr, OUTPUT: tl.constexpr, REVERSE: tl.constexpr,
    CARRIED: tl.constexpr, ENDS: tl.constexpr,  # the states between pieces are known; last pieces are left out
    PARTED: tl.constexpr,  # added, no ENDS: 1, a piece a program; 2, all pieces of a sequence; 0: the state is not kept in two parts
    STORE: tl.constexpr,  # the state of every so many chunks, and X; 0: nothing
    TOKENS: tl.constexpr,  # g and beta are read as they were made ready, see token.py
    NORM: tl.constexpr,  # with TOKENS, forwards: q and k are raw
    TURNED: tl.constexpr,  # v has the key heads, q and k the value heads; S0 and the states between pieces are turned too
    ACROSS: tl.constexpr,  # turned: decays multiply what they do in scans that are not, whose states between pieces these have
    SPLIT: tl.constexpr, IP: tl.constexpr,
    TMA: tl.constexpr,  # q, e, k, w, v, Tinv, M, Mqw, o, X are descriptors of [B, heads, T, columns], S of its shape, not pointers
):  # fmt: skip
    """One program a (piece, sequence, value head, block of BV values), long pieces first; chunks one after the other."""
    KEY: tl.constexpr = GATE == "key"
    DECAY: tl.constexpr = (GATE == "head") or (GATE == "scalar")
    CORRECTS: tl.constexpr = DELTA or LOW_RANK
    FACTORS: tl.constexpr = not SPLIT and (REVERSE or not DELTA)  # GDN forwards, in 4 warps: 0.361 ms, pair by pair 0.345
    WIDE: tl.constexpr = FACTORS and BK > 128
    PAIRED: tl.constexpr = GATE == "head" and not (WIDE and BV >= 64)  # a head's decays stay in registers, where there are enough
    SCORES: tl.constexpr = "scalar" if GATE == "head" and not PAIRED else GATE
    # A head's gate is every token's, and summed as those are: what a token's number alone makes, Triton makes once more in every layout
    SPREAD: tl.constexpr = GATE == "head" and WIDE
    GIVEN: tl.constexpr = "scalar" if SPREAD else GATE
    FORGETS: tl.constexpr = ENDS and DELTA and TOKENS and GATE == "scalar" and not REVERSE  # see LOST in split.py
    MAP: tl.constexpr = ENDS and CORRECTS and not REVERSE  # further blocks: the columns of what the piece makes of a state
    NV: tl.constexpr = (V + BV - 1) // BV
    NB: tl.constexpr = NV + (K + BV - 1) // BV if MAP else NV
    lengths = tl.cast(lengths, tl.int64)
    pid = tl.program_id(0)
    i_jnh = pid // NB
    i_v = pid - i_jnh * NB
    i_n = i_jnh // HV
    i_hv = i_jnh - i_n * HV
    i_h = i_hv // GROUP
    i_y = i_hv  # of v
    if TURNED:
        i_h, i_y = i_hv, i_h
    i_j = 0  # among the sequence's pieces, in the order of the scan
    i_cut = i_n  # among the sequences that are cut
    if i_n >= firsts:
        i_j = (i_n - firsts) // most
        i_cut = i_n - firsts - i_j * most
        i_j = ((order.to(tl.int64) >> (4 * i_j)) & 15).to(tl.int32)
        i_n = i_cut
        if PACKED:
            i_n = tl.load(cuts + i_cut)
    elif PACKED:
        i_cut = tl.load(cuts + most + i_n)
    if PACKED:
        if i_n < 0:
            return
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        Tn = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
        slot = tl.load(first + i_n)
        NC = tl.cdiv(Tn, C)
        if Tn < long:
            parts = 1
            pieces = 1
            lengths = tl.cast(1, tl.int64)
    else:
        NC = tl.cdiv(T, C)
        bos = i_n.to(tl.int64) * T
        Tn = T
        slot = i_n.to(tl.int64) * (tl.cdiv(NC, STORE) if STORE > 1 else NC)
    i_p = pieces - 1 - i_j if REVERSE else i_j
    before = four_bits(lengths & ((tl.cast(1, tl.int64) << (4 * i_p)) - 1))
    c_0 = NC * before // parts  # the piece is chunks c_0 ... c_end - 1
    c_end = NC * (before + ((lengths >> (4 * i_p)) & 15).to(tl.int32)) // parts
    if PARTED == 2:
        c_0 = 0
        c_end = NC
    if MAP:
        c_end = tl.where((i_j == 0) & (i_v >= NV), c_0, c_end)  # nobody asks what the first piece makes of another state
    met = True  # what the piece makes of another state is not forgotten
    if FORGETS:
        c_last, gone = last_asked(tokens, slot, i_hv, HV, c_0, c_end, C, GATE, NORM)
        met = tl.where(i_v < NV, c_last == c_0, not gone)
        c_end = tl.where(gone & (i_v >= NV), c_0, c_end)
        c_0 = tl.where(i_v < NV, c_last, c_0)
    dtype: tl.constexpr = v.dtype if TMA else v.dtype.element_ty
    # sums of many tokens leave fp16's range where what is read of them does not: they are read with the scale, or as much of it as leaves
    # small ones their digits
    LARGE: tl.constexpr = dtype == tl.float16 and OUTPUT and not (CORRECTS or KEY or REVERSE or STORE)
    if LARGE:
        small = tl.minimum(tl.maximum(tl.abs(scale), 0.0078125), 1.0)
        left = scale / small
    # o reads states in two parts: their rounding would be half of its error and more; DPLR's of 256 channels spill (H200: 1.11 ms, 0.88)
    FINE: tl.constexpr = (LOW_RANK or KEY and not DELTA) and dtype != tl.float32 and BK <= 128
    made: tl.constexpr = o.dtype if TMA else o.dtype.element_ty
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    col = i_v * BV  # where values are written
    if ENDS:
        col = tl.where(i_j == 0, col, V)  # only of the first piece, which is scanned for good
    m_vk = mask2(o_v < V, o_k, K, BK)  # [BV, BK]
    o_S = o_k[None, :] * V + o_v[:, None]  # [BV, BK] of [K, V]
    o_P = o_v[:, None] * K + o_k[None, :]  # [BV, BK] of [V, K]
    if TURNED:
        o_S, o_P = o_P, o_S
    i_nh = i_n.to(tl.int64) * HV + i_hv
    i_end = (i_cut.to(tl.int64) * (pieces - 1) + i_j) * HV + i_hv  # of what the piece leaves
    b_S = tl.zeros([BV, BK], tl.float32)  # the first state; branches here make ptxas run the loop's products one by one
    if INITIAL:
        b_S = tl.load(S0 + i_nh * K * V + o_S, mask=m_vk & (i_j == 0) & met, other=0.0).to(tl.float32)
        if REVERSE and not CORRECTS:
            b_S /= rest
    b_first = tl.zeros([BV, BK], tl.float32)  # PARTED: what a piece began with; b_S is what it has added, b_kept what is left of the first
    if CARRIED:
        b_first += tl.load(states + (i_end - HV) * V * K + o_P, mask=m_vk & (i_j > 0), other=0.0)
        if not PARTED:
            b_S += b_first
    if MAP:
        b_S += tl.where((o_v[:, None] == o_k[None, :] + NV * BV) & met, 1.0, 0.0)  # in the further blocks, where v is 0
    if (ENDS and not CORRECTS) or (PARTED and KEY):
        b_kept = tl.full([BK], 1.0, tl.float32)
    elif PARTED:
        b_kept = 1.0
    c = tl.maximum(c_end - 1, c_0) if REVERSE else c_0
    if not TOKENS:
        n_g = load_gate(g, bos + c * C, HV, i_hv, o_c, C if PAIRED else Tn - c * C, GATE, SPREAD)  # the next chunk's, loaded one ahead
        n_beta = load_strength(beta, bos + c * C, HV, i_hv, o_c, Tn - c * C, USE_BETA)
    b_D = 0.0
    if PAIRED:  # what all chunks have in common but for a last one that is shorter
        h_G, h_F = decay_sums(n_g, o_c, C, GIVEN, SPLIT)  # [C]
        h_all, h_end = whole(h_G, h_F, o_c, C, SPLIT)
        h_start = start(h_G, h_F, SPLIT)
        if OUTPUT or (DELTA and REVERSE):
            b_D = pairs(h_G, h_F, o_c, o_c, REVERSE, SPLIT)  # [C, C]
            if WIDE:  # the numbers that wider blocks make in every chunk
                h_r, h_w = tl.exp2(h_G), tl.exp2(-h_G)  # [C]
                if REVERSE:
                    b_D = tl.where((o_c[None, :] <= o_c[:, None]) & (h_G > NEAR)[:, None], h_r[:, None] * h_w[None, :], b_D)
                else:
                    b_D = tl.where((o_c[:, None] <= o_c[None, :]) & (h_G > NEAR)[None, :], h_r[None, :] * h_w[:, None], b_D)
    if PARTED == 2:
        b_begins = begins(lengths, pieces)
        b_units = units(c, NC, parts)
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
        if TOKENS:  # each row is asked for where it is used: it is in shared memory by then, and costs no register
            b_G, b_F = 0.0, 0.0
            p_t = token_place(tokens, slot + c, i_hv, HV, C, GATE, NORM)
            if DECAY:
                b_all = tl.load(p_t + token.START * C + C - 1)
        elif PAIRED:
            b_G, b_F, b_all, b_end, b_start = h_G, h_F, h_all, h_end, h_start
            if L < C:
                b_G, b_F = decay_sums(tl.where(o_c < L, n_g, 0.0) if SPREAD else n_g, o_c, L, GIVEN, SPLIT)
                b_all, b_end = whole(b_G, b_F, o_c, C, SPLIT)
        else:
            b_G, b_F = decay_sums(n_g, o_c, L, GIVEN, SPLIT)  # [C]
            b_all, b_end = whole(b_G, b_F, o_c, C, SPLIT)
            b_start = start(b_G, b_F, SPLIT)
        if not TOKENS:
            b_early = b_start  # of e
            if BEFORE and DECAY:
                b_Ge, b_Fe = early_sums(b_G, b_F, n_g, GATE, SPLIT)
                b_early = start(b_Ge, b_Fe, SPLIT)
            b_beta = n_beta.to(tl.float32)  # [C]
            if GIVEN == "scalar" and not PAIRED:
                n_g = load_gate(g, bos + c_next * C, HV, i_hv, o_c, Tn - c_next * C, GATE, SPREAD)
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
            b_T = load_chunk(Mqw if REVERSE else Tinv, row, HV * C, i_n, i_hv, t, o_c, 0, L, C, C, C, TMA)  # [C, C]
            if OUTPUT:
                b_Mw = load_chunk(Mqw, row, HV * C, i_n, i_hv, t, o_c, 0, L, C, C, C, TMA)  # [C, C]
        if DELTA:
            if ERASE or KEY:
                b_e = load_chunk(e, row, sk, i_n, i_h, t, o_c, 0, L, K, C, BK, TMA)  # [C, BK]
            else:
                b_e = b_k
            b_T = load_chunk(Tinv, row, HV * C, i_n, i_hv, t, o_c, 0, L, C, C, C, TMA)  # [C, C]
        if OUTPUT and not REVERSE:
            if KEY:
                b_M = tl.trans(load_chunk(M, row, HV * C, i_n, i_hv, t, o_c, 0, L, C, C, C, TMA))  # [C, C], transposed
            elif TOKENS and DECAY:
                b_M = token_scores(b_k, b_q, p_t, b_all, o_c, L, scale, C, False, IP).to(dtype)
            else:
                b_M = scores(b_k, b_q, b_D, b_G, b_F, o_c, L, scale, C, False, SCORES, SPLIT, FACTORS, IP).to(dtype)
        elif DELTA and REVERSE or OUTPUT:
            if KEY:
                b_M = load_chunk(M, row, HV * C, i_n, i_hv, t, o_c, 0, L, C, C, C, TMA)  # [C, C]
            elif TOKENS and DECAY:
                b_M = token_scores(b_q, b_k, p_t, b_all, o_c, L, scale, C, True, IP).to(dtype)
            else:
                b_M = scores(b_q, b_k, b_D, b_G, b_F, o_c, L, scale, C, True, SCORES, SPLIT, FACTORS, IP).to(dtype)
        if PARTED:
            b_sum = joined(b_first, b_kept, b_S, KEY)
            if PARTED == 2:
                n_units = units(c, NC, parts)
                new = ((n_units ^ b_units) & b_begins) != 0
                b_units = n_units
                b_first = tl.where(new, b_sum, b_first)
                b_S = tl.where(new, 0.0, b_S)
                b_kept = tl.where(new, 1.0, b_kept)
            b_s = (b_sum * small if LARGE else b_sum).to(dtype)
        else:
            b_s = (b_S * small if LARGE else b_S).to(dtype)
        if STORE:
            if STORE == 1:
                store_state(S, b_s, slot + c, i_hv, HV, col, o_k, K, V, BK, BV, TMA)
            elif (c % STORE == STORE - 1) | (c == NC - 1) if REVERSE else c % STORE == 0:
                store_state(S, b_s, slot + c // STORE, i_hv, HV, col, o_k, K, V, BK, BV, TMA)
        if KEY:
            b_all = tl.exp2(tl.load(decay + ((slot + c) * HV + i_hv) * K + o_k, mask=o_k < K, other=0.0))  # [BK]

        if LOW_RANK:
            b_x = tl.dot(b_s, tl.trans(b_b if REVERSE else b_e), input_precision=IP)  # [BV, C]
            b_x = tl.dot(b_v, b_T if REVERSE else tl.trans(b_T), b_x, input_precision=IP).to(dtype)
            if STORE:
                store_chunk(X, b_x, row, HV, i_n, i_hv, t, o_c, col, L, V, C, BV, TMA)
        if REVERSE:
            if DELTA or OUTPUT:
                b_x = tl.dot(b_s, tl.trans(b_k), input_precision=IP)  # [BV, C]
                if TOKENS and DECAY:
                    b_end = tl.load(p_t + token.END * C + o_c)
                if DECAY:
                    b_x *= b_end[None, :]
                b_x = tl.dot(b_v, b_M, b_x, input_precision=IP)
                if not DELTA:
                    b_x *= rest
                    store_chunk(o, b_x.to(made), row, HV, i_n, i_hv, t, o_c, col, L, V, C, BV, TMA)
            if DELTA:
                b_u = tl.dot(b_x.to(dtype), b_T, input_precision=IP)  # [BV, C]
                if TOKENS:
                    b_beta = tl.load(p_t + token.BETA * C + o_c)
                    if DECAY:
                        b_start = tl.load(p_t + token.START * C + o_c)
                        b_early = b_start
                b_f = b_beta
                if SCALED and USE_BETA:
                    b_unit, b_f = shared_strength(b_beta, dtype)
                    b_u *= b_unit[None, :]
                if STORE:
                    store_chunk(X, b_u.to(dtype), row, HV, i_n, i_hv, t, o_c, col, L, V, C, BV, TMA)
                if DECAY:
                    b_f *= b_early
                b_u = b_u * -b_f[None, :]
            if KEY:
                b_w = b_v
            elif ACROSS:
                b_w = b_v
                b_q = (b_q.to(tl.float32) * (b_start * scale)[:, None]).to(dtype)
            elif DECAY:
                b_w = b_v.to(tl.float32) * (b_start * scale)[None, :]
            else:
                b_w = b_v.to(tl.float32) * scale
        else:
            if DELTA:
                b_x = tl.dot(b_s, tl.trans(b_e), input_precision=IP)  # [BV, C]
            if TOKENS:
                b_beta = tl.load(p_t + token.BETA * C + o_c)
                if DECAY:
                    b_start = tl.load(p_t + token.START * C + o_c)
                    b_early = b_start
            if OUTPUT:
                b_o = tl.dot(b_s, tl.trans(b_q), input_precision=IP)  # [BV, C]
                if FINE:
                    b_o = tl.dot(((b_sum if PARTED else b_S) - b_s.to(tl.float32)).to(dtype), tl.trans(b_q), b_o, input_precision=IP)
                if LOW_RANK:
                    b_o = tl.dot(b_x, tl.trans(b_Mw), b_o, input_precision=IP)
                if DECAY:
                    b_o *= (b_start * (left if LARGE else scale))[None, :]
                elif not KEY:
                    b_o *= left if LARGE else scale
            if DELTA:
                if DECAY:
                    b_x *= b_early[None, :]
                b_x = b_v.to(tl.float32) * b_beta[None, :] - b_x if NORM else (b_v.to(tl.float32) - b_x) * b_beta[None, :]
                b_w = tl.dot(b_x.to(dtype), tl.trans(b_T), input_precision=IP)  # [BV, C]
                if STORE:
                    store_chunk(X, b_w.to(dtype), row, HV, i_n, i_hv, t, o_c, col, L, V, C, BV, TMA)
            else:
                b_w = b_v
            if OUTPUT:
                b_o = tl.dot(b_w.to(dtype), b_M, b_o, input_precision=IP)
                if KEY and not CORRECTS:
                    b_o *= rest
                if NORM:
                    b_o *= tl.load(p_t + token.last_kind(GATE) * C + o_c)[None, :]
                store_chunk(o, b_o.to(made), row, HV, i_n, i_hv, t, o_c, col, L, V, C, BV, TMA)
            if TOKENS and DECAY:
                b_end = tl.load(p_t + token.END * C + o_c)
            if ACROSS:
                b_k = (b_k.to(tl.float32) * b_end[:, None]).to(dtype)
            elif DECAY:
                b_w = b_w.to(tl.float32) * b_end[None, :]

        if (ENDS and not CORRECTS) or PARTED:
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
        if pieces > 1:  # in dense calls always; without a branch ptxas keeps the loop's products from overlapping
            tl.store(states + i_end * V * K + o_P, b_S, mask=m_vk)
            i_mid = i_end - (i_cut + 1).to(tl.int64) * HV  # among the pieces but the first and the last
            if MAP:
                m_A = mask2((i_j > 0) & (o_v >= NV * BV) & (o_v < NV * BV + K), o_k, K, BK)
                if maps.dtype.element_ty == tl.float32:
                    tl.store(maps + (i_mid * K - NV * BV) * K + o_P, b_S, mask=m_A)
                else:
                    b_hi, b_lo = two_parts(b_S, tl.bfloat16)
                    p_A = maps + (2 * i_mid * K - NV * BV) * K + o_P
                    tl.store(p_A, b_hi, mask=m_A)
                    tl.store(p_A + K * K, b_lo, mask=m_A)
            elif not CORRECTS:
                tl.store(kept + i_mid * K + o_k, b_kept, mask=(o_k < K) & (i_v == 0) & (i_j > 0))
    if PARTED:
        b_S = joined(b_first, b_kept, b_S, KEY)
    if FINAL:
        if REVERSE and not CORRECTS:
            b_S *= rest
        if (i_j == pieces - 1) | (PARTED == 2):
            tl.store(ST + i_nh * K * V + o_S, b_S, mask=m_vk)
