"""A run's folder: its recipe, its checkpoints, and in the end the model.

recipe.json      what the run is made of; written first
checkpoint-N/    complete once it holds the file COMPLETE
curve.png        the loss curve so far
tensorboard/     the same for TensorBoard
model.safetensors, config.json, tokenizer*   the finished model
result.json      what came out; written last, so its presence says that the run is over
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .recipe import Recipe
from .refusal import Refusal, refusing

COMPLETE = "COMPLETE"


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.json"

    @property
    def result_file(self) -> Path:
        return self.path / "result.json"

    def settle(self, wanted: Recipe, given: Iterable[str], *, resume: bool, force: bool) -> Recipe:
        """The recipe to run: the recorded one where the run is resumed, with which the given options must agree. Writes nothing."""
        if resume and force:
            raise Refusal("give --resume or --force, not both")
        if self.path.exists() and not self.path.is_dir():
            raise Refusal(f"{self.path} is a file; --out wants a folder")
        if not resume:
            if self.path.is_dir() and any(self.path.iterdir()):
                if not force:
                    raise Refusal(f"{self.path} is not empty: continue its run with --resume, replace it with --force, or take another")
                if not self.recipe_file.is_file():
                    raise Refusal(f"{self.path} does not hold a run (no {self.recipe_file.name}); --force replaces only runs")
            return wanted
        if not self.recipe_file.is_file():
            raise Refusal(f"no run to resume in {self.path} (no {self.recipe_file.name})")
        if self.result_file.is_file():
            raise Refusal(f"the run in {self.path} is finished; nothing to resume")
        return self.recorded(wanted, given)

    def recorded(self, wanted: Recipe, given: Iterable[str]) -> Recipe:
        """The recipe of the run in the folder, with which the given options and the kind of task must agree."""
        with refusing(ValueError, TypeError):
            recorded = Recipe(**json.loads(self.recipe_file.read_text()))
        if not wanted.task.keys() <= recorded.task.keys():
            raise Refusal(f"{self.path} holds the run of another command")
        if "task" in wanted.task and wanted.task != recorded.task:  # a task is its sizes
            raise Refusal(f"{self.path} holds a run on {recorded.task}, not on {wanted.task}")
        old, new = ({**asdict(r), **r.task} for r in (recorded, wanted))
        for name in given:
            if new[name] != old[name]:
                raise Refusal(f"--{name.replace('_', '-')} was {old[name]} when the run began; it cannot become {new[name]}")
        return recorded

    def begin(self, recipe: Recipe) -> None:
        """Start afresh: an earlier run in the folder goes."""
        with refusing(OSError):
            if self.recipe_file.is_file():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
        self.write(self.recipe_file, json.dumps(asdict(recipe), indent=2) + "\n")

    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint. Half-written ones are removed."""
        complete = []
        for path in self.path.glob("checkpoint-*"):
            if (path / COMPLETE).is_file():
                complete.append(path)
            else:
                shutil.rmtree(path)
        return max(complete, key=lambda p: int(p.name.rpartition("-")[2]), default=None)

    def finish(self, model: Any, tokenizer: Any, result: dict[str, Any]) -> None:
        """Save the model where `from_pretrained` finds it, then the result."""
        stage = self.path / "saving"
        shutil.rmtree(stage, ignore_errors=True)
        model.save_pretrained(stage)
        if tokenizer is not None:
            tokenizer.save_pretrained(stage)
        for file in sorted(stage.iterdir()):
            os.replace(file, self.path / file.name)
        stage.rmdir()
        self.write(self.result_file, json.dumps(result, indent=2) + "\n")

    @staticmethod
    def write(path: Path, text: str) -> None:
        """Whole or not at all."""
        part = path.with_name(path.name + ".part")
        part.write_text(text)
        os.replace(part, path)
