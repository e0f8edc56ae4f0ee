"""Which block sizes, warps and pipeline stages a kernel runs with. No search happens in a call: it was measured, or a rule says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..spec import Gate, Rule
from .config import Config, card
from .measured import key, measured
from .problem import Problem

MULTIPROCESSORS = 132  # of the card the rules were measured on; more of them only shifts where blocks get narrower


def padded(n: int) -> int:
    """A kernel's block for n columns: a power of two, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def _value_block(p: Problem, widest: int) -> int:
    """The widest block of values that still gives every multiprocessor something to do."""
    BV = min(widest, padded(p.V))
    while BV > 16 and p.N * p.HV * -(-p.V // BV) < MULTIPROCESSORS:
        BV //= 2
    return BV


def _eight() -> int:
    """Warps of 256 threads: AMD's are twice as wide, and eight of them would have half the registers each."""
    return 8 if card().arch.startswith("sm_") else 4


def _on_hopper(p: Problem, deep: int) -> Config:
    """64 values a block, rows that wgmma wants; 16 where even those have a multiprocessor each, and their chunks take less time. A program
    that has one for itself has memory for one more stage, of at most `deep` values.

    Time of the present blocks over those before (fewer values a block, a stage less), forward, by heads of all samples, bf16, K=V=128:
    32 heads linear 0.59, GDN 0.80, KDA 0.93, RWKV-7 0.96; 8 heads 0.60, 0.89, KDA 0.83; 64 heads in fp16 0.55, 0.70, 0.96; K=V=64, 64
    heads 0.60, 0.86; K=V=256, 32 heads 0.52, 0.71, GLA 0.62, 8 heads GDN 0.65, 128 heads 0.54. Packed linear, 32 heads, 0.65.
    """
    BK, heads, wide = padded(p.K), p.N * p.HV, p.K > 128
    if p.cu_seqlens is not None and (wide or p.rule is not Rule.ADD):  # addresses take the registers that 64 values need; 16: GDN 0.88
        BV = _value_block(p, 32 if wide else 64)
        return Config(BK, BV, 4, 1 if wide else 3 if BV == 16 and p.rule is Rule.DELTA and p.gate is not Gate.KEY else 2)
    if heads * -(-p.V // 16) <= MULTIPROCESSORS:
        return Config(BK, 16, 4, 2 if wide else 3)
    alone = heads * -(-p.V // 64) <= MULTIPROCESSORS
    if wide:
        erase = p.rule is Rule.DELTA and p.erase
        many = erase or p.rule is Rule.DPLR or p.rule is Rule.DELTA and p.gate is Gate.KEY
        if many and p.gate is Gate.KEY and not erase and p.dtype == torch.bfloat16 and p.C == 64 and p.V > 16:
            # B=2, H=16, K=V=256, forward, with backward: KDA 0.608 2.72, with 4 warps and a stage 0.731 3.08; RWKV-7 0.865 4.13, 1.138 4.53
            return Config(BK, 32, 8, 2)
        return Config(BK, min(32 if many else 64, padded(p.V)), 4, 2 if alone and not many else 1)
    return Config(BK, min(deep if alone else 64, padded(p.V)), 4, 3 if alone else 2)


def _few_warps(p: Problem) -> bool:
    """float32, whose chunks of 16 rows more warps would make over and over, each for itself. Of rules that correct it was not measured."""
    return p.dtype == torch.float32 and p.rule is Rule.ADD and card().arch == "sm_90"


def _state_pass(p: Problem, deep: int = 64) -> Config:
    """S' [BV, BK] lives in registers in fp32: 64 x 128 of it fill four warps. fp32 operands take three times as many registers."""
    BK = padded(p.K)
    if _few_warps(p) and BK <= 128:
        return Config(BK, _value_block(p, 16), 4, 3)  # GLA 0.33 ms, with 8 warps and a stage 0.99
    if p.dtype == torch.float32:
        return Config(BK, _value_block(p, 16), 8, 1)
    if BK > 256:
        return Config(BK, 16, 8, 1, tma=False)
    if card().arch == "sm_90":
        return _on_hopper(p, deep)
    if not card().engine:  # operands lie in registers too
        narrow = BK > 128 or (p.rule is Rule.DELTA and card().arch.startswith("gfx"))
        return Config(BK, _value_block(p, 16 if narrow else 32), 4, 1)
    blackwell = card().arch.startswith("sm_10")  # Triton 3.6.0 cannot pipeline a loop there that stores through descriptors
    narrow = BK > 128 or (blackwell and p.rule is Rule.DELTA)
    return Config(BK, _value_block(p, 32 if narrow else 64), 4, 2 if BK <= 128 else 1, tma=not blackwell)


def _fills(p: Problem, cost: int) -> bool:
    """Whether blocks of 128 x 128 of a state fit, with so many bytes of shared memory, and give three of four multiprocessors work.

    A bonus or an erase key needs more memory than was measured, and keeps the narrower blocks.
    """
    if p.bonus or p.erase and p.rule is Rule.DELTA:
        return False
    programs = p.N * p.HV * -(-p.V // 128)
    square = padded(p.K) == 128 and p.V > 64 and p.dtype != torch.float32
    return square and 4 * programs >= 3 * MULTIPROCESSORS and card().arch == "sm_90" and card().shared >= cost


def _added(p: Problem) -> Config | None:
    """Where the rule adds, of up to 64 or 129 to 256 keys on Hopper; None: other scans'.

    Linear attention, simple GLA, forward, T=4096, H=16, ms: K=V=64, B=4 0.067 0.094, in 4 pieces 0.058 0.063 (a stage less 0.113; 0.072
    0.079); K=V=256, B=2 of 64 values 0.201 0.234, 128 values 0.227 0.252, in 4 pieces 0.190 0.214.
    """
    BK, heads = padded(p.K), p.N * p.HV
    adds = p.rule is Rule.ADD and (p.gate is not Gate.KEY or BK > 64) and not p.bonus and p.dtype != torch.float32 and p.cu_seqlens is None
    if not adds or card().arch != "sm_90" or 64 < BK < 256 or BK > 256 or BK < 32 or heads * -(-p.V // 16) <= MULTIPROCESSORS:
        return None
    if BK <= 64:
        return Config(BK, min(64, padded(p.V)), 4, 3)
    if p.V > 64 and 4 * heads * -(-p.V // 128) >= 3 * MULTIPROCESSORS:
        return Config(BK, 128, 8, 2)
    return Config(BK, min(64, padded(p.V)), 4, 2)


DPLR = Config(128, 128, 8, 2)  # of the scans, where it fits: 0.276, else 0.402


# Measured on an H200 at B=8, T=4096, H=16, K=V=128, bf16, ms: here and the other blocks.
def _output(p: Problem) -> Config:
    if p.rule is Rule.DPLR:
        return DPLR if _fills(p, 229408) else _state_pass(p, 32)
    if p.rule is Rule.ADD and _fills(p, 189000):
        return Config(128, 128, 8, 3)  # 0.172, else 0.188; GLA 0.153, else 0.179
    if p.gate is Gate.KEY and _fills(p, 222000):
        return Config(128, 128, 8, 2)  # 0.257, else 0.421: only one narrower program fits
    c = _added(p) or _state_pass(p)
    if c == Config(256, 64, 4, 2) and p.rule is Rule.DELTA and p.gate is Gate.NONE and not p.erase and card().shared >= 210000:
        return replace(c, num_warps=8)  # DeltaNet, B=2, H=16, K=V=256: 0.326, else 0.400, where ptxas runs products one by one; GDN 0.365
    return c


def _states(p: Problem) -> Config:
    if p.rule is Rule.DPLR:
        return DPLR if _fills(p, 213100) else _state_pass(p)
    if p.gate is Gate.KEY:  # GLA at three stages 0.142, at two 0.177; KDA 0.286, 0.265
        return replace(_state_pass(p), num_stages=3) if p.rule is Rule.ADD and _fills(p, 115000) else _state_pass(p)
    if p.rule is Rule.ADD and _fills(p, 115000):
        return Config(128, 128, 8, 3, tma=False)  # 0.138, else 0.162
    if (added := _added(p)) is not None:  # simple GLA, 256 channels, every second chunk's: 8 warps 1.073 ms, else 1.119
        return replace(added, BV=min(64, added.BV), num_warps=8) if p.K > 64 and p.V > 32 else added
    return replace(_state_pass(p), num_stages=3) if _fills(p, 115000) else _state_pass(p)  # 0.205, else 0.221


def _reverse(p: Problem) -> Config:
    if p.rule is Rule.DPLR:
        return DPLR if _fills(p, 213100) else _state_pass(p)
    if _fills(p, 222000):
        # 0.260, else 0.402; GLA 0.238, else 0.270; KDA 0.332, else 0.455
        return Config(128, 128, 8, 2 if p.gate is Gate.KEY and p.rule is Rule.DELTA else 3)
    if (added := _added(p)) is not None:
        learns = p.gate is Gate.KEY or p.gate is not Gate.NONE and not p.fixed
        if p.K > 64 and (p.V > 256 or learns):  # states too: simple GLA's step 1.074 ms, at two stages 1.150, of 128 values 1.120
            return Config(added.BK, min(64, added.BV), 4, 1)
        return added
    return _state_pass(p, 32 if p.gate is Gate.KEY and p.rule is Rule.DELTA else 64)


def _inverse(p: Problem) -> Config:
    if p.dtype == torch.float32:
        return Config(padded(p.K), 0, 4, 1)
    if card().arch != "sm_90" or p.K > 256:
        return Config(padded(p.K), 0, 2, 1)
    # One warp whatever the keys and however they come: sums of gates meet in its order. Twelve programs a multiprocessor: GDN 0.083 ms, at
    # S2 0.161, as many registers as it wants 0.189. By pointers, eight: 0.115 and 0.221, two warps 0.119, four 0.157; those of 168
    # registers keep 64 words in memory. 256 channels 0.036, two warps 0.053.
    moved = p.cu_seqlens is None and p.K % 8 == p.V % 8 == 0 and not p.erase
    return Config(padded(p.K) if p.K <= 128 else 64, 0, 1, 1, registers=168 if moved else None)


def _grad(p: Problem) -> Config:
    """Narrow blocks of keys: two stages of them and whole values leave room for a second program on the multiprocessor."""
    # Measured as above, ms at 2 and 3 stages: linear 0.36 0.48, simple GLA 0.35 0.40, GDN 0.56 0.87; at 1 GDN 0.74.
    if p.V > 128 and p.rule is Rule.ADD:  # simple GLA, 128 tokens: 0.352 ms; 64 tokens of 512 values 0.385, 8 warps 0.715
        return Config(min(32, padded(p.K)), padded(p.V), 4 if p.C == 64 else 8, 2)
    if p.rule is Rule.ADD and max(p.K, p.V) <= 64:  # simple GLA's step, B=4, T=4096, H=16: 0.269; two stages 0.297, 128 tokens 0.348
        return Config(min(32, padded(p.K)), padded(p.V), 4, 3)
    if p.C > 64:  # simple GLA, 8 warps, blocks of 32, 64 and 128 keys: 0.65, 0.45 and 0.53
        return Config(min(64, padded(p.K)), padded(p.V), 8, 2)
    return Config(min(32, padded(p.K)), padded(p.V), 4, 2)  # DeltaNet, 256 values: 0.40 ms; 8 warps 0.60


def _small_strength(p: Problem) -> Config:
    """64 keys, however few: beside chunk matrices as left operands ptxas 12.8 builds descriptors of fewer from unset registers."""
    return Config(64, padded(p.V), 4 if p.V <= 128 else 8, 1)


def _grad_blocks(p: Problem) -> Config:
    """Two blocks at least: loops of one turn are unrolled, and products in a row make Triton lay out 8 warps along 64 rows. But on Hopper
    none of 16 to chunks of 64: ptxas 12.8 built their descriptors from unset registers, an illegal access on the card (Comba)."""
    if _few_warps(p):
        return Config(min(32, padded(p.K)), min(32, padded(p.V)), 2, 1)
    warps = _eight() if p.C > 16 and card().arch != "sm_100" else 4  # sm_100: Triton 3.6.0 stops at the sums over 8 warps
    if card().arch == "sm_90" and p.C == 64 and p.dtype != torch.float32 and min(padded(p.K), padded(p.V)) < 64:
        return Config(64, 64, warps, 1)
    return Config(min(64, max(16, padded(p.K) // 2)), min(64, max(16, padded(p.V) // 2)), warps, 1)


def _channels(p: Problem) -> int:
    """Channels a block of the scores of gates out of reach: as many as stay in registers."""
    wide = p.C == 64 and p.rule is Rule.ADD and card().arch.startswith("sm_")
    return min(32 if wide else 16, padded(p.K))


def _grad_key_blocks(p: Problem) -> Config:
    """On Hopper 64 keys and values to chunks of 64, however few there are: see kernels/grad_key_blocks.py. Shorter chunks are narrow
    operands themselves, so blocks of 32 rows: their products need no descriptors."""
    if p.dtype != torch.float32 and p.C == 64 and card().arch == "sm_90":
        return Config(64, 64, 4, 2)
    return Config(min(32, padded(p.K)), min(32, padded(p.V)), 2 if _few_warps(p) else 4, 1)


def _score(p: Problem) -> Config:
    if card().arch == "sm_90" and p.dtype != torch.float32:
        return Config(min(64, padded(p.K)), 0, 4, 1)  # gates beyond 2^100 in every chunk: GLA 1.26, KDA 1.79 ms; 32 channels 1.52, 1.93
    return Config(_channels(p), 0, 1 if _few_warps(p) else 4, 1)  # GLA, float32, the whole forward 0.70 ms, else 0.83


def _score_bounded(p: Problem) -> Config:
    if card().arch != "sm_90" or p.dtype == torch.float32:
        return Config(min(32, padded(p.K)), 0, 4, 1, tma=False)
    if p.rule is Rule.ADD:
        return Config(64, 0, 4, 2, registers=168)  # 0.206 ms; three stages 0.223; 32 keys in 128 registers 0.213
    # four programs a multiprocessor 0.342 ms; 64 keys in 168 registers 0.347; fp16 spills in 128 (B=4: 0.222; 64 keys 0.246)
    return Config(32, 0, 4, 2, registers=128 if p.dtype == torch.bfloat16 else 168)


def _rows_output(p: Problem) -> Config:
    if p.dtype != torch.float32:
        return Config(64, 128, 4, 3)
    return Config(32, 64, 4, 2)  # however few: of 32 and 16 ptxas 12.8 built descriptors from unset registers, an illegal access (V=17)


def _parallel_state(p: Problem) -> Config:
    """Of x's and z's columns: x whole where it fits, so that it is read once. A state takes registers beside."""
    if p.dtype == torch.float32 or card().arch != "sm_90":
        return Config(32, 64, 4, 2) if p.dtype == torch.float32 else Config(min(64, padded(p.K)), min(64, padded(p.V)), 4, 1, tma=False)
    return Config(min(256, max(64, padded(p.K))), min(128, max(64, padded(p.V))), 8, 2 if p.K > 128 else 3)


def _parallel(p: Problem) -> Config:
    """Two programs a multiprocessor. B=2, T=4096, H=16, with backward: simple GLA 1.304, one program 1.528 (4 warps 1.327); linear
    attention 1.047, 1.121."""
    moved = p.cu_seqlens is None and p.K % 8 == p.V % 8 == 0 and max(p.K, p.V) <= 128 and p.dtype == torch.bfloat16
    return replace(_parallel_state(p), num_stages=2, registers=128) if moved and card().arch == "sm_90" else _parallel_state(p)


def _affine_score(p: Problem) -> Config:
    """Triton lays 8 warps along 64 rows where products follow each other, and half of them repeat the others'."""
    if card().arch.startswith("sm_10"):  # Triton 3.6.0 stops there at sums over rows that the copy engine brought
        return Config(*_block(p), 4, 1, tma=False)
    return Config(*_block(p), 4, 2 if card().engine and p.dtype != torch.float32 else 1)  # 0.44 ms, at one stage 0.61


def _by_block(p: Problem) -> Config:
    """The affine stage, 0.49 ms, with what gradients ask 0.55; gradients of readers 0.76, of writers 1.07; outputs under gates a value."""
    return Config(*_block(p), 4, 1)


def _value_output(p: Problem) -> Config:
    """On Blackwell bf16, whose rows in reach are counted, with two warps: Triton 3.6.0 stops at reductions of what comes of products in
    tensor memory, where four leave them."""
    return Config(16, 16, 2, 1) if card().arch.startswith("sm_10") and p.dtype == torch.bfloat16 else _by_block(p)


def _grad_pair(p: Problem) -> Config:
    """All values at once where they fit: every matrix leaves its registers where it is made. Elsewhere few: unmeasured."""
    BK, BV = _block(p)
    if BV == 64:
        return Config(BK, padded(p.V) if 64 < p.V <= 128 else BV, 4, 1)  # 0.57 ms
    return Config(BK, 16, 4, 1)


def _grad_reader_far(p: Problem) -> Config:
    BK, BV = _block(p)
    return Config(min(32, BK), BV, 4, 1)


def _block(p: Problem) -> tuple[int, int]:
    """Channels of a block for the affine stage's kernels and their gradients: 64 on Hopper, however few there are.

    Chunk matrices are left operands there, and ptxas 12.8 builds descriptors of narrower right operands from unset registers.
    """
    if card().arch == "sm_90" and p.C == 64 and p.dtype != torch.float32:
        return 64, 64
    widest = 16 if p.dtype == torch.float32 else 32
    return min(widest, padded(p.K)), min(widest, padded(p.V))


def _ends(p: Problem) -> Config:
    if p.gate is Gate.KEY and p.rule is Rule.DELTA and _fills(p, 115000):
        return Config(128, 128, 8, 3)  # 0.453 ms, at two stages 0.539, of 64 values 0.743
    if (added := _added(p)) is not None:  # 64 values of 256 keys 0.041, 128 values 0.046
        return replace(added, BV=min(64, added.BV), num_warps=4, num_stages=3 if p.K <= 64 else 2)
    return replace(_state_pass(p), num_stages=3) if _fills(p, 115000) else _state_pass(p)  # DeltaNet 0.301, else 0.329; GDN 0.415, 0.418


def _carry(p: Problem) -> Config:
    """Maps come whole, [BK, BK]; below 64 rows of states the products are not of the kind that computed left operands endanger."""
    if not card().arch.startswith("sm_"):  # the next map beside this one would not fit an MI300's shared memory
        return Config(padded(p.K), min(16, padded(p.V)), 8, 1)
    return Config(padded(p.K), min(16 if p.dtype == torch.float32 else 32, padded(p.V)), 8, 2)  # 3.6 us a map; 16 values at one stage 5.8


# Which threads share the keys decides in which order they are added, so it does not depend on how many sequences there are. Measured on
# an H200, HV=32, K=V=128, B=64, steps in a pool in random order, us; floors 62.4 and, of 16 bits, 31.2.
def _recurrent(p: Problem) -> Config:
    return _keys_first(p, 2048, 4)  # Gated DeltaNet 70.8, KDA 72.0; twice the warps 74.8, 74.3; 32 values a program 76.3


def _recurrent_half(p: Problem) -> Config:
    if p.rule is Rule.ADD and not p.bonus:
        return replace(_keys_first(p, 2048, 8), registers=96)  # GLA 42.3, with as many registers as wanted 42.9; as below 42.6
    return replace(_keys_first(p, 4096, 8), registers=168)  # Gated DeltaNet 42.9, KDA 43.1, of 193 registers 46.0; 4 warps 44.8, 44.5


def _recurrent_odd(p: Problem) -> Config:
    """Lines that cannot be read 16 bytes at a time: a warp reads one after the other, so a thread has numbers of many keys.

    precond_kda 345, precond_gated_delta_rule 321; with a thread's numbers of few keys 578, 469. normalized_linear_attn 103, of 16 bits 80;
    32 values and 16 warps 180, 159, and 8 warps 113, 100; 16 warps and 128 values 102, 85, where several tokens at once are spilled.
    """
    if p.rule is Rule.ADD and p.V % 128 == 0 and 64 < p.K <= 128 and card().arch == "sm_90":  # a column lies behind the values
        return Config(16, 128, 8, 1)
    BK, BV = padded(p.K), min(32, padded(p.V))
    return Config(16, BV, min(16, max(1, BK * BV // 256)), 1)


def _keys_first(p: Problem, most: int, many: int) -> Config:
    """BK: keys of a block, what a program's threads read at once, `many` numbers each; a warp has `most` numbers of the state. How many
    sequences there are changes nothing: it would the order of sums."""
    BK = padded(p.K)
    BV = min(64, padded(p.V), max(16, 16384 // BK))
    count = min(8, max(1, BK * BV // most))
    return Config(min(BK, max(1, count * 32 * many // BV)), BV, count, 1)


def _recurrent_v_first(p: Problem) -> Config:
    BK = padded(p.K)
    BV = min(padded(p.V), max(8, min(64, 2048 // BK)))
    return Config(BK, BV, max(1, BK * BV // 2048), 1)  # KDA 69.8, of 16 bits 38.4; 8 values 70.5, 40.0; B=1 3.13, 3.54


def _slot(p: Problem, numbers: int = 8192) -> Config:
    """BK: channels of all slots that are under way at once; p.V slots."""
    BM = padded(p.V)
    BD = min(padded(p.K), max(16, numbers // BM))
    return Config(BD, BM, min(8, max(1, BM * BD // 512)), 1)


def _one_warp(p: Problem) -> Config:
    return Config(0, 0, 1, 1)


def _decay(p: Problem) -> Config:
    if card().arch != "sm_90" or p.dtype == torch.float32:
        return Config(min(32, padded(p.K)), 0, 2, 1, tma=False)
    return Config(32, 0, 4, 3, registers=128) if p.rule is Rule.DELTA else Config(64, 0, 4, 3)  # KDA 0.245, of 64 keys 0.255; GLA 0.243 ms


@dataclass(frozen=True)
class Choice:
    """A kernel's config: what was measured on this card for such a problem beside the rule's, or else the rule's."""

    kernel: str
    rule: Callable[[Problem], Config]

    def __call__(self, p: Problem) -> Config:
        ruled = self.rule(p)
        found = measured(card().name).get((key(self.kernel, p), ruled))
        return ruled if found is None else found.config


RULES: dict[str, Callable[[Problem], Config]] = {
    name: Choice(name, rule)
    for name, rule in dict(
        index=_one_warp, token=_one_warp, output=_rows_output, recurrent=_recurrent, recurrent_half=_recurrent_half,
        recurrent_v_first=_recurrent_v_first, recurrent_odd=_recurrent_odd, slot=_slot, slot_odd=lambda p: _slot(p, 4096),
        score_bounded=_score_bounded, decay=_decay, value_output=_value_output, affine_score=_affine_score, affine=_by_block,
        grad_pair=_grad_pair, grad_reader=_by_block, grad_reader_far=_grad_reader_far, inverse=_inverse, score=_score,
        state_pass=_output, state_pass_reverse=_reverse,
        state_pass_states=_states,  # without the output, storing states
        state_pass_ends=_ends,  # without output and states
        state_pass_reverse_ends=lambda p: _ends(p) if p.rule is Rule.ADD else _reverse(p),  # storing states where the rule corrects
        parallel=_parallel, parallel_state=_parallel_state, parallel_gate=lambda p: Config(0, 0, 4, 1),
        carry=_carry, grad=_grad, small_strength=_small_strength, grad_blocks=_grad_blocks,
        grad_key=lambda p: Config(min(32, padded(p.K)), padded(p.V), 4, 2),  # KDA, the whole step: 2.39 ms; 16 keys, three stages 2.71
        grad_key_blocks=_grad_key_blocks, grad_far=lambda p: replace(_grad_key_blocks(p), num_stages=1),
    ).items()
}  # fmt: skip


# Kernels in which ptxas 12.8 makes wgmma's descriptors of registers that nobody wrote where blocks of keys are narrower than a chunk.
AS_WIDE_AS_CHUNKS = frozenset({"grad_reader", "grad_key_blocks", "grad_far", "small_strength"})


def config(kernel: str, p: Problem) -> Config:
    """The kernel's config for this problem. ValueError for one that the card's compiler gets wrong."""
    c = RULES[kernel](p)
    if kernel in AS_WIDE_AS_CHUNKS and c.BK < p.C == 64 and p.dtype != torch.float32 and card().arch == "sm_90":
        raise ValueError(f"chunkwise: {kernel} cannot take blocks of {c.BK} keys on sm_90, whose compiler gets them wrong; at least {p.C}")
    return c
