"""Tensors that never change, made once for each device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .library import watched


def constant(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """make(*key, device), kept: a call copies nothing to a device, and what inference mode made first serves gradients too.

    Who traces, transforms or captures gets one of its own, which belongs to the trace or the graph.
    """
    kept: dict[Any, Tensor] = {}

    def get(*key: Any, device: torch.device) -> Tensor:
        if watched():
            return make(*key, device)
        found = kept.get((key, device))
        if found is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return make(*key, device)
            with torch.inference_mode(False):
                found = kept[key, device] = make(*key, torch.device("cpu")).to(device)  # there when this returns, for every stream
        return found

    return get
