"""`chunkwise convert`: checkpoints of other libraries into chunkwise models, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .refusal import Refusal, need, refusing


def convert(
    source: Annotated[Path, typer.Argument(help="A folder with config.json and weights: of fla, of transformers, or of chunkwise.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; new or empty.")],
    to: Annotated[str, typer.Option(help="chunkwise, or the model_type to write: gla, gated_deltanet, qwen3_5_text, ...")] = "chunkwise",
) -> None:
    """Read a checkpoint of flash-linear-attention or transformers into a chunkwise model, or write one in their layout."""
    need("models")
    from safetensors import SafetensorError
    from transformers.utils import logging

    from chunkwise.models.convert import layouts, read_folder, write_folder

    logging.disable_progress_bar()
    if to != "chunkwise" and to not in layouts():
        raise Refusal(f"--to must be chunkwise or one of {', '.join(layouts())}, got {to}")
    with refusing(ValueError, TypeError, OSError, SafetensorError):
        model = read_folder(source)
        write_folder(model, out, to, source)
    count = sum(p.numel() for p in model.parameters())
    what = f"{model.config.mixer}, {model.config.num_hidden_layers} layers, {count / 1e6:.1f} million parameters in {model.dtype}"
    print(f"{out}: {to}, {what}")
