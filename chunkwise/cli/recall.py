"""`chunkwise recall`: how much a member remembers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from . import option
from .folder import Folder
from .recipe import Recipe, build_model, choose_device, choose_threads
from .refusal import need, refusing


def recall(
    ctx: typer.Context,
    out: option.Out = Path("runs/recall"),
    mixer: option.Mixer = "gated_delta_rule",
    pairs: Annotated[int, typer.Option(help="Key-value pairs a sequence.")] = 16,
    keys: Annotated[int, typer.Option(help="Different keys.")] = 64,
    values: Annotated[int, typer.Option(help="Different values.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens a sequence.")] = 64,
    layers: option.Layers = 2,
    width: option.Width = 64,
    heads: option.Heads = 2,
    steps: option.Steps = None,
    minutes: option.Minutes = None,
    batch: option.Batch = 32,
    lr: option.Rate = 3e-3,
    warmup: option.Warmup = 50,
    schedule: option.Schedule = "cosine",
    weight_decay: option.WeightDecay = 0.1,
    dtype: option.Dtype = "float32",
    seed: option.Seed = 0,
    device: option.Device = "auto",
    threads: option.Threads = 0,
    save_every: option.SaveEvery = None,
    resume: option.Resume = False,
    force: option.Force = False,
) -> None:
    """Train on multi-query associative recall and report the share of queries answered right."""
    need("transformers", "train")
    sizes = {"pairs": pairs, "keys": keys, "values": values, "length": length}
    wanted = Recipe(
        mixer=mixer, layers=layers, width=width, heads=heads, batch=batch, lr=lr, minutes=minutes,
        steps=steps, warmup=warmup, schedule=schedule,
        weight_decay=weight_decay, dtype=dtype, seed=seed, threads=threads, save_every=save_every, task=sizes,
    )  # fmt: skip
    folder = Folder(out)
    recipe = folder.settle(wanted, option.given(ctx), resume=resume, force=force)
    device = choose_device(device)
    recipe.check(device)
    recipe = replace(recipe, threads=choose_threads(recipe.threads))
    from transformers.utils import logging

    from chunkwise.data.recall import RecallTask

    from .loop import ENDLESS, fit

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with refusing(ValueError):
        task = RecallTask(**recipe.task, items=recipe.batch * (recipe.limit or ENDLESS), seed=recipe.seed)
    model = build_model(recipe, vocab=task.vocab)
    if not resume:
        folder.begin(recipe)
    result = fit(model, task, recipe, folder, device)
    print(f"{recipe.mixer}: {result['accuracy']:.1%} of the queries right after {result['steps']} steps, {result['seconds']:.0f} s")
