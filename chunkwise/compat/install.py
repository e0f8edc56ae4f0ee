"""Module trees shaped as fla and causal_conv1d, put where `import fla` finds them. Built in memory: no file of either name is installed."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .. import __version__
from . import causal_conv1d, fla_index, fla_module
from .alias import Alias
from .fla_cache import Cache
from .fla_layer import LAYERS
from .fla_op import OPS, SHORT

FLA, CONV = "fla", "causal_conv1d"
VERSIONS = {FLA: "0.6.0", CONV: "1.5.0"}  # whose names these are

MODULES: dict[str, tuple[str, ...]] = {  # names of fla_module -> where fla has them, below fla
    "RMSNorm": ("modules", "modules.layernorm", "modules.norm.layernorm"),
    "rms_norm": ("modules.layernorm", "modules.norm.layernorm"),
    "FusedRMSNormGated": ("modules", "modules.fused_norm_gate", "modules.norm.fused_norm_gate"),
    "FusedRMSNormSwishGate": ("modules", "modules.fused_norm_gate", "modules.norm.fused_norm_gate"),
    "rms_norm_gated": ("modules.fused_norm_gate", "modules.norm.fused_norm_gate"),
    "L2Norm": ("modules", "modules.l2norm", "modules.norm.l2norm"),
    "l2norm": ("modules.l2norm", "modules.norm.l2norm"),
    "ShortConvolution": ("modules", "modules.convolution", "modules.conv", "modules.conv.short_conv", "modules.causal_conv1d"),
    "causal_conv1d": ("modules.convolution", "modules.conv", "modules.conv.causal_conv1d", "modules.causal_conv1d"),
    "causal_conv1d_update": ("modules.convolution", "modules.conv", "modules.conv.triton.ops", "modules.causal_conv1d"),
    "FusedCrossEntropyLoss": ("modules", "modules.fused_cross_entropy"),
    "FusedLinearCrossEntropyLoss": ("modules", "modules.fused_linear_cross_entropy"),
    "fused_kda_gate": ("ops.kda.gate",),
    "fused_gdn_gate": ("ops.gated_delta_rule.gate",),
}
PADDING = ("get_unpad_data", "index_first_axis", "index_put_first_axis", "pad_input", "unpad_input")


def surface() -> Iterator[tuple[str, Any]]:
    """(dotted path below fla, the object) of everything that the drop-in has. Layers and models are names of fla itself too."""
    for alias in OPS:
        function = alias.function()
        for name in (alias.name, *(short for short, full in SHORT.items() if full == alias.name)):
            for where in ("ops", *_above(alias), f"ops.{alias.folder}.{alias.file}"):
                yield f"{where}.{name}", function
    for name, places in MODULES.items():
        for where in places:
            yield f"{where}.{name}", getattr(fla_module, name)
    yield "modules.l2norm.l2_norm", fla_module.l2norm
    yield "modules.norm.l2norm.l2_norm", fla_module.l2norm
    for where in ("utils", "cache_utils"):
        yield f"models.{where}.Cache", Cache
    if models := _models():
        yield from models.places()
    for layer in LAYERS:
        made = layer.layer()
        yield layer.name, made
        yield f"layers.{layer.name}", made
        yield f"layers.{layer.file}.{layer.name}", made
    for name, function in vars(fla_index).items():
        if name in PADDING:
            yield f"layers.utils.{name}", function
        elif name.startswith(("prepare_", "get_")):
            yield f"ops.utils.{name}", function
            yield f"ops.utils.index.{name}", function


def _models() -> Any:
    """The page of fla's models, where transformers is there, of a version that chunkwise's models know."""
    try:
        from . import fla_model
    except ImportError:
        return None
    return fla_model


def _above(alias: Alias) -> Iterator[str]:
    parts = alias.folder.split(".")
    for i in range(len(parts)):
        yield ".".join(["ops", *parts[: i + 1]])


@dataclass
class Installation:
    """What `install_as_fla` put into sys.modules. `undo()`, or leaving the `with` block, puts back what was there."""

    modules: dict[str, ModuleType] = field(default_factory=dict)
    before: dict[str, ModuleType] = field(default_factory=dict)
    registered: list[str] = field(default_factory=list)  # model types, with transformers' Auto classes

    def undo(self) -> None:
        """Take out what is still ours. What has been imported from it goes on working."""
        for name, module in self.modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.modules.update(self.before)
        if self.registered and (models := _models()):
            models.forget(self.registered)
        self.modules, self.before, self.registered = {}, {}, []

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *error: Any) -> None:
        self.undo()


def install_as_fla(*, replace: bool = False, conv: bool = True) -> Installation:
    """Make `import fla` and `import causal_conv1d` find chunkwise: for code written for them, on CPU and GPU.

    Call it before that code is imported; transformers' models that are imported already take `patch_transformers`.

    Args:
        replace: take the place of the real packages where they are imported already; what has been imported from them stays theirs.
        conv: causal_conv1d too.

    Returns:
        the installation: `undo()` or a `with` block ends it. A second call finds it in place and changes nothing.

    Raises:
        ValueError: a real package of that name is imported already, and replace is not set.
    """
    roots = [FLA, CONV] if conv else [FLA]
    if all(is_ours(sys.modules.get(root)) for root in roots):
        return Installation()
    taken = [root for root in roots if root in sys.modules and not is_ours(sys.modules[root])]
    if taken and not replace:
        raise ValueError(
            f"install_as_fla: {' and '.join(taken)} is imported already: call it first, or pass replace=True (what has been imported stays)"
        )
    done = Installation()
    for name in [n for n in sys.modules if n.partition(".")[0] in roots]:
        done.before[name] = sys.modules.pop(name)
    for path, thing in surface():
        where, _, name = path.rpartition(".")
        setattr(_module(done, f"{FLA}.{where}" if where else FLA), name, thing)
    if models := _models():
        done.registered = models.register()
    if conv:
        for name in "causal_conv1d_fn", "causal_conv1d_update":
            setattr(_module(done, CONV), name, getattr(causal_conv1d, name))
            setattr(_module(done, f"{CONV}.causal_conv1d_interface"), name, getattr(causal_conv1d, name))
    sys.modules.update(done.modules)
    return done


def is_ours(module: ModuleType | None) -> bool:
    """Whether a module of sys.modules is one that `install_as_fla` made."""
    return getattr(module, "__chunkwise__", None) is not None


def _module(done: Installation, name: str) -> ModuleType:
    """The module of that name, with those above it. Has what import and find_spec look at."""
    if name in done.modules:
        return done.modules[name]
    module = done.modules[name] = ModuleType(name, f"The names of {name} that chunkwise has, computed by chunkwise.")
    root, _, _ = name.partition(".")
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = []  # nothing of a real package on disk is mixed in
    module.__spec__, module.__path__, module.__package__ = spec, [], name
    module.__version__ = f"{VERSIONS[root]}+chunkwise.{__version__}"  # type: ignore[attr-defined]
    module.__chunkwise__ = __version__  # type: ignore[attr-defined]
    above, _, last = name.rpartition(".")
    if above and not hasattr(_module(done, above), last):  # fla.modules.conv.causal_conv1d is a function and a submodule: the function wins
        setattr(_module(done, above), last, module)
    return module
