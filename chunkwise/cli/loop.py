"""Training: transformers' Trainer, told when to log, evaluate, save and stop by a budget of steps, minutes or both."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

from chunkwise.models.trainer import Trainer

from .curve import draw_curve
from .folder import COMPLETE, Folder
from .progress import Progress
from .recipe import Recipe
from .refusal import Failure

LOG_EVERY = 10  # steps; evaluations and checkpoints fall on these too, so a resumed run averages its losses over the same steps
PARTS = 5  # evaluations and checkpoints in a run
SAVE_SECONDS = 300  # no more than this is lost when a long run is killed
ENDLESS = 10_000_000  # steps of a run that is limited by time


class Budget(TrainerCallback):
    """When to log, evaluate, save and stop."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.spent = 0.0  # seconds before this process
        self.start = self.saved = time.monotonic()
        self.part = 0
        self.save_due = self.evaluation_due = False

    def seconds(self) -> float:
        return self.spent + time.monotonic() - self.start

    def share(self, step: int) -> float:
        """How much of the budget is used, 0 to 1."""
        by_steps = step / self.recipe.limit if self.recipe.limit else 0.0
        by_time = self.seconds() / (60 * self.recipe.minutes) if self.recipe.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.spent = next((e["seconds"] for e in reversed(state.log_history) if "seconds" in e), 0.0)
        self.start = self.saved = time.monotonic()
        self.part = int(PARTS * self.share(state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step, share = state.global_step, self.share(state.global_step)
        if share >= 1:
            control.should_log = control.should_evaluate = control.should_training_stop = True
            return
        part, every = int(PARTS * share), self.recipe.save_every
        self.evaluation_due |= part > self.part
        self.save_due |= step % every == 0 if every else part > self.part or time.monotonic() - self.saved > SAVE_SECONDS
        self.part = part
        if step % LOG_EVERY == 0:
            control.should_log, control.should_evaluate, control.should_save = True, self.evaluation_due, self.save_due
            self.evaluation_due = self.save_due = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log = control.should_evaluate = control.should_save = False  # the last step saw to them

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not math.isfinite((logs or {}).get("loss", 0.0)):
            raise Failure(f"the loss is {logs['loss']} at step {state.global_step}; a smaller --lr may help")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved = time.monotonic()


class Loop(Trainer):
    """A Trainer that takes its batches in order, its learning rate from the recipe and its evaluation from the task."""

    def __init__(
        self, model: Any, task: Any, recipe: Recipe, folder: Folder, device: str, tokenizer: Any = None, capture: bool = False
    ) -> None:
        arguments = TrainingArguments(
            output_dir=str(folder.path),
            max_steps=recipe.limit or ENDLESS,
            per_device_train_batch_size=recipe.batch,
            learning_rate=recipe.lr,
            weight_decay=recipe.weight_decay,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            seed=recipe.seed,
            use_cpu=device == "cpu",
            bf16=recipe.dtype == "bfloat16",
            fp16=recipe.dtype == "float16",
            logging_strategy="no",
            eval_strategy="no",
            save_strategy="no",
            save_total_limit=2,
            logging_nan_inf_filter=False,
            remove_unused_columns=False,
            dataloader_pin_memory=device == "cuda",
            disable_tqdm=True,
            report_to=[],
        )
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # one process trains on one GPU; DataParallel is never what is wanted
        super().__init__(
            model=model, args=arguments, train_dataset=task.train, data_collator=_stack, processing_class=tokenizer, capture=capture,
        )  # fmt: skip
        self.task, self.recipe = task, recipe
        self.budget = Budget(recipe)
        self.remove_callback(PrinterCallback)
        self.add_callback(self.budget)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)  # the data set is drawn at random already

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        def rate(step: int) -> float:
            return self.recipe.rate(step, self.budget.share(step))

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, rate)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        self.model.eval()
        metrics = {f"eval_{k}": v for k, v in self.task.evaluate(self.model, autocast=self.accelerator.autocast).items()}
        self.log(metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, "seconds": self.budget.seconds()}, start_time)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # The Trainer's own reads the configuration as transformers' base class, which refuses the names of our layers.
        load_model(self.model if model is None else model, Path(resume_from_checkpoint) / "model.safetensors")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        (Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}" / COMPLETE).touch()


def _stack(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def fit(
    model: Any, task: Any, recipe: Recipe, folder: Folder, device: str, tokenizer: Any = None, *, capture: bool = False
) -> dict[str, Any]:
    """Train `model` on `task`, from the folder's newest checkpoint if it has one; save model, curve and result, and return the result.
    capture: where the device is a GPU, steps go as CUDA graphs (`models.capture`)."""
    from torch.utils.tensorboard import SummaryWriter

    checkpoint = folder.checkpoint()
    loop = Loop(model, task, recipe, folder, device, tokenizer, capture and device == "cuda")
    curve = folder.path / "curve.png"
    start = int(checkpoint.name.rpartition("-")[2]) if checkpoint else None
    writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=start)
    loop.add_callback(TensorBoardCallback(writer))
    tokens = recipe.batch * len(task.train[0]["input_ids"])
    with Progress(loop.budget, task.headline, tokens, curve) as progress:
        if start is not None:
            progress.say(f"continuing from step {start}")
        loop.add_callback(progress)
        loop.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    draw_curve(loop.state.log_history, task.headline, curve)
    final = next(e for e in reversed(loop.state.log_history) if f"eval_{task.headline}" in e)
    result = {
        **{k.removeprefix("eval_"): v for k, v in final.items() if k.startswith("eval_")},
        "steps": loop.state.global_step,
        "seconds": loop.budget.seconds(),
        "tokens": loop.state.global_step * tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
        "history": [{k: v for k, v in e.items() if k not in ("epoch", "total_flos")} for e in loop.state.log_history],
    }
    folder.finish(model, tokenizer, result)
    return result
