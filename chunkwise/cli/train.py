"""`chunkwise train`: a language model from text files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from . import option
from .folder import Folder
from .recipe import MOST, Recipe, build_model, choose_device, choose_threads
from .refusal import Refusal, need, refusing

TOKENIZERS = ("byte", "bpe")


@option.training()
def train(
    ctx: typer.Context,
    run: dict[str, Any],
    texts: Annotated[list[Path] | None, typer.Argument(help="Text files, or folders of them.", show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run: checkpoints, curve, in the end the model.")] = Path("runs/model"),
    mixer: option.Mixer = "gated_delta_rule",
    context: Annotated[int, typer.Option(help="Tokens a sequence.")] = 256,
    tokenizer: Annotated[str, typer.Option(help="byte, or bpe learnt from the text.")] = "byte",
    vocab: Annotated[int | None, typer.Option(help="Tokens of bpe; default 4096.")] = None,
    device: option.Device = "auto",
    capture: option.Capture = True,
    resume: option.Resume = False,
    force: option.Force = False,
) -> None:
    """Train a language model on text and save it where AutoModelForCausalLM finds it."""
    need("train")
    data = {"texts": [str(t.absolute()) for t in texts or []], "context": context, "tokenizer": tokenizer, "vocab": vocab}
    wanted = Recipe(mixer=mixer, task=data, **run)
    folder = Folder(out)
    recipe = folder.settle(wanted, option.given(ctx), resume=resume, force=force)
    _check_text(recipe.task)
    from chunkwise.data.text import fingerprint, read_texts

    with refusing(ValueError, OSError):
        found = read_texts([Path(t) for t in recipe.task["texts"]], but=out)
    digest = fingerprint(found)
    if resume and recipe.task["sha256"] != digest:
        raise Refusal("the text has changed since the run began; it cannot be resumed")
    recipe = replace(recipe, task={**recipe.task, "sha256": digest})
    device = choose_device(device)
    recipe.check(device)
    recipe = replace(recipe, threads=choose_threads(recipe.threads))
    _run(recipe, found, folder, device, capture, resume)


def _check_text(task: dict[str, Any]) -> None:
    if not task["texts"]:
        raise Refusal("give at least one text file or folder")
    if task["tokenizer"] not in TOKENIZERS:
        raise Refusal(f"--tokenizer must be one of {', '.join(TOKENIZERS)}, got {task['tokenizer']}")
    if task["context"] < 2:
        raise Refusal(f"--context must be at least 2, got {task['context']}")
    if task["vocab"] is not None and (task["tokenizer"] != "bpe" or task["vocab"] <= 256):
        raise Refusal(f"--vocab is for --tokenizer bpe and more than 256, got {task['vocab']} for {task['tokenizer']}")
    if task["vocab"] is not None and task["vocab"] > MOST:
        raise Refusal(f"--vocab must be at most {MOST}, got {task['vocab']}")


def _run(recipe: Recipe, texts: list[str], folder: Folder, device: str, capture: bool, resume: bool) -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    from chunkwise.data.text import TextTask, split_texts
    from chunkwise.data.tokenizer import bpe_tokenizer, byte_tokenizer

    from .loop import ENDLESS, fit

    options = recipe.task
    tokenizer = byte_tokenizer() if options["tokenizer"] == "byte" else bpe_tokenizer(split_texts(texts)[0], options["vocab"] or 4096)
    items = recipe.batch * (recipe.limit or ENDLESS)
    with refusing(ValueError):
        task = TextTask(texts, tokenizer, context=options["context"], items=items, seed=recipe.seed)
    model = build_model(recipe, vocab=len(tokenizer))
    if not resume:
        folder.begin(recipe)
    size = sum(p.numel() for p in model.parameters())
    print(f"{recipe.mixer}: {recipe.layers} layers of width {recipe.width}, {size:,} parameters; {task.tokens:,} training tokens; {device}")
    result = fit(model, task, recipe, folder, device, tokenizer, capture=capture)
    print(f"validation  {result['bits_per_byte']:.3f} bits per byte after {result['steps']} steps, {result['seconds']:.0f} s")
    print(f"curve       {folder.path / 'curve.png'}")
    print(f"model       {folder.path}")
