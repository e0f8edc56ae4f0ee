"""`chunkwise eval`: members side by side on a task that tells them apart."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from . import option
from .folder import Folder
from .recipe import Recipe, build_model, choose_device, choose_threads
from .refusal import Refusal, need, refusing

HARDER = (1, 2, 4)  # the task is asked at so many times the size that it was trained at


@option.training(width=64, heads=2, batch=32, lr=3e-3)
def evaluate(
    ctx: typer.Context,
    run: dict[str, Any],
    task: Annotated[str, typer.Argument(help="recall, copying, parity or permutation.", show_default=False)],
    mixer: Annotated[list[str] | None, typer.Option(help="As in train, e.g. delta_rule:allow_neg_eigval=true; again for more.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="A size of the task, as pairs=8; again for more.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs, one for each member; default runs/TASK.")] = None,
    device: option.Device = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Keep the members that are done in --out and continue the others.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the runs in --out.")] = False,
    capture: option.Capture = True,
) -> None:
    """Train each member on a synthetic task, report the share of answers that are right there and on harder ones, and plot it."""
    need("train")
    from transformers.utils import logging

    from chunkwise.data.task import all_tasks

    from .curve import draw_accuracy

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if resume and force:
        raise Refusal("give --resume or --force, not both")
    known = all_tasks()
    if task not in known:
        raise Refusal(f"TASK must be one of {', '.join(known)}, got {task}")
    with refusing(ValueError):
        drawn = known[task](**_sizes(size or [], [f.name for f in fields(known[task])]))
    device, out, threads = choose_device(device), Path("runs") / task if out is None else out, choose_threads(run["threads"])
    typed = [n for n in option.given(ctx) if n not in ("task", "mixer", "size")]
    runs = []
    for name in dict.fromkeys(mixer or ["gated_delta_rule"]):  # refuse before the first of them begins
        wanted = Recipe(mixer=name, task={"task": task, **asdict(drawn)}, **{**run, "threads": threads})
        folder = Folder(out / name)
        started, over = resume and folder.recipe_file.is_file(), resume and folder.result_file.is_file()
        recipe = folder.recorded(wanted, typed) if started else folder.settle(wanted, typed, resume=False, force=force)
        recipe.check(device)
        runs.append((recipe, folder, build_model(recipe, vocab=drawn.vocab), started, over))
    found = {}
    for recipe, folder, model, started, over in runs:
        found[recipe.mixer] = _one(recipe, drawn, folder, model, device, started, over, capture)
        for value, accuracy in found[recipe.mixer].items():
            print(f"{recipe.mixer}: {accuracy:.1%} right at {drawn.axis} = {value} (guessing: {drawn.chance:.1%})", flush=True)
    draw_accuracy(found, drawn.axis, drawn.chance, f"{task}, trained at {drawn.axis} = {getattr(drawn, drawn.axis)}", out / "accuracy.png")
    print(f"plot        {out / 'accuracy.png'}")


def _sizes(given: list[str], known: list[str]) -> dict[str, int]:
    """ "pairs=8" -> {"pairs": 8}."""
    sizes = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in known or not value.isdecimal():
            raise Refusal(f"--size must be NAME=WHOLE NUMBER with a name among {', '.join(known)}, got {text}")
        sizes[name] = int(value)
    return sizes


def _one(recipe: Recipe, task: Any, folder: Folder, model: Any, device: str, started: bool, over: bool, capture: bool) -> dict[int, float]:
    """Accuracy by value of the axis, of one member: trained now, continued, or finished before."""
    from chunkwise.data.task import Drill

    from .loop import ENDLESS, fit

    drill = Drill(task, items=recipe.batch * (recipe.limit or ENDLESS), seed=recipe.seed)
    if over:
        with refusing(OSError, ValueError):
            model = type(model).from_pretrained(folder.path, local_files_only=True).to(device)
    else:
        if not started:
            folder.begin(recipe)
        fit(model, drill, recipe, folder, device, capture=capture)
    found = {}
    for value in (getattr(task, task.axis) * factor for factor in HARDER):
        try:
            harder = task.at(value)
        except ValueError:  # more pairs than keys: what the model has tokens for ends here
            break
        found[value] = drill.evaluate(model.eval(), task=harder)["accuracy"]
    folder.write(folder.path / "accuracy.json", json.dumps(found) + "\n")
    return found
