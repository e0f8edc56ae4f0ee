"""The layers of the family: one skeleton, and a page for each member, named as its operator."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from torch import nn

from ...spec import all_ops
from .skeleton import Mixer, MixerOptions, MixerState


@cache
def all_mixers() -> Mapping[str, type[Mixer]]:
    """Every operator that has a layer, by the operator's name."""
    found: dict[str, type[Mixer]] = {}
    for name in all_ops():
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            page = importlib.import_module(f"{__name__}.{name}")
            found[name] = next(x for x in vars(page).values() if isinstance(x, type) and issubclass(x, Mixer) and x is not Mixer)
    return MappingProxyType(found)


def mixer_class(name: str) -> type[Mixer]:
    """The layer of an operator.

    Raises:
        ValueError: no such layer, with those that there are.
    """
    if name not in all_mixers():
        raise ValueError(f"mixer must be one of {list(all_mixers())}, got {name!r}")
    return all_mixers()[name]


def parameters_without_decay(module: nn.Module) -> set[str]:
    """Names of the parameters that weight decay must spare: gate parameters, norms, biases and convolutions."""
    spared = {f"{prefix}{'.' if prefix else ''}{name}" for prefix, m in module.named_modules() for name in getattr(m, "keep_float32", ())}
    return {name for name, p in module.named_parameters() if name in spared or p.ndim != 2}


__all__ = ["Mixer", "MixerOptions", "MixerState", "all_mixers", "mixer_class", "parameters_without_decay"]
