"""Activations and feature maps by name: the one place that knows the names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def _elu_plus_one(x: Tensor) -> Tensor:
    """Positive features. Katharopoulos et al. Transformers are RNNs. ICML 2020."""
    return F.elu(x) + 1


def _identity(x: Tensor) -> Tensor:
    return x


_ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "elu_plus_one": _elu_plus_one,
    "identity": _identity,
}


def activation(name: str | None) -> Callable[[Tensor], Tensor]:
    """The elementwise function of that name; None is the identity.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    try:
        return _ACTIVATION["identity" if name is None else name]
    except KeyError:
        raise ValueError(f"activation must be None or one of {sorted(_ACTIVATION)}, got {name!r}") from None
