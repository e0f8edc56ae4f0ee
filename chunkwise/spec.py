"""What a member of the family declares about itself, and nothing else."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, wraps
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, get_type_hints

import torch
from torch import Tensor

from .draw import normal
from .number import is_number, is_whole, is_yes_or_no

Output = tuple[Tensor, Tensor | None]


class Gate(StrEnum):
    """How the state forgets between two tokens; g is the natural logarithm of the forget factor."""

    NONE = "none"  # not at all
    HEAD = "head"  # a constant per head          g: [HV]
    SCALAR = "scalar"  # one number per token, head   g: [B, T, HV]
    KEY = "key"  # one number per key channel   g: [B, T, HV, K]
    VALUE = "value"  # one number per value channel g: [B, T, HV, V]


class Rule(StrEnum):
    """How a token is written into the state."""

    ADD = "add"  # S += k v'
    DELTA = "delta"  # S += k (beta (v - S'e))'
    DPLR = "dplr"  # S += b (S_prev' a)' + k v'


class Form(StrEnum):
    """How the recurrence is evaluated; the result is the same function."""

    AUTO = "auto"
    CHUNK = "chunk"  # chunk by chunk, matrix products inside
    FUSED_CHUNK = "fused_chunk"  # the same with nothing stored per chunk in the forward pass
    RECURRENT = "recurrent"  # token by token
    PARALLEL = "parallel"  # the whole sequence as one chunk: quadratic in T


# Of the parallel form on a GPU, and of a bonus, which comes with such gates.
BY_CHUNKS = "gates per channel decay every channel of a pair of tokens by itself, so on a GPU pairs meet inside chunks alone"
PREFIX = {Form.CHUNK: "chunk", Form.FUSED_CHUNK: "fused_chunk", Form.RECURRENT: "fused_recurrent", Form.PARALLEL: "parallel"}


class Streams(NamedTuple):
    """The engine's input: every member is lowered to these."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor | None = None  # by Gate
    beta: Tensor | None = None  # [B, T, HV]; delta: None writes with strength one
    a: Tensor | None = None  # [B, T, H or HV, K]; reads the state before the token forgets (dplr; delta: the key that erases, in k's place)
    b: Tensor | None = None  # [B, T, H or HV, K]; dplr: writes what a has read
    e: Tensor | None = None  # [B, T, H or HV, K]; delta: the key that erases after the token forgets, when it is not k
    u: Tensor | None = None  # [HV, K]; q reads before the write, plus this bonus on the token's own pair


class Raw(NamedTuple):
    """What is still to be done to a token's streams, by the kernel that takes one token after the other."""

    norm: bool = False  # q and k to unit length
    norm_erase: bool = False  # and the erase key
    A_log: Tensor | None = None  # [HV]: g is raw; with dt_bias [HV] or, per key channel, [HV * K]
    dt_bias: Tensor | None = None
    lower_bound: float | None = None
    sigmoid: bool = False  # beta is raw
    strength: float = 1.0  # multiplies beta
    rate: Tensor | None = None  # [HV]: g is a time step dt, to which dt_bias is added: forgets e^(rate dt), writes dt v
    softplus: bool = False  # dt is softplus of that
    skip: Tensor | None = None  # [HV]: o + skip v
    keys: bool = False  # k is what the gate leaves over, 1 - e^g
    erases: bool = False  # e multiplies k
    writes: Tensor | None = None  # [B, T, HV, V]: multiplies v
    memory: str = ""  # what a state is besides [K, V]: a column "sum" of all keys, by which o is divided; a column "seen" of what keys
    # have seen, by which those that write are rescaled; "slots": one memory of keys and one of values, a softmax between them, beta
    # [B, T, HV, M] the strengths of slots, or without g their logits
    g_seen: Tensor | None = None  # [B, T, H]: log decay
    beta_seen: Tensor | None = None  # [B, T, H]: strength
    centre: Tensor | None = None  # [H]; None: `middle`
    middle: float = 0.0
    most: float = 1.0  # the largest rescaling
    eps: float = 0.0  # added to the column, or to what is divided by

    @property
    def activation(self) -> str:
        """Of raw gates, as kernels know it (kernels/ready.py); "" where gates are log decays."""
        return "" if self.A_log is None else "softplus" if self.lower_bound is None else "bounded"

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple([getattr(self, n) for n in RAW_TENSORS])

    def place(self, tensors: Sequence[Tensor | None]) -> Raw:
        """The same with other tensors."""
        mine: dict[str, Any] = dict(zip(RAW_TENSORS, tensors))
        return self._replace(**mine)


NOTHING = Raw()
RAW_TENSORS = ("A_log", "dt_bias", "rate", "skip", "writes", "g_seen", "beta_seen", "centre")


class PlainOptions(TypedDict, total=False):
    """Keyword arguments shared by every public function; documented once, here."""

    scale: float | None  # multiplies q; default K ** -0.5, unless the page says otherwise
    initial_state: Tensor | None  # [N, HV, K, V], any floating dtype, computed in float32 (float64 for float64 inputs)
    output_final_state: bool  # return the state after the last token of each sequence
    cu_seqlens: Tensor | None  # [N + 1] int32 or int64: offsets of sequences packed into one row (B = 1)
    cu_seqlens_cpu: Tensor | None  # the same on the CPU: spares a device-to-host copy where one would be needed
    state_v_first: bool  # states are [N, HV, V, K]
    chunk_size: int  # 16, 32 or 64, of the algorithm, never of the function: on a CPU forward passes over large states take shorter ones
    precision: str  # float32 products on a GPU: "ieee" or "tf32"
    backend: str  # "auto", "torch" or "triton"
    form: str  # a Form; only on the short names


class Options(PlainOptions, total=False):
    """Those of members whose queries and keys are commonly normalised."""

    use_qk_l2norm_in_kernel: bool  # q and k (and comba's p) divided by sqrt(sum of squares + 1e-6)


class InverseOptions(PlainOptions, total=False):
    """Those of members that correct what they write: their chunk form inverts a triangle a chunk.

    Kernels make that inverse of products of float32 numbers, of all digits ("ieee", 24 bits), 22 ("tf32x3"), 16 ("bf16x3"), 11 ("tf32")
    or 8 ("bf16"); "auto": as `precision` says, of 16-bit inputs 16 bits. Outputs of float32, of random keys and of nearly parallel ones,
    are off by 2e-7 and 4e-7, 2e-7 and 7e-7, 1e-6 and 2e-5, 1e-4 and 8e-4, 3e-4 and 5e-3; those of bfloat16 by 4e-3 and 1e-2 whatever is
    chosen, as the inverse is stored in it ("bf16" 1.3e-2 of the latter). docs/facts/kernels.md has all errors and times.
    The recurrent form has no inverse, and on a CPU it is made in the type that everything is computed in: there the choice changes nothing.
    """

    inverse_precision: str


class DeltaOptions(Options, InverseOptions, total=False):
    """Both."""


class RawGateOptions(DeltaOptions, total=False):
    """Further keyword arguments of members whose layers hand over raw gates."""

    use_gate_in_kernel: bool  # g is raw: g = -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias))
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV], or [HV * K] for gates per key channel
    lower_bound: float | None  # a negative number: the bounded gate above


class GateOptions(RawGateOptions, total=False):
    """And raw write strengths."""

    use_beta_sigmoid_in_kernel: bool  # beta is raw: beta = sigmoid(beta)
    allow_neg_eigval: bool  # with the sigmoid: beta = 2 sigmoid(beta)


DEFAULTS: Mapping[str, Any] = MappingProxyType(
    dict(
        scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None,
        use_qk_l2norm_in_kernel=False, state_v_first=False, chunk_size=64, precision="ieee", inverse_precision="auto",
        backend="auto", form="auto",
        use_gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    )
)  # fmt: skip


NUMBERS = frozenset({"scale", "lower_bound"})  # of these, or None


@dataclass(frozen=True)
class Arg:
    """One input: its axes, how to draw a valid random one, whether None is allowed, whether its dtype is free (gates)."""

    axes: str
    draw: Callable[..., Tensor] = normal
    optional: bool = False
    free_dtype: bool = False

    @property
    def per_token(self) -> bool:
        return self.axes.startswith("B T")


def extent(axis: str, sizes: Mapping[str, int]) -> int:
    """The size of an axis: a letter, a number, or a sum of them (`V+1`)."""
    return sum(int(x) if x.isdigit() else sizes[x] for x in axis.split("+"))


EXTRA_SIZES = MappingProxyType({"M": 6, "R": 2})  # drawn sizes of axes that few members have: slots, Householder steps a token


@dataclass(frozen=True, eq=False)
class Op:
    """A member of the family. `step` is its definition, `lower` its translation; they share no code, so tests can compare them."""

    name: str
    gate: Gate
    rule: Rule
    paper: str
    args: Mapping[str, Arg]
    step: Callable[..., tuple[Tensor, Tensor]]  # one token, straight from the paper: (S, **inputs of the token) -> (S, o)
    lower: Callable[..., Streams] | None  # member arguments -> engine streams; None: `passes` makes them
    options: type = Options
    parallel: bool = False  # has a quadratic form
    settings: Mapping[str, Any] = field(default_factory=dict)  # own plain parameters with their defaults; `step` and `lower` get them
    fault: Callable[..., str] = lambda **_: ""  # what is wrong with settings of these values
    scale: float | None = None  # default of the option; None: K ** -0.5
    query: str = "q"  # the input that `scale` multiplies
    passes: Callable[..., Output] | None = None  # for members that are not one pass of the engine over `lower`: see engine/scan.py
    raw: Callable[..., tuple[Streams, Raw]] | None = None  # where `lower` or `passes` computes: streams for a kernel that does so itself
    state: str = "N HV K V"  # axes of the state
    empty: Callable[[Tensor], Tensor] = lambda zeros: zeros  # the state that means "nothing yet", from zeros
    valid: Callable[[Tensor], Tensor] = lambda random: random  # a state that may occur, from a random tensor
    couple: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda x: x  # random inputs -> as real layers couple them
    defaults: Mapping[str, Any] = field(init=False)  # the options this member takes, with their defaults
    forms: tuple[Form, ...] = field(init=False)  # this member has, in the order of their public functions
    _wanted: Mapping[str, tuple[tuple[str, ...], bool, bool]] = field(init=False, repr=False)  # see __post_init__
    _call: Callable[..., Output] = field(init=False, repr=False)  # the engine's, looked up once

    def __post_init__(self) -> None:
        from .engine.call import call  # it needs this page

        object.__setattr__(self, "_call", call)
        taken = {n: d for n, d in DEFAULTS.items() if n in self.options.__annotations__}
        object.__setattr__(self, "defaults", {**self.settings, **taken})
        object.__setattr__(self, "forms", tuple(f for f in PREFIX if f is not Form.PARALLEL or self.parallel))
        # what every call looks up: an input's axes, whether it may be None, whether its dtype is free
        object.__setattr__(self, "_wanted", {n: (tuple(a.axes.split()), a.optional, a.free_dtype) for n, a in self.args.items()})
        if self.query not in self.args:
            raise ValueError(f"{self.name}: declares no input {self.query}, which scale multiplies")
        if self.lower is None and self.passes is None:
            raise ValueError(f"{self.name}: must declare lower or passes")
        if len(self.state.split()) != 4:
            raise ValueError(f"{self.name}: state must have four axes, got {self.state!r}")

    def draw(self, sizes: Mapping[str, int], seed: int = 0, coupled: bool = True, **kw: Any) -> dict[str, Tensor]:
        """Random inputs of the given sizes (letters of the axes). Who changes them first couples them afterwards: coupled=False."""
        torch.manual_seed(seed)
        sizes = {**EXTRA_SIZES, **sizes}
        x = {n: a.draw(*(sizes[x] for x in a.axes.split()), **kw) for n, a in self.args.items()}
        return self.couple(x) if coupled else x

    def state_shape(self, sizes: Mapping[str, int], N: int) -> tuple[int, ...]:
        """Shape of the state of N sequences."""
        sizes = {**EXTRA_SIZES, "HV": sizes.get("H", 1), **sizes, "N": N}
        return tuple([sizes[x] if x in sizes else extent(x, sizes) for x in self.state.split()])

    def draw_state(self, sizes: Mapping[str, int], N: int, **kw: Any) -> Tensor:
        """A random state that may occur."""
        return self.valid(torch.randn(self.state_shape(sizes, N), **kw))

    def empty_state(self, sizes: Mapping[str, int], N: int, **kw: Any) -> Tensor:
        """The state that `initial_state=None` means."""
        return self.empty(torch.zeros(self.state_shape(sizes, N), **kw))

    def check(self, inputs: Mapping[str, Tensor | None]) -> dict[str, int]:
        """Bind axis letters to sizes. Raises TypeError or ValueError naming the op, the argument, what is wanted and what was given."""
        sizes: dict[str, int] = {}
        dtype = device = None
        for name, t in inputs.items():
            axes, optional, free_dtype = self._wanted[name]
            if t is None and optional:
                continue
            if not isinstance(t, Tensor):
                raise TypeError(f"{self.name}: {name} must be a tensor [{', '.join(axes)}], got {type(t).__name__}")
            other = t.dtype is not dtype
            if other and not t.is_floating_point():
                raise TypeError(f"{self.name}: {name} must have a floating dtype, got {t.dtype}")
            if device is None:
                first, dtype, device = name, t.dtype, t.device
            elif other and not free_dtype:
                raise TypeError(f"{self.name}: {name} must have {first}'s dtype {dtype}, got {t.dtype}")
            if t.device != device:
                raise ValueError(f"{self.name}: {name} is on {t.device}, {first} is on {device}")
            shape = t.shape
            fits = len(shape) == len(axes)
            for x, size in zip(axes, shape):
                fits = fits and sizes.setdefault(x, size) == size
            if not fits:
                raise ValueError(f"{self.name}: {name} must be {self._shape(inputs, name)}, got {list(shape)}")
        for x in "H", "HV", "K", "V":
            if x in sizes and sizes[x] < 1:
                name = self._binds(inputs, x)
                raise ValueError(f"{self.name}: {name} must have {x} >= 1, got {list(inputs[name].shape)}")  # type: ignore[union-attr]
        if sizes.get("HV", 1) % sizes.get("H", 1):
            name = self._binds(inputs, "HV")
            raise ValueError(f"{self.name}: {name} must have a multiple of H={sizes['H']} heads, got HV={sizes['HV']}")
        return sizes

    def check_settings(self, options: Mapping[str, Any]) -> None:
        """Raises TypeError or ValueError naming the setting, or the option that is a number or yes or no, that does not fit."""
        for name, default in self.defaults.items():
            x = options.get(name, default)
            if isinstance(default, bool):
                if not is_yes_or_no(x):
                    raise TypeError(f"{self.name}: {name} must be True or False, got {x!r}")
            elif name in self.settings or name in NUMBERS and x is not None:
                whole = type(default) is int
                if not is_number(x) or whole and not is_whole(x):
                    raise TypeError(f"{self.name}: {name} must be a {'whole ' if whole else ''}number, got {x!r}")
        mine = {n: options[n] for n in self.settings}
        if found := self.fault(**mine):
            raise ValueError(f"{self.name}: {found}")

    def _binds(self, inputs: Mapping[str, Tensor | None], axis: str) -> str:
        """The first input that has an axis."""
        return next(n for n, t in inputs.items() if t is not None and axis in self._wanted[n][0])

    def _shape(self, inputs: Mapping[str, Tensor | None], name: str) -> str:
        """An input's axes, and the sizes that earlier ones have given them."""
        axes = self._wanted[name][0]
        bound: dict[str, str] = {}
        for n, t in inputs.items():
            if n == name:
                break
            for x, size in zip(self._wanted[n][0], () if t is None else t.shape):
                bound.setdefault(x, f"{x}={size} (from {n})")
        known = ", ".join(bound[x] for x in axes if x in bound)
        return f"[{', '.join(axes)}]{known and ' with ' + known}"

    def whole(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All options of a call, from those that were given. Raises TypeError for one that this member does not take."""
        if not options.keys() <= self.defaults.keys():
            unknown = min(options.keys() - self.defaults.keys())
            raise TypeError(f"{self.name}: unexpected keyword {unknown!r}; it takes {', '.join(self.defaults)}")
        return {**self.defaults, **options}

    def __call__(self, inputs: Mapping[str, Tensor | None], **options: Any) -> Output:
        """The function of `inputs` by name; one that is left out is None."""
        if len(inputs) < len(self.args):
            inputs = {**dict.fromkeys(self.args), **inputs}
        return self._call(self, inputs, options)

    def publish(self, short: Callable[..., Output]) -> tuple[Callable[..., Output], ...]:
        """Give `short` its whole signature, real and named, for those that read signatures; make the functions of the single forms."""
        tensors = [p for p in inspect.signature(short).parameters.values() if p.kind is not p.VAR_KEYWORD]
        hints = {**{n: type(d) for n, d in self.settings.items()}, **get_type_hints(self.options)}
        own = {p.name for p in tensors}
        further = {n: d for n, d in self.defaults.items() if n not in own}
        named = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=hints[n]) for n, d in further.items()]
        short.__signature__ = inspect.Signature([*tensors, *named], return_annotation=Output)  # type: ignore[attr-defined]
        short.__chunkwise_op__ = self  # type: ignore[attr-defined]
        return tuple(self._form(short, f, [*tensors, *(p for p in named if p.name != "form")]) for f in self.forms)

    def _form(self, short: Callable[..., Output], form: Form, parameters: list[inspect.Parameter]) -> Callable[..., Output]:
        @wraps(short)
        def function(*tensors: Tensor, **options: Any) -> Output:
            if "form" in options:
                raise TypeError(f"{function.__name__}: unexpected keyword 'form'; its form is {form.value!r}")
            return short(*tensors, form=form.value, **options)

        function.__name__ = function.__qualname__ = f"{PREFIX[form]}_{short.__name__}"
        note = f": {BY_CHUNKS}" if form is Form.PARALLEL and self.gate in (Gate.KEY, Gate.VALUE) else ""
        function.__doc__ = f"`{short.__name__}` in its {form.value} form{note}.\n\n    {short.__doc__}"
        function.__signature__ = inspect.Signature(parameters, return_annotation=Output)  # type: ignore[attr-defined]
        return function


@cache
def _pages() -> tuple[Any, ...]:
    ops = importlib.import_module(".ops", __package__)

    return tuple(importlib.import_module(f"{ops.__name__}.{m.name}") for m in pkgutil.iter_modules(ops.__path__))


@cache
def all_ops() -> Mapping[str, Op]:
    """Every member found in chunkwise.ops: the one list that tests, benchmarks, docs, models and the CLI walk."""
    found = {x.name: x for page in _pages() for x in vars(page).values() if isinstance(x, Op)}
    return MappingProxyType(dict(sorted(found.items())))


@cache
def public_functions() -> Mapping[str, Callable[..., Output]]:
    """Every public function by its name: `gla`, `chunk_gla`, ..."""
    found = {n: x for page in _pages() for n, x in vars(page).items() if callable(x) and hasattr(x, "__chunkwise_op__")}
    return MappingProxyType(dict(sorted(found.items())))
