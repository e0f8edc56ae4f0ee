"""Random numbers that are a function of (seed, index) alone: no generator to save, to restore or to share."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix(seed: int, index: int) -> int:
    """An integer in [0, 2^64), uniform and independent for different pairs (SplitMix64; Steele, Lea, Flood, OOPSLA 2014)."""
    x = (_finish(seed & _MASK) + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    return _finish(x)


def _finish(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
