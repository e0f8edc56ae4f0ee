"""transformers' models that are imported already, handed over to chunkwise; packed documents kept apart where all of their layers can."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..nn.norm import GATES, rms_norm
from ..nn.packing import sequence_index
from .install import CONV, FLA, Installation, install_as_fla, is_ours

MODELS = "transformers.models."
PACKAGE = __name__.partition(".")[0]
BOUND = {"torch_function", "func_name", "package", "implementation"}  # what transformers' decorator holds in its closure
AXES = 3  # of positions in text, images and videos: time, height, width
PROVED = ("qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid", "lfm2", "bailing_hybrid")  # the tests of packing walk it
CACHES = ("cache", "past_key_values")  # transformers' names for the argument, newer and older


@dataclass
class Patch:
    """What `patch_transformers` changed. `undo()`, or leaving the `with` block, puts everything back; printed, it is the list.

    not_apart: the models in which packed documents go on reading one another, and why; they keep their own forward.
    """

    installation: Installation
    replaced: list[str] = field(default_factory=list)
    changes: list[tuple[Any, str, Any, Any]] = field(default_factory=list)  # owner, name, before, now
    not_apart: list[str] = field(default_factory=list)

    def change(self, owner: Any, name: str, now: Any, said: str) -> None:
        self.changes.append((owner, name, vars(owner)[name], now))
        setattr(owner, name, now)
        self.replaced.append(said)

    def undo(self) -> None:
        """Put back what is still as we left it, take our modules out of sys.modules, and let models that were imported meanwhile, and so
        bound our functions themselves, bind anew."""
        for owner, name, before, now in reversed(self.changes):
            if vars(owner).get(name) is now:
                setattr(owner, name, before)
        self.installation.undo()
        for module, name, binding in list(_left_over()):
            setattr(module, name, _bind(binding))
        self.changes, self.replaced, self.not_apart = [], [], []

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: Any) -> None:
        self.undo()

    def __str__(self) -> str:
        nothing = ["nothing to replace: no model that uses fla or causal_conv1d is imported, or all of them are on chunkwise already"]
        return "\n".join((self.replaced or nothing) + self.not_apart)


def patch_transformers(*, replace: bool = False) -> Patch:
    """Make transformers' models run on chunkwise, those imported already and, through `install_as_fla`, those imported later.

    Functions: whatever a model binds from fla and causal_conv1d. Output norms: root mean square norms with a gate become one pass.
    Models all of whose scans are of these packages: documents that a call packs into one row, told by
    `cu_seq_lens_q` or by `position_ids` that begin anew (without a cache), reach every layer: the convolutions and recurrences of the
    linear-attention layers, and, through position ids and without a cache, the mask of the attention layers. An attention_mask of ones
    beside them is taken off. Reading `position_ids` synchronises with a GPU once a call, reading a mask beside documents once more,
    `cu_seq_lens_q` never; under torch.compile position ids beside a mask are not read. Models with a scan of another package (Mamba's
    kinds: its documents would go on reading one another) are left as they are, and listed as not kept apart.

    Args:
        replace: take over from fla and causal_conv1d where they are imported already.

    Returns:
        the patch: print it for what was replaced; `undo()` or a `with` block ends it. Call it again after importing further models:
        those that bound our functions themselves would compile their own fallbacks under torch before 2.13.

    Raises:
        ValueError: the real fla or causal_conv1d is imported already and replace is not set; at the model's call, packed documents in
            more than one row, or cu_seq_lens_q beside an attention_mask that marks padding (under torch.compile, beside any).
    """
    patch = Patch(install_as_fla(replace=replace))
    made: dict[int, Callable[..., Any]] = {}
    for module in _imported():
        for name, binding, ours in list(_bound(module)):
            current = vars(module)[name]
            if id(current) not in made:
                made[id(current)] = _handed({**binding, "implementation": ours})
            said = f"{module.__name__}.{name} -> {binding['package']}.{binding['func_name']} of chunkwise"
            patch.change(module, name, made[id(current)], said)
        packages = {inner["package"]: inner["func_name"] for f in vars(module).values() if (inner := _binding(f))}
        if packages.keys() & {FLA, CONV}:
            for cls in _norms(module):
                patch.change(cls, "forward", _normed(cls.forward), f"{module.__name__}.{cls.__name__} -> chunkwise.nn.rms_norm")
            foreign = [f"{package}.{function}" for package, function in packages.items() if package not in (FLA, CONV)]
            proved = module.__name__.removeprefix(MODELS).partition(".")[0] in PROVED
            said = "packed documents kept apart" if proved else "packed documents handed to its layers, which nothing here has tested"
            for cls in _models(module):
                name = f"{module.__name__}.{cls.__name__}"
                if foreign:
                    patch.not_apart.append(f"{name}: packed documents NOT kept apart, its scan is not ours ({foreign[0]})")
                elif not hasattr(cls.forward, "__chunkwise_documents__"):
                    patch.change(cls, "forward", _documents(cls.forward), f"{name}: {said}")
    return patch


def _imported() -> list[ModuleType]:
    """transformers' models."""
    return [m for n, m in list(sys.modules.items()) if n.startswith(MODELS) and isinstance(m, ModuleType)]


def _left_over() -> Iterator[tuple[ModuleType, str, dict[str, Any]]]:
    """(module, name in it, its binding) of what transformers' decorator has bound to functions of ours that no import finds any more."""
    for module in _imported():
        for name, inner in _decorated(module):
            if not is_ours(sys.modules.get(inner["package"])):
                home = getattr(inner["implementation"], "__globals__", {}).get("__name__", "")
                if home.startswith(f"{PACKAGE}."):
                    yield module, name, inner


def _bind(binding: dict[str, Any]) -> Callable[..., Any]:
    """What transformers' decorator makes of a function now."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    return use_kernel_func_from_hub_with_fallback(binding["func_name"], binding["package"])(binding["torch_function"])


def _handed(binding: dict[str, Any]) -> Callable[..., Any]:
    """What transformers' decorator makes of a function, but that it goes to ours whatever happens. The decorator takes the fallback where
    somebody exports, and Dynamo of torch before 2.13 says yes to that whenever it compiles."""
    implementation = binding["implementation"]
    takes = tuple(inspect.signature(implementation).parameters)

    @functools.wraps(binding["torch_function"])
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return implementation(*args, **{n: x for n, x in kwargs.items() if n in takes})

    wrapped.__chunkwise_binding__ = binding  # type: ignore[attr-defined]
    return wrapped


def _binding(value: Any) -> dict[str, Any] | None:
    """What transformers' decorator, or ours, remembers of a function it bound to another package or to its fallback; else None."""
    while inspect.isfunction(value):
        if hasattr(value, "__chunkwise_binding__"):
            return value.__chunkwise_binding__
        inner = inspect.getclosurevars(value).nonlocals if value.__closure__ and "torch_function" in value.__code__.co_freevars else {}
        if BOUND <= inner.keys():
            return {n: inner[n] for n in BOUND}
        value = getattr(value, "__wrapped__", None)
    return None


def _decorated(module: ModuleType) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name in the module, its binding) of what is not handed to chunkwise."""
    for name, value in list(vars(module).items()):
        inner = None if hasattr(value, "__chunkwise_binding__") else _binding(value)
        if inner is not None:
            yield name, inner


def _bound(module: ModuleType) -> Iterator[tuple[str, dict[str, Any], Callable[..., Any]]]:
    """(name in the module, its binding, the function of chunkwise) of what is not yet handed to chunkwise."""
    for name, inner in _decorated(module):
        if is_ours(package := sys.modules.get(inner["package"])):
            ours = getattr(package, inner["func_name"], None) or _within_ops(inner["func_name"])
            if ours is not None:
                yield name, inner, ours


def _within_ops(function: str) -> Any:
    return getattr(sys.modules.get(f"{FLA}.ops"), function, None)


def _norms(module: ModuleType) -> Iterator[Any]:
    """The module's own root mean square norms that are gated after their weight: of that signature, and of those results; not yet ours."""
    for cls in list(vars(module).values()):
        forward = vars(cls).get("forward") if isinstance(cls, type) and cls.__module__ == module.__name__ else None
        if forward is None or hasattr(forward, "__chunkwise_norm__"):
            continue
        built, takes = (list(inspect.signature(f).parameters)[1:] for f in (cls.__init__, forward))
        if built[:2] == ["hidden_size", "eps"] and {*built[2:]} <= {"activation", "kwargs"} and takes == ["hidden_states", "gate"]:
            with torch.no_grad(), torch.device("cpu"):
                norm = cls(4, eps=0.5).float()
                if not (hasattr(norm, "weight") and hasattr(norm, "variance_epsilon")):
                    continue
                x = torch.arange(-4.0, 4.0, dtype=torch.float32).view(2, 4)
                norm.weight.copy_(x[1] + 1)
                if getattr(norm, "activation", None) in GATES and torch.allclose(norm(x, 3 - x), _normed(forward)(norm, x, 3 - x)):
                    yield cls


def _normed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def normed(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None:
            return forward(self, hidden_states, gate)
        return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon, gate=gate, activation=self.activation)

    normed.__chunkwise_norm__ = True  # type: ignore[attr-defined]
    return normed


def _models(module: ModuleType) -> Iterator[Any]:
    """The module's own text models: those that take token ids, positions and further keywords, and no pixels."""
    from transformers import PreTrainedModel

    for cls in list(vars(module).values()):
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__ and "forward" in vars(cls):
            takes = inspect.signature(vars(cls)["forward"]).parameters
            further = any(p.kind is p.VAR_KEYWORD for p in takes.values())
            if further and {"input_ids", "position_ids"} <= takes.keys() and "pixel_values" not in takes:
                yield cls


def _documents(forward: Callable[..., Any]) -> Callable[..., Any]:
    names = [n for n, p in inspect.signature(forward).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(forward)
    def packed(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names[1:], args)), **kwargs}
        further = _separate(given)
        return forward(self, **{**given, **further}) if further else forward(self, *args, **kwargs)

    packed.__chunkwise_documents__ = True  # type: ignore[attr-defined]
    return packed


def _separate(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are missing, or in the way, for documents to be kept apart; none where a row is one sequence."""
    cu, positions, mask = (given.get(n) for n in ("cu_seq_lens_q", "position_ids", "attention_mask"))
    if any(given.get(n) is not None for n in CACHES) or (mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2)):
        return {}
    further: dict[str, Any] = {}
    if cu is not None:
        if mask is not None and (torch.compiler.is_compiling() or not bool(mask.all())):
            raise ValueError("attention_mask beside cu_seq_lens_q: a packed row has no padding; leave attention_mask out")
    else:
        cu = None if positions is None else _offsets(positions, mask)
        if cu is None or (mask is not None and not bool(mask.all())):
            return {}
        longest = given["position_ids"].shape[-1] if torch.compiler.is_compiling() else int(cu.diff().max())
        further = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
    if mask is not None:
        further["attention_mask"] = None  # all ones: beside it, attention layers look for no documents
    x = given.get("inputs_embeds") if given.get("input_ids") is None else given.get("input_ids")
    if x is not None and given.get("seq_idx") is None:
        further["seq_idx"] = sequence_index(cu, x.shape[1]).int()[None]  # LFM2 of transformers 5.17 knows nothing else
    if x is not None and (positions is None or (positions.ndim == 3 and positions.shape[0] == AXES)):
        text = _within(cu, x.shape[1])
        further["position_ids"] = text if positions is None else torch.cat((text[None], positions))
    if given.get("use_cache") is None:
        further["use_cache"] = False
    return further


def _within(cu: Tensor, T: int) -> Tensor:
    """[1, T]: each token's place in its document."""
    token = torch.arange(T, device=cu.device)
    return (token - cu[sequence_index(cu, T)])[None]


def _offsets(positions: Tensor, mask: Tensor | None) -> Tensor | None:
    """[N + 1] int32 of the documents in positions, None where there is one a row.

    [B, T], or [4, B, T] whose first are a text's: a document begins wherever a position is not the one before it plus one; beside a mask,
    as for transformers itself, positions may be of any kind that rises. [3, B, T] (time, height, width): where all are 0, or time falls.
    """
    if positions.ndim == 3 and positions.shape[0] == AXES:
        new = (positions[0].diff(dim=1) < 0) | (positions[:, :, 1:] == 0).all(0)
    else:
        text = positions[0] if positions.ndim == 3 and positions.shape[0] == AXES + 1 else positions
        if text.ndim != 2:
            return None
        new = text.diff(dim=1) != 1 if mask is None else text.diff(dim=1) < 1
    B, T = positions.shape[-2:]
    traced = torch.compiler.is_compiling()
    if traced and (B != 1 or mask is not None):
        if mask is None:
            torch._assert_async(~new.any(), f"packed documents need one row: flatten the batch to B = 1, got B = {B}")
        return None
    begins = new.nonzero()
    if not traced and not len(begins):
        return None
    if B != 1 and mask is not None and not bool(mask.all()):  # padding repeats positions
        return None
    if B != 1:
        raise ValueError(f"packed documents need one row: flatten the batch to B = 1, got position_ids {list(positions.shape)}")
    ends = begins.new_tensor([0, T])
    return torch.cat((ends[:1], begins[:, 1] + 1, ends[1:])).int()
