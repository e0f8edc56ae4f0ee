"""transformers' Trainer with the decay groups of these models, whose steps may be replayed as CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from ..nn import parameters_without_decay
from .capture import Captured


class Trainer(transformers.Trainer):
    """Weight decay spares what `nn.parameters_without_decay` names; capture=True replays each step's passes as a CUDA graph (`Captured`).

    transformers' own Trainer goes by names ("bias", "norm") and would let the gates' A_log, and RWKV's mixtures and bonuses, decay.

    Raises:
        ValueError: capture with a model on no GPU, with more than one process, or with one that spreads batches over its GPUs.
    """

    def __init__(self, *args: Any, capture: bool = False, **options: Any):
        super().__init__(*args, **options)
        if capture and self.args.world_size > 1:
            raise ValueError(f"Trainer: capture is for one process, got {self.args.world_size}: a graph would not sum their gradients")
        if capture and self.args.n_gpu > 1:
            raise ValueError(f"Trainer: capture is for one GPU, got {self.args.n_gpu} that a batch is spread over (CUDA_VISIBLE_DEVICES)")
        self.captured = Captured(self.model, step=self._step) if capture else None

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        spared = parameters_without_decay(model)
        return [name for name, _ in model.named_parameters() if name not in spared]

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None) -> Tensor:
        if self.captured is None:
            return super().training_step(model, inputs, num_items_in_batch)
        if self.captured.model is not self.model:  # a search over settings has begun anew
            self.captured = Captured(self.model, step=self._step)
        model.train()
        self.stepped = model  # the model as accelerate has it
        if num_items_in_batch is not None:  # differs from step to step: a graph reads it where it reads the tokens
            num_items_in_batch = torch.as_tensor(num_items_in_batch, device=self.args.device)
        share = self.current_gradient_accumulation_steps
        return self.captured(items=num_items_in_batch, share=share, **self._prepare_inputs(inputs))

    def _step(self, items: Tensor | None, share: int, **inputs: Any) -> Tensor:
        return super().training_step(self.stepped, inputs, items)
