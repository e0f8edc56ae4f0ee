"""Layers and the modules they are made of. Needs torch alone."""

from __future__ import annotations

from typing import Any

from .activation import activation, feature_map
from .channel_mix import ChannelMix
from .conv import ShortConvolution, causal_conv1d, causal_conv1d_update
from .linear import Linear, adopt_linear
from .loss import cross_entropy, linear_cross_entropy
from .mixer import Depth, Mixer, MixerState, all_mixers, mixer_class, parameters_without_decay
from .mlp import GatedMLP, glu, swiglu
from .norm import (
    GatedLayerNorm,
    GatedRMSNorm,
    GroupNorm,
    LayerNorm,
    RMSNorm,
    add_layer_norm,
    add_rms_norm,
    l2norm,
    layer_norm,
    rms_norm,
)
from .packing import Packing, plan_packing
from .rotary import rotary
from .shift import token_shift

__all__ = [
    "ChannelMix",
    "Depth",
    "GatedLayerNorm",
    "GatedMLP",
    "GatedRMSNorm",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "Mixer",
    "MixerState",
    "Packing",
    "RMSNorm",
    "ShortConvolution",
    "activation",
    "adopt_linear",
    "add_layer_norm",
    "add_rms_norm",
    "all_mixers",
    "causal_conv1d",
    "causal_conv1d_update",
    "cross_entropy",
    "feature_map",
    "glu",
    "l2norm",
    "layer_norm",
    "linear_cross_entropy",
    "mixer_class",
    "parameters_without_decay",
    "plan_packing",
    "rms_norm",
    "rotary",
    "token_shift",
    "swiglu",
]


def __getattr__(name: str) -> Any:
    """The layer classes by their own names (`GatedDeltaNet`, ...), found on their pages."""
    for mixer in all_mixers().values():
        if mixer.__name__ == name:
            return mixer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(mixer.__name__ for mixer in all_mixers().values())})
