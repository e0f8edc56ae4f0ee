"""What a training run is made of: recorded in its folder, so that a resumed run is the same run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from .refusal import Refusal, refusing

DEFAULT_STEPS = 1000
SCHEDULES = ("cosine", "wsd")
DTYPES = ("float32", "bfloat16", "float16")
MOST = 2**31 - 1  # of a count: a product of two is still a whole number to PyTorch
DECAY_FROM = 0.8  # wsd: the learning rate is constant up to this share of the budget


@dataclass(frozen=True)
class Recipe:
    """Model, budget and optimiser of a run; `task` holds what else the command was told (texts and tokenizer, or a task and its sizes)."""

    mixer: str
    layers: int
    width: int
    heads: int
    batch: int
    lr: float
    steps: int | None = None
    minutes: float | None = None
    warmup: int = 50
    schedule: str = "cosine"
    weight_decay: float = 0.1
    dtype: str = "float32"
    seed: int = 0
    threads: int = 0
    save_every: int | None = None
    task: dict[str, Any] = field(default_factory=dict)

    @property
    def limit(self) -> int | None:
        """The steps of the run; None where it is limited by time alone."""
        return self.steps if self.steps or self.minutes else DEFAULT_STEPS

    def check(self, device: str) -> None:
        """Refuse values that no run can have, each by the name of its option."""
        for name in "layers", "width", "heads", "batch", "steps", "save_every":
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST:
                raise Refusal(f"--{name.replace('_', '-')} must be at least 1{'' if value < 1 else f' and at most {MOST}'}, got {value}")
        for name in "lr", "minutes":
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise Refusal(f"--{name} must be a positive number, got {value}")
        for name in "warmup", "weight_decay", "seed":
            check_size(name, getattr(self, name))
        for name, allowed in ("schedule", SCHEDULES), ("dtype", DTYPES):
            if getattr(self, name) not in allowed:
                raise Refusal(f"--{name} must be one of {', '.join(allowed)}, got {getattr(self, name)}")
        if self.width % self.heads:
            raise Refusal(f"--width must be a multiple of --heads, got {self.width} and {self.heads}")
        if self.dtype == "float16" and device == "cpu":
            raise Refusal("--dtype float16 needs a GPU; on a CPU take bfloat16 or float32")

    def rate(self, step: int, share: float) -> float:
        """The learning rate after `step` steps and this `share` of the budget, as a factor of `lr`."""
        warmup = min(self.warmup, self.limit // 10) if self.limit else self.warmup
        start = min(1.0, (step + 1) / (warmup + 1))
        if self.schedule == "cosine":
            return start * 0.5 * (1 + math.cos(math.pi * share))
        return start * min(1.0, (1 - share) / (1 - DECAY_FROM))


def check_size(name: str, value: float) -> None:
    if not 0 <= value < 2**32:
        raise Refusal(f"--{name.replace('_', '-')} must not be negative or huge, got {value}")


def choose_device(device: str) -> str:
    """ "cpu" or "cuda" for "auto", "cpu" or "cuda"."""
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise Refusal(f"--device must be auto, cpu or cuda, got {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda: PyTorch sees no GPU here")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def choose_threads(threads: int) -> int:
    """Have PyTorch use so many threads, 0 for its own choice, and return their number, on which the last bits of sums depend."""
    import torch

    if not 0 <= threads <= 1024:
        raise Refusal(f"--threads must be between 0 and 1024, got {threads}")
    if threads:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def parse_mixer(text: str) -> tuple[str, dict[str, Any]]:
    """("gla", {"expand_k": 1}) from "gla:expand_k=1": a mixer and fields of the configuration, more of them after commas."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for field_text in rest.split(",") if rest else []:
        key, equals, value = field_text.partition("=")
        if not equals or not key.isidentifier():
            raise Refusal(f"--mixer must be NAME or NAME:FIELD=VALUE,..., got {text}")
        try:
            options[key] = json.loads(value)
        except ValueError:  # no JSON, or more digits than Python reads
            options[key] = value
    return name, options


def build_model(recipe: Recipe, vocab: int) -> Any:
    """The model of the recipe with weights drawn from its seed."""
    import torch
    from huggingface_hub.errors import StrictDataclassError

    from chunkwise.models import ChunkwiseConfig, ChunkwiseForCausalLM

    mixer, options = parse_mixer(recipe.mixer)
    own = dict(mixer=mixer, hidden_size=recipe.width, num_hidden_layers=recipe.layers, num_heads=recipe.heads, vocab_size=vocab)
    own |= dict(bos_token_id=None, eos_token_id=None)
    if taken := sorted(own.keys() & options.keys()):
        raise Refusal(f"--mixer cannot set {taken[0]}, which the command's other options decide")
    with refusing(ValueError, TypeError, OverflowError, StrictDataclassError):
        config = ChunkwiseConfig(**own, **options)
        torch.manual_seed(recipe.seed)
        return ChunkwiseForCausalLM(config)
