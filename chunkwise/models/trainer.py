"""transformers' Trainer with the decay groups of these models."""

from __future__ import annotations

from typing import Any

import transformers

from ..nn import parameters_without_decay


class Trainer(transformers.Trainer):
    """Weight decay spares what `nn.parameters_without_decay` names.

    transformers' own Trainer goes by names ("bias", "norm") and would let the gates' A_log, and RWKV's mixtures and bonuses, decay.
    """

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        spared = parameters_without_decay(model)
        return [name for name, _ in model.named_parameters() if name not in spared]
