"""The commands, gathered; bad use of any of them ends in one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from typer.main import get_command

from .bench import bench
from .convert import convert
from .doctor import doctor
from .eval import evaluate
from .generate import generate
from .ops import ops
from .perplexity import perplexity
from .precompile import precompile
from .refusal import Failure, Refusal, short_of_memory
from .train import train
from .tune import tune

app = typer.Typer(
    name="chunkwise",
    help="Train and run linear-attention language models, on any machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (train, generate, convert, perplexity, bench, tune, precompile, ops, doctor):
    app.command()(command)
app.command("eval")(evaluate)

INTERRUPTED = 130
UsageError: type[Exception] = typer.BadParameter.__base__  # type: ignore[assignment]  # what typer raises for every misuse


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for a refusal, 1 for a run that failed, 130 where the user interrupts."""
    try:
        code = get_command(app).main(list(sys.argv[1:] if arguments is None else arguments), prog_name="chunkwise", standalone_mode=False)
    except UsageError as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        return _say(message or "see chunkwise --help", 2)
    except Refusal as refusal:
        return _say(str(refusal), refusal.code)
    except (typer.Abort, KeyboardInterrupt):
        return _say("interrupted", INTERRUPTED)
    except (MemoryError, RuntimeError) as error:
        if not short_of_memory(error):
            raise
        return _say(f"out of memory: {error}", Failure.code)
    if code == INTERRUPTED:  # typer has taken the KeyboardInterrupt for an exit
        return _say("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _say(message: str, code: int) -> int:
    print(f"chunkwise: {' '.join(message.split())}", file=sys.stderr)
    return code
