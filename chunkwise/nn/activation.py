"""Activations and feature maps by name: the one place that knows the names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F


def _elu_plus_one(x: Tensor) -> Tensor:
    """Positive features. Katharopoulos et al. Transformers are RNNs. ICML 2020."""
    return F.elu(x) + 1


def taylor(x: Tensor) -> Tensor:
    """The features of exp's Taylor series to second order: [..., D] -> [..., 1 + D + D * D], with

        taylor(q) . taylor(k) = 1 + z + z^2 / 2 >= 1 / 2,   z = q . k / sqrt(D)

    Zhang, Bhatia, Kumbong, Re. The Hedgehog & the Porcupine. ICLR 2024; Arora et al. Simple linear attention language models (Based). 2024.
    """
    z = x * x.shape[-1] ** -0.25
    pairs = (z[..., :, None] * z[..., None, :]).flatten(-2)
    return torch.cat((torch.ones_like(z[..., :1]), z, pairs * 2**-0.5), -1)


def dpfp(x: Tensor) -> Tensor:
    """Deterministic parameter-free projection, nu = 4: [..., D] -> [..., 8 D], products of r(x) = (relu(x), relu(-x)) with itself turned by
    1 to 4 places.

    Schlag, Irie, Schmidhuber. Linear Transformers Are Secretly Fast Weight Programmers. ICML 2021.
    """
    r = torch.cat((x.relu(), (-x).relu()), -1)
    return torch.cat([r * r.roll(places, -1) for places in (1, 2, 3, 4)], -1)


def _squared_relu(x: Tensor) -> Tensor:
    """So et al. Primer. NeurIPS 2021."""
    return F.relu(x).square()


def _identity(x: Tensor) -> Tensor:
    return x


_ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "sqrelu": _squared_relu,
    "sigmoid": torch.sigmoid,
    "elu_plus_one": _elu_plus_one,
    "identity": _identity,
}

_FEATURE = {**_ACTIVATION, "taylor": taylor, "dpfp": dpfp}


def activation(name: str | None) -> Callable[[Tensor], Tensor]:
    """The elementwise function of that name; None is the identity.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    return _named("activation", _ACTIVATION, name)


def feature_map(name: str | None) -> Callable[[Tensor], Tensor]:
    """The map of that name from queries and keys [..., K] to features: an activation, "taylor" with 1 + K + K * K features, or "dpfp" with
    8 * K.

    Positive ones (elu_plus_one, relu, sigmoid, dpfp, taylor's products) are what normalised linear attention needs.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    return _named("feature_map", _FEATURE, name)


def _named(kind: str, table: Mapping[str, Callable[[Tensor], Tensor]], name: str | None) -> Callable[[Tensor], Tensor]:
    try:
        return table["identity" if name is None else name]
    except KeyError:
        raise ValueError(f"{kind} must be None or one of {sorted(table)}, got {name!r}") from None
