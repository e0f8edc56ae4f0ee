"""The options that several commands share, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_STEPS = 1000

Mixer = Annotated[str, typer.Option(help="A member that has a layer, full_attention, or none.")]
Layers = Annotated[int, typer.Option(help="How many.")]
Width = Annotated[int, typer.Option(help="Hidden size.")]
Heads = Annotated[int, typer.Option(help="Heads of a layer.")]
Steps = Annotated[int | None, typer.Option(help=f"Optimiser steps; {DEFAULT_STEPS} unless --minutes is given.")]
Minutes = Annotated[float | None, typer.Option(help="Stop after so long; with --steps, whichever comes first.")]
Batch = Annotated[int, typer.Option(help="Sequences a step.")]
Rate = Annotated[float, typer.Option(help="Peak learning rate.")]
Warmup = Annotated[int, typer.Option(help="Steps to the peak; at most a tenth of --steps.")]
Schedule = Annotated[str, typer.Option(help="cosine, or wsd: constant, then linear to zero over the last fifth.")]
WeightDecay = Annotated[float, typer.Option(help="Not for norms, biases and gates.")]
Dtype = Annotated[str, typer.Option(help="float32; bfloat16 or float16 by autocast.")]
Seed = Annotated[int, typer.Option(help="Of the weights and of the batches.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves it to PyTorch. One is best for small models on a busy machine.")]
SaveEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints; by default five in a run, and one every five minutes.")]
Out = Annotated[Path, typer.Option(help="Folder of the run: checkpoints, curve, in the end the model.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its newest checkpoint.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the run in --out.")]


def given(ctx: typer.Context) -> list[str]:
    """The options of the recipe that the user typed."""
    aside = {"out", "resume", "force", "device"}
    return [n for n in ctx.params if n not in aside and getattr(ctx.get_parameter_source(n), "name", "DEFAULT") != "DEFAULT"]
