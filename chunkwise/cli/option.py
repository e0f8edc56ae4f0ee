"""The options that several commands share, each said once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from .recipe import DEFAULT_STEPS

Mixer = Annotated[str, typer.Option(help="A member that has a layer, full_attention, or none; with fields as gla:expand_k=1,conv_size=2.")]
Seed = Annotated[int, typer.Option(help="Of the weights and of the batches.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves it to PyTorch. One is best for small models on a busy machine.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its newest checkpoint.")]
Capture = Annotated[bool, typer.Option(help="On a GPU, replay a step's forward and backward pass as a CUDA graph: the same bits, sooner.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the run in --out.")]


def _run(
    layers: Annotated[int, typer.Option(help="How many.")] = 2,
    width: Annotated[int, typer.Option(help="Hidden size.")] = 128,
    heads: Annotated[int, typer.Option(help="Heads of a layer.")] = 4,
    steps: Annotated[int | None, typer.Option(help=f"Optimiser steps; {DEFAULT_STEPS} unless --minutes is given.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so long; with --steps, whichever comes first.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 4,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 4e-3,
    warmup: Annotated[int, typer.Option(help="Steps to the peak; at most a tenth of --steps.")] = 50,
    schedule: Annotated[str, typer.Option(help="cosine, or wsd: constant, then linear to zero over the last fifth.")] = "cosine",
    weight_decay: Annotated[float, typer.Option(help="Not for norms, biases and gates.")] = 0.1,
    dtype: Annotated[str, typer.Option(help="float32; bfloat16 or float16 by autocast.")] = "float32",
    seed: Seed = 0,
    threads: Threads = 0,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; by default five a run, one in five minutes.")] = None,
) -> None:
    """What a run is made of besides its task and its mixer: fields of Recipe."""


def training(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a run, `defaults` in place of the usual ones; it takes their values as the dict `run`."""

    def give(command: Callable[..., None]) -> Callable[..., None]:
        usual = inspect.signature(_run, eval_str=True).parameters.values()
        shared = [p.replace(default=defaults.get(p.name, p.default), kind=p.KEYWORD_ONLY) for p in usual]
        own = [p for n, p in inspect.signature(command, eval_str=True).parameters.items() if n != "run"]

        @wraps(command)
        def function(**given: Any) -> None:
            command(**{p.name: given[p.name] for p in own}, run={p.name: given[p.name] for p in shared})

        function.__signature__ = inspect.Signature([*(p.replace(kind=p.KEYWORD_ONLY) for p in own), *shared])  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
        return function

    return give


def given(ctx: typer.Context) -> list[str]:
    """The options of the recipe that the user typed."""
    aside = {"out", "resume", "force", "device", "capture"}
    return [n for n in ctx.params if n not in aside and getattr(ctx.get_parameter_source(n), "name", "DEFAULT") != "DEFAULT"]
