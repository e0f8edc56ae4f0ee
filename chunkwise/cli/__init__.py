"""The command line: `chunkwise train`, `generate`, `eval`, `perplexity`, `ops`, `doctor` and more."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from chunkwise.extra import advice


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. A refusal is one line on stderr and exit code 2, with nothing written."""
    try:
        from .app import run
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        print(f"chunkwise: {advice('the command line', missing.name, 'train')}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run(arguments))
