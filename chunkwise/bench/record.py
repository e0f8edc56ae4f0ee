"""Results: one JSON line a row, in a file a day and device."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .turn import turn

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton")
ARCHIVED = "$Format:%H$"  # `git archive` writes its commit here (.gitattributes)


def device_name(device: torch.device) -> str:
    """As people call it: "NVIDIA H200"; for a CPU its model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return f"CPU {models[0].strip() if models and models[0].strip() != 'unknown' else platform.machine()}"


def folder_name(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


@cache
def commit() -> str:
    """The commit that runs, with a + where files differ from it; "" where this is neither a checkout nor an archive of one."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) == ROOT:  # not a checkout of something else around it
            return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        pass
    return "" if ARCHIVED.startswith("$") else ARCHIVED[:10]


def release(package: str) -> str:
    """A distribution's version; "" where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def surroundings(device: torch.device) -> dict[str, Any]:
    """What every row says about where and when it was made."""
    versions = {"python": platform.python_version(), **{n: v for n in PACKAGES if (v := release(n))}}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit(), "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None, "versions": versions,
    }  # fmt: skip


def append(out: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to out/<device>/<day>.jsonl; several processes may."""
    for row in rows:
        file = out / folder_name(row["device"]) / f"{row['date'][:10]}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with turn(file, alone=True), file.open("a") as f:
            f.write(json.dumps(row) + "\n")


def load(out: Path) -> list[dict[str, Any]]:
    """All rows under a folder of results, oldest first. Raises ValueError naming a line that is no row."""
    rows = []
    for file in sorted(out.glob("*/*.jsonl")):
        for i, line in enumerate(file.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
                rows.append((row["date"], row))
            except (json.JSONDecodeError, KeyError, TypeError):
                raise ValueError(f"bench: {file}:{i} is not a result") from None
    return [row for _, row in sorted(rows, key=lambda x: x[0])]
