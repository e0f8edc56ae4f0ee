"""Configs that were measured on a card, `tuned/<card>.json`, which `chunkwise tune` writes: they go before the rules of tune.py.

None changes a bit of any result: what is kept was seen to give the bits of the rule's config. So it may depend on how many heads there are
to fill the card with, which a sample's result must not. Other warps may add up in another order, or be what a compiler gets wrong, so a
row carries a seal: one that was changed since it was measured is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from .config import Config, read
from .problem import Problem, power_of_two

FOLDER = Path(__file__).parent / "tuned"
Key = tuple[str | int | bool, ...]
KEY: dict[str, type] = dict(
    kernel=str, gate=str, rule=str, bonus=bool, erase=bool, before=bool, dtype=str, precision=str,
    K=int, V=int, C=int, heads=int, packed=bool,
)  # fmt: skip


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


def load(card: str, folder: Path | None = None) -> dict[Key, Config]:
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


def _row(card: str, where: str, row: Any) -> tuple[Key, Config]:
    if not isinstance(row, dict) or row.keys() != {*KEY, "config", "seal"}:
        got = ", ".join(row) if isinstance(row, dict) else repr(row)
        raise ValueError(f"{where} must have {', '.join(KEY)}, config and seal, got {got}")
    for name, kind in KEY.items():
        if type(row[name]) is not kind:
            raise ValueError(f"{where}: {name} must be of type {kind.__name__}, got {row[name]!r}")
    try:
        found = tuple(row[n] for n in KEY), read(row["config"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if row["seal"] != _seal(card, *found):
        raise ValueError(f"{where}: {row['kernel']} is not what was measured on {card}: its seal is broken; let chunkwise tune measure it")
    return found


def _seal(card: str, k: Key, config: Config) -> str:
    return hashlib.sha256(json.dumps([file_name(card), k, asdict(config)], sort_keys=True).encode()).hexdigest()[:16]


@cache
def measured(card: str) -> Mapping[Key, Config]:
    """Those of the package, read once."""
    return load(card)


def save(card: str, configs: Mapping[Key, Config], about: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Add configs to a card's file, in place of what is there under the same keys; about: how they were measured."""
    file = at(card, folder)
    all_of = {**load(card, folder), **configs}
    rows = [json.dumps({**dict(zip(KEY, k)), "config": asdict(c), "seal": _seal(card, k, c)}) for k, c in sorted(all_of.items())]
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {row}" for row in rows)
    made = file.with_suffix(".new")  # whole or not at all: calls refuse a broken file
    made.write_text(f'{{"card": {json.dumps(card)}, "measured": {json.dumps(about)}, "configs": [\n{lines}\n]}}\n')
    made.replace(file)
    measured.cache_clear()
    return file
