"""What a training run shows while it goes: a bar on a terminal, a line for every evaluation anywhere."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from transformers import TrainerCallback

from .curve import draw_curve

NONE = "–"  # no loss yet


class Progress(TrainerCallback):
    """Shows step, loss and tokens per second; redraws the curve at every evaluation."""

    def __init__(self, budget: Any, headline: str, tokens: int, curve: Path) -> None:
        self.budget, self.headline, self.tokens, self.curve = budget, headline, tokens, curve
        text = "{task.fields[step]} steps  {task.fields[speed]:,.0f} tokens/s  loss {task.fields[loss]}"
        columns = BarColumn(), TextColumn("{task.percentage:3.0f}%"), TextColumn(text), TimeElapsedColumn()
        self.bar = Bar(*columns, console=Console(stderr=True))
        self.task = self.bar.add_task("training", total=1.0, step=0, speed=0.0, loss=NONE)
        self.loss = NONE
        self.steps, self.busy, self.begun = 0, 0.0, 0.0  # steps taken here, seconds spent in them

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def say(self, line: str) -> None:
        self.bar.console.print(line, highlight=False)

    @property
    def speed(self) -> float:
        """Training tokens per second, evaluations and checkpoints not counted."""
        return self.steps * self.tokens / self.busy if self.busy else 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.busy += time.monotonic() - self.begun
        self.steps += 1
        share = self.budget.share(state.global_step)
        self.bar.update(self.task, completed=share, step=state.global_step, speed=self.speed)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.loss = f"{logs['loss']:.3f}"
            self.bar.update(self.task, loss=self.loss)
        key = f"eval_{self.headline}"
        if key in logs:
            figure = f"validation {self.headline.replace('_', ' ')} {logs[key]:.3f}"
            self.say(f"step {state.global_step:5d}  loss {self.loss}  {figure}  {self.speed:,.0f} tokens/s")
            draw_curve(state.log_history, self.headline, self.curve)
