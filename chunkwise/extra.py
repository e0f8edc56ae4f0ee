"""What `pip install 'chunkwise[EXTRA]'` brings, by name where it is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager


def advice(who: str, module: str, extra: str) -> str:
    return f"{who} needs {module}: pip install 'chunkwise[{extra}]'"


@contextmanager
def extra(name: str, who: str) -> Iterator[None]:
    """Around imports: a ModuleNotFoundError for what the extra brings says so."""
    try:
        yield
    except ModuleNotFoundError as missing:
        root = (missing.name or "").partition(".")[0]
        if root not in modules(name):
            raise
        raise ModuleNotFoundError(advice(who, root, name), name=missing.name) from missing


def modules(name: str) -> list[str]:
    """The modules of an extra, as the distribution declares it; none where chunkwise is run from a checkout that is not installed."""
    try:
        declared = importlib.metadata.requires("chunkwise") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found: list[str] = []
    for line in declared:
        wanted = re.match(r"([\w.-]+)(?:\[(\w+)\])?", line)
        if wanted and re.search(rf"extra == ['\"]{name}['\"]", line):
            package, further = wanted.groups()
            found += modules(further) if further else [package.replace("-", "_")]
    return found


def missing(name: str) -> str:
    """The first module of an extra that is not installed; "" where all are."""
    return next((m for m in modules(name) if importlib.util.find_spec(m) is None), "")
