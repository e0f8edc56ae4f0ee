"""What the tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkwise.cli import main

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.\n" * 40
TINY = "--layers 1 --width 16 --heads 2 --batch 2 --context 32".split()


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return end.value.code or 0


def tale(folder: Path) -> Path:
    """A text file."""
    path = folder / "tale.txt"
    path.write_text(TEXT)
    return path


def trained(text: Path, out: Path, *options: object) -> Path:
    """A finished run."""
    assert call("train", text, "--out", out, *TINY, *options) == 0
    return out
