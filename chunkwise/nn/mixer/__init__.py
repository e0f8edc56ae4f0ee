"""The layers of the family: one skeleton, and a page for each member, named as its operator."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from torch import nn

from ...spec import all_ops, public_functions
from .layer import Depth, Mixer, MixerState
from .skeleton import MixerOptions


@cache
def all_mixers() -> Mapping[str, type[Mixer]]:
    """Every operator that has a layer, by the operator's name."""
    found: dict[str, type[Mixer]] = {}
    scans = (n for n, f in public_functions().items() if vars(f)["__chunkwise_op__"] is None)  # public, and outside the pipeline
    for name in sorted((*all_ops(), *scans)):
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            page = importlib.import_module(f"{__name__}.{name}")
            found[name] = next(x for x in vars(page).values() if _made_here(x, page.__name__))
    return MappingProxyType(found)


def _made_here(x: object, page: str) -> bool:
    return isinstance(x, type) and issubclass(x, Mixer) and x.__module__ == page


def mixer_class(name: str) -> type[Mixer]:
    """The layer of an operator.

    Raises:
        ValueError: no such layer, with those that there are.
    """
    if name not in all_mixers():
        raise ValueError(f"mixer must be one of {list(all_mixers())}, got {name!r}")
    return all_mixers()[name]


def parameters_without_decay(module: nn.Module) -> set[str]:
    """Names of the parameters that weight decay must spare: the mixers' own (gates, mixtures, bonuses), what a module names in
    `spare_decay`, norms and biases. Matrices and convolutions decay."""
    spared = {name for name, p in module.named_parameters() if p.ndim < 2}
    for prefix, m in module.named_modules():
        own = [name for name, _ in m.named_parameters(recurse=False)] if isinstance(m, Mixer) else getattr(m, "spare_decay", ())
        spared |= {f"{prefix}{'.' if prefix else ''}{name}" for name in own}
    return spared


__all__ = ["Depth", "Mixer", "MixerOptions", "MixerState", "all_mixers", "mixer_class", "parameters_without_decay"]
