"""Configs that were measured on a card, `tuned/<card>.json`, which `chunkwise tune` writes: they go before the rules of tune.py.

None changes a bit of any result: what is kept was seen to give the bits of the rule's config. So it may depend on how many heads there are
to fill the card with, which a sample's result must not. Other warps may add up in another order, or be what a compiler gets wrong, so a
row carries a seal: one that was changed since it was measured is refused.

A row names the rule's config that it was measured beside, and the version of Triton that built both: it holds where the rule still says so,
under that version. A rule that has changed since was itself measured, later: the row is asleep then, never in the way of a call.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .config import Config, read, said
from .problem import Problem, power_of_two

FOLDER = Path(__file__).parent / "tuned"
Key = tuple[str | int | bool, ...]
KEY: dict[str, type] = dict(
    kernel=str, gate=str, rule=str, bonus=bool, erase=bool, before=bool, dtype=str, precision=str,
    K=int, V=int, C=int, heads=int, packed=bool,
)  # fmt: skip
SEEN: dict[str, type] = dict(case=str, ms=float, ruled_ms=float, tried=int, when=str, triton=str)
SUMS = ("BK", "fuse")  # sums go over blocks of keys, and are of products: others have other bits


@dataclass(frozen=True)
class Found:
    """The fastest config of a kernel, which may be the rule's own, and what was seen."""

    config: Config
    case: str  # the call that was timed: member, B,T,H,HV,K,V, dtype, pass
    ms: float  # of that call's device work, median
    ruled_ms: float  # the same with the rule's config, in turn with it
    tried: int  # other configs that gave the same bits
    when: str  # date and versions
    triton: str  # and its: another one may order sums otherwise, or want more of the card


Table = Mapping[tuple[Key, Config], Found]  # by what a measurement holds for, and the rule's config


def key(kernel: str, p: Problem) -> Key:
    """What a measurement holds for: a kernel of a cell, type and head sizes, and, to a power of two, the heads of all sequences."""
    heads = power_of_two(p.N * p.HV + 1) // 2
    cell = str(p.gate), str(p.rule), p.bonus, p.erase, p.before
    products = p.precision if p.inverse == "auto" else f"{p.precision}, inverse {p.inverse}"
    return kernel, *cell, str(p.dtype).removeprefix("torch."), products, p.K, p.V, p.C, heads, p.cu_seqlens is not None


def file_name(card: str) -> str:
    """"NVIDIA H200" -> nvidia_h200"""
    return re.sub(r"[^a-z0-9]+", "_", card.lower()).strip("_")


def cards() -> list[str]:
    """Names of the cards there are measurements of."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def at(card: str, folder: Path | None = None) -> Path:
    """A card's file."""
    return (folder or FOLDER) / f"{file_name(card)}.json"


def load(card: str, folder: Path | None = None) -> Table:
    """What was measured, by key. Raises ValueError naming the file, the row and the field that is wrong."""
    file = at(card, folder)
    if not card or not file.exists():
        return {}
    try:
        rows = json.loads(file.read_text())["configs"]
        return dict(_row(card, f"configs[{i}]", row) for i, row in enumerate(rows))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise ValueError(f"tune: {file} is no file of measured configs") from None
    except ValueError as error:
        raise ValueError(f"tune: {file}: {error}") from None


def _row(card: str, where: str, row: Any) -> tuple[tuple[Key, Config], Found]:
    wanted = {**KEY, "ruled": dict, "config": dict, **SEEN, "seal": str}
    if not isinstance(row, dict) or row.keys() != wanted.keys():
        got = ", ".join(row) if isinstance(row, dict) else repr(row)
        raise ValueError(f"{where} must have {', '.join(wanted)}, got {got}")
    for name, kind in wanted.items():
        if type(row[name]) is not kind:
            raise ValueError(f"{where}: {name} must be of type {kind.__name__}, got {row[name]!r}")
    try:
        ruled, config = read(row["ruled"]), read(row["config"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    of = tuple(row[n] for n in KEY), ruled
    found = Found(config, *(row[n] for n in SEEN))
    if row["seal"] != _seal(card, of, found):
        raise ValueError(f"{where}: {row['kernel']} is not what was measured on {card}: its seal is broken; let chunkwise tune measure it")
    for n in SUMS:
        if getattr(config, n) != getattr(ruled, n):
            raise ValueError(f"{where}: {row['kernel']} must have {n} {getattr(ruled, n)}, got {getattr(config, n)}; measure it again")
    return of, found


def _written(of: tuple[Key, Config], found: Found) -> dict[str, Any]:
    seen = {n: getattr(found, n) for n in SEEN}
    return {**dict(zip(KEY, of[0])), "ruled": said(of[1]), "config": said(found.config), **seen}


def _seal(card: str, of: tuple[Key, Config], found: Found) -> str:
    return hashlib.sha256(json.dumps([file_name(card), _written(of, found)], sort_keys=True).encode()).hexdigest()[:16]


@cache
def measured(card: str) -> Table:
    """Those of the package that hold for this Triton, read once."""
    import triton

    return {of: found for of, found in load(card).items() if found.triton == triton.__version__}


def save(card: str, configs: Table, folder: Path | None = None) -> Path:
    """Add configs to a card's file, in place of what is there of the same kernels and keys."""
    file = at(card, folder)
    new = {k for k, _ in configs}
    all_of = {**{of: found for of, found in load(card, folder).items() if of[0] not in new}, **configs}
    ordered = sorted(all_of.items(), key=lambda one: (one[1].case, one[0][0], str(one[0])))
    rows = [json.dumps({**_written(of, found), "seal": _seal(card, of, found)}) for of, found in ordered]
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {row}" for row in rows)
    made = file.with_suffix(".new")  # whole or not at all: calls refuse a broken file
    made.write_text(f'{{"card": {json.dumps(card)}, "configs": [\n{lines}\n]}}\n')
    made.replace(file)
    measured.cache_clear()
    return file
