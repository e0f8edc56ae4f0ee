"""Few heads: in which pieces a long sequence is scanned side by side. See kernels/split.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..spec import Gate, Rule
from .tune import MULTIPROCESSORS, padded


@dataclass(frozen=True)
class Cut:
    """Lengths of the pieces that a sequence is scanned in, side by side, in any unit: 1 to 15 each, at most 16."""

    lengths: tuple[int, ...]

    @property
    def pieces(self) -> int:
        return len(self.lengths)

    @property
    def code(self) -> int:
        """The lengths, 4 bits each."""
        return _code(self.lengths)

    def order(self, reverse: bool, ends: bool, first: bool = False) -> int:
        """Pieces (with `first` the first too; with `ends` not the last), counted in the order of a scan: long ones first, 4 bits each."""
        lengths = self.lengths[::-1] if reverse else self.lengths
        return _code(sorted(range(not first, self.pieces - ends), key=lambda j: -lengths[j]))


def _code(numbers: Sequence[int]) -> int:
    return sum(n << 4 * i for i, n in enumerate(numbers))


def even(pieces: int) -> Cut:
    return Cut((1,) * pieces)


WHOLE = even(1)
LONG = 8192  # tokens, see `long`


def long(rule: Rule, HV: int, K: int, V: int) -> int:
    """Tokens from which a sequence is cut, if such sequences are cut: fewer where a first scan costs little and heads are few."""
    soon = rule is Rule.ADD and (K > 128 or HV * -(-padded(V) // 64) <= MULTIPROCESSORS // 8)
    return min(LONG, 4096) if soon else LONG


def parted(gate: Gate, rule: Rule, dtype: torch.dtype, K: int, V: int) -> bool:
    """Whether pieces scanned side by side and one after the other have the same bits: see PARTED in kernels/state_pass.py.

    A state in two parts needs twice the registers: of 128 channels they are there only without gates (simple GLA, H200, K=V=128, B=16,
    T=4096, H=8, forward: 0.298 ms, in one part 0.149).
    """
    return rule is Rule.ADD and dtype != torch.float32 and max(K, V) <= (128 if gate is Gate.NONE else 64)


def side_by_side(gate: Gate, rule: Rule, dtype: torch.dtype, B: int, HV: int, K: int, V: int, *, packed: bool) -> bool:
    """Whether pieces are scanned side by side, which takes a scan of ends first and pays where a card has too little to do.

    A batch is asked only where the bits are the same. Linear attention on an H200, T=4096, forward and with backward, ms, side by side
    and one after the other: K=V=64, H=16: B=4 0.066 0.202, 0.074 0.283; B=8 0.119 0.377, 0.082 0.317; B=16 0.229 0.738, 0.142 0.549 (in
    one piece 0.141 0.555); K=V=128, H=8, B=16 0.271 0.858, 0.140 0.543.
    """
    return packed or not parted(gate, rule, dtype, K, V) or 4 * B * HV * -(-padded(V) // 64) < 3 * BUSY


BUSY = MULTIPROCESSORS  # programs that scan whole sequences


def longest(rule: Rule, B: int, T: int, HV: int, K: int, V: int, *, packed: bool) -> int:
    """How many sequences are cut, if any are: of packed ones at most so many, which only the device knows."""
    return T // long(rule, HV, K, V) if packed else B


def split(gate: Gate, rule: Rule, T: int, HV: int, K: int, V: int) -> Cut:
    """Pieces of a long sequence: enough for two programs a multiprocessor where one sample's heads are too few.

    A sample is cut by its own length and heads, never by its batch's size: a cut adds in another order, and a sample's bits must not
    depend on its neighbours. Packed: of the row; its sequences that are long, which only the device knows, are cut.

    Measured on an H200, K=V=128, bf16, forward and forward with backward in ms: T=32768, H=32: DeltaNet 0.88 3.06, GDN 1.10 3.55, KDA 1.64
    7.00 (whole 2.02 8.30); H=48 in 5 pieces DeltaNet 1.46 5.05 (whole 1.89 6.62); T=16384, H=64 in 4 DeltaNet 0.98 3.32 (whole 1.00 3.69);
    T=8192, H=8 in 16 DeltaNet 0.133 0.349, GDN 0.144 0.411, KDA 0.196 0.643; linear attention in 8 0.136 with backward, in 16 0.150.
    T=32768, H=32 in 7 pieces and in 8: KDA 1.503 5.49, 1.545 5.42; RWKV-7 2.91 10.50, 2.975 10.45; DeltaNet 0.740 2.86, 0.761 2.76; with
    H=24 all lose in 7: KDA 1.239 4.50, 1.215 4.31.
    """
    if T < long(rule, HV, K, V) or rule is not Rule.ADD and K > 128:  # a map [K, K] in fp32 has to fit the shared memory of `carry`
        return WHOLE
    programs, places = HV * -(-padded(V) // 64), 2 * MULTIPROCESSORS
    if rule is Rule.ADD and K > 128:  # of 128 values, each alone on its multiprocessor
        programs, places = HV * -(-padded(V) // 128), MULTIPROCESSORS
        return even(min(16, 1 << (places // programs).bit_length() - 1)) if programs <= places // 4 else WHOLE
    if programs <= places // (32 if rule is Rule.ADD else 16):
        return even(16)
    if programs <= places // 8:
        return even(8)
    if rule is Rule.ADD:  # four of 2 units side by side; most of what a first scan need not read lies at the ends
        return Cut((2, 1, 1, 1, 1, 2)) if programs <= places // 4 else WHOLE
    if programs <= places // 4:
        if programs > 56 and (gate is Gate.KEY or rule is Rule.DPLR):  # maps cost more: fewer of them, of pieces more alike side by side
            return Cut((9, 6, 3, 1, 3, 6, 9))
        # four of 5 units side by side, and without the first or the last piece four of 4
        return Cut((4, 3, 2, 1, 1, 2, 3, 4))
    return even(2 * places // programs) if programs <= places // 2 else WHOLE
