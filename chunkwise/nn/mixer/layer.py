"""What every layer of the family is: operands from the input, one operator, an output from what it read; state in, state out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from ...engine.library import direct
from ...engine.problem import given
from ...spec import PREFIX, Form, Op, all_ops
from ..boundary import check_tensors
from ..conv import ShortConvolution
from ..joint import convolve, plain
from ..packing import Packing, plan_packing
from ..shift import token_shift

FORM = {prefix: form for form, prefix in PREFIX.items()}  # mode -> form
SHORT = 16  # outside training, calls of at most this many tokens take the recurrent form: beyond, a chunk is faster on CPUs too
PLACE = ("layer_idx", "num_layers", "first")  # keyword arguments by which a member is told where in the stack it stands


class CallOptions(TypedDict, total=False):
    """Keyword arguments that every mixer takes."""

    mode: str  # "chunk", "fused_chunk", "fused_recurrent" or "parallel", where the member has that form
    chunk_size: int  # 16, 32 or 64
    norm_eps: float


class MixerState(NamedTuple):
    """What a layer remembers of N sequences: of constant size however long they are."""

    conv: Tensor | None  # [N, channels, W - 1]: the last inputs of the convolutions, or of the token shift (W = 2)
    recurrent: Tensor  # [N, HV, K, V] (the operator's `state` axes) float32 (float64 for float64 layers)
    seen: Tensor  # [N] int64: tokens so far, padding not counted
    mlp: Tensor | None = None  # [N, D, 1]: the last input of the feed-forward layer after it, where that one looks back

    def select(self, index: Tensor) -> MixerState:
        """The states of the sequences `index` [M]: beams, batch selection."""
        return self._map(lambda x: x.index_select(0, index.to(x.device)))

    def to(self, device: torch.device | str) -> MixerState:
        return self._map(lambda x: x.to(device))

    def _map(self, move: Callable[[Tensor], Tensor]) -> MixerState:
        return MixerState(*(None if x is None else move(x) for x in self))  # type: ignore[arg-type]


@dataclass
class Depth:
    """What a layer gets from the stack below it, and may leave for the layers above."""

    floor: Tensor | None = None  # [channels of the forget gate]: lower bound of the forget factor in this layer (HGRN)
    first: Tensor | None = None  # [B, T, channels]: the first layer's values (RWKV-7)


class Window:
    """The memory of the convolutions and token shifts of one call: gives each its part of the state and collects what they leave."""

    def __init__(self, packing: Packing, before: Tensor | None, keep: bool):
        self.packing, self.before, self.keep = packing, before, keep
        self.taken = 0
        self.left: list[Tensor] = []
        self.moved: Tensor | None = None  # a copy of `before` in which convolutions of few tokens, each in its part, go on

    def convolve(self, conv: ShortConvolution, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D], continuing where the last call ended."""
        past = self._past(x.shape[-1])
        if past is not None and self._few(conv, x, past):
            if self.moved is None:
                self.moved = self.before.clone()  # type: ignore[union-attr]
            return conv.step(x, self.moved[:, self.taken - x.shape[-1] : self.taken])
        y, state = conv(x, past, self.keep, self.packing.cu_seqlens)
        if self.moved is not None and state is not None:
            self.moved[:, self.taken - x.shape[-1] : self.taken] = state
            return y
        return self._leave(y, state)

    def convolve_all(self, convs: Sequence[ShortConvolution], x: Tensor) -> tuple[Tensor, ...]:
        """What `convolve` makes of the channels of each, side by side in x [B, T, D], by one convolution; for those that are `alike`."""
        made, state = convolve(convs, x, self._past(x.shape[-1]), self.keep, self.packing.cu_seqlens)
        if state is not None:
            self.left.append(state)
        return made

    def _few(self, conv: ShortConvolution, x: Tensor, past: Tensor) -> bool:
        """Whether this is a step of a few tokens without gradients, by a convolution that is its parameters and nothing else."""
        step = self.keep and x.shape[1] <= SHORT and self.packing.cu_seqlens is None and not torch.is_grad_enabled() and not self.left
        return step and x.dtype == past.dtype and plain(conv, ShortConvolution) and direct((x, past, conv.weight, conv.bias))

    def shift(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]: each token's predecessor."""
        y, state = token_shift(x, self._past(x.shape[-1]), self.keep, self.packing.cu_seqlens)
        return self._leave(y, state)

    @property
    def after(self) -> Tensor | None:
        """[N, channels of all, W - 1], or None without convolutions."""
        return torch.cat(self.left, 1) if self.left else self.moved

    def _past(self, channels: int) -> Tensor | None:
        start, self.taken = self.taken, self.taken + channels
        return None if self.before is None else self.before[:, start : self.taken]

    def _leave(self, y: Tensor, state: Tensor | None) -> Tensor:
        if state is not None:
            self.left.append(state)
        return y


class Mixer(nn.Module):
    """What the members share. A member declares the class attributes below and says `operands`, `close` and `initial_values`.

    A layer keeps nothing between calls: state goes in and comes out, and gradients go through it.
    """

    op: ClassVar[str]  # the operator's name
    member: ClassVar[Op]  # its declaration, looked up when the class is made: on the class it burdens neither copies nor compilation
    forms: ClassVar[tuple[Form, ...]]  # how it may be evaluated: the declaration's, for operators that have one
    op_options: ClassVar[dict[str, Any]] = {}  # fixed options of the operator
    keep_float32: ClassVar[tuple[str, ...]] = ()  # the layer's own parameters that no cast to a half type may round
    key_dim: int  # channels of the keys of all heads
    floored: ClassVar[bool] = False  # the stack bounds its forget factors from below, the higher the more: `Depth.floor`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if getattr(cls, "op", None) in all_ops():
            cls.member = all_ops()[cls.op]
            cls.forms = cls.member.forms

    def __init__(self, hidden_size: int, num_heads: int, *, mode: str = "chunk", chunk_size: int = 64, norm_eps: float = 1e-5):
        super().__init__()
        modes = [PREFIX[form] for form in self.forms]
        if mode not in modes:
            raise ValueError(f"{self.op}: mode must be one of {modes}, got {mode!r}")
        if hidden_size < 1 or num_heads < 1:
            raise ValueError(f"{self.op}: hidden_size and num_heads must be at least 1, got {hidden_size} and {num_heads}")
        self.hidden_size, self.num_heads, self.mode, self.chunk_size, self.norm_eps = hidden_size, num_heads, mode, chunk_size, norm_eps

    def finish(self) -> None:
        """Make the parameters that `initial_values` names and no module owns; every member's __init__ ends with it."""
        weight = next(self.parameters())
        for name, value in self.initial_values(torch.device("meta")).items():
            if "." not in name:
                dtype = torch.promote_types(weight.dtype, torch.float32) if name in self.keep_float32 else weight.dtype
                setattr(self, name, nn.Parameter(torch.empty(value.shape, device=weight.device, dtype=dtype)))
        self.reset_parameters()

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        """Fresh float32 values of the parameters that are the layer's own, and of those of its modules ("norm.weight") that begin as no
        other module of their kind does."""
        return {}

    def operands(self, x: Tensor, window: Window, positions: Tensor, depth: Depth) -> tuple[dict[str, Tensor], Tensor | None]:
        """The operator's arguments, gates in float32, and the output gate [B, T, channels] or None, from the input x [B, T, D].

        positions: [B or 1, T] int64, each token's index in its own sequence.
        """
        raise NotImplementedError

    def close(self, o: Tensor, gate: Tensor | None, inputs: dict[str, Tensor]) -> Tensor:
        """The layer's output [B, T, D] from the operator's, o [B, T, HV, V]."""
        raise NotImplementedError

    def call_options(self) -> dict[str, Any]:
        """Options of the operator that differ from layer to layer."""
        return {}

    def operate(self, inputs: dict[str, Tensor], *, form: Form, **options: Any) -> tuple[Tensor, Tensor | None]:
        """(o, the final state or None) of the operator."""
        return self.member(inputs, form=form.value, **options, **self.op_options, **self.call_options())

    @torch.no_grad()
    def reset_parameters(self, copy: Callable[[Tensor, Tensor], Any] = Tensor.copy_) -> None:
        """Fill the parameters of `initial_values`; the modules fill their own. Right after `to_empty` on a meta-device build too, and on
        shards (DTensor), each of which gets its part of one draw. copy(parameter, value): who wants to have a say."""
        for name, value in self.initial_values(next(self.parameters()).device).items():
            fill(self.get_parameter(name), value, copy)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in torch; marks the layer's own parameters (gates, mixtures, bonuses), which optimisers must not decay, whoever sets them
        (loading replaces parameters)."""
        super().register_parameter(name, param)
        if param is not None:
            param._no_weight_decay = True  # type: ignore[attr-defined]

    def _apply(self, fn: Any, recurse: bool = True) -> Mixer:
        """Casts and moves; a cast to a half type moves the `keep_float32` parameters and leaves their values unrounded."""
        kept = {name: (getattr(self, name).data, getattr(self, name).grad) for name in self.keep_float32 if name in self._parameters}
        super()._apply(fn, recurse)
        for own in self.parameters(recurse=False):
            own._no_weight_decay = True  # type: ignore[attr-defined]
        for name, (value, grad) in kept.items():
            parameter = getattr(self, name)
            if parameter.dtype.itemsize < 4 <= value.dtype.itemsize:
                parameter.grad = None
                parameter.data = value.to(parameter.device, torch.float32)
                parameter.grad = None if grad is None else grad.to(parameter.device, torch.float32)
        return self

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        packing: Packing | None = None,
        state: MixerState | None = None,
        output_state: bool = False,
        depth: Depth | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Mix the tokens of each sequence.

        Args:
            hidden_states: [B, T, D].
            attention_mask, position_ids, cu_seqlens: padding and packed documents, see `plan_packing`.
            packing: the plan, when the caller has made it and packed `hidden_states` by it: then instead of the three before.
            state: what N sequences left behind; None begins afresh.
            output_state: return the state after the last token of each sequence, from which any later call continues exactly.
            depth: what the layers below have to say, for members that listen; packed as `hidden_states` is.

        Returns:
            (o [B, T, D], state or None); o is zero at padding.

        Raises:
            ValueError, TypeError: shapes and dtypes that do not fit, naming the argument.
        """
        check_tensors(self.op, hidden_states=hidden_states)
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(f"{self.op}: hidden_states must be [B, T, {self.hidden_size}], got {list(hidden_states.shape)}")
        depth = Depth() if depth is None else depth
        if packing is not None:
            return self._mix(hidden_states, packing, state, output_state, depth)
        B, T, _ = hidden_states.shape
        packing = plan_packing(
            B, T, device=hidden_states.device, attention_mask=attention_mask, position_ids=position_ids, cu_seqlens=cu_seqlens,
            offset=None if state is None else state.seen,
        )  # fmt: skip
        o, state = self._mix(packing.pack(hidden_states), packing, state, output_state, depth)
        return packing.unpack(o), state

    def _mix(
        self, x: Tensor, packing: Packing, state: MixerState | None, output_state: bool, depth: Depth
    ) -> tuple[Tensor, MixerState | None]:
        before = None if state is None else packing.enter(state.recurrent)
        window = Window(packing, None if state is None else packing.enter(state.conv), output_state)
        inputs, gate = self.operands(x, window, packing.positions, depth)
        form = FORM["fused_recurrent" if not self.training and x.shape[1] <= SHORT else self.mode]
        o, recurrent = self.operate(
            inputs, form=form, initial_state=before, output_final_state=output_state, cu_seqlens=packing.cu_seqlens,
            chunk_size=self.chunk_size,
        )  # o [B, T, HV, V]  # fmt: skip
        o = self.close(o, gate, inputs)
        if not output_state or recurrent is None:
            return o, None
        seen = x.new_zeros(packing.sequences, dtype=torch.int64) if state is None else state.seen
        return o, MixerState(packing.leave(window.after), given(packing.leave(recurrent)), seen + packing.lengths)

    @classmethod
    def options(cls) -> Iterator[str]:
        """The names of the keyword arguments that this member takes, its place in the stack left out."""
        return (name for name in _keywords(cls) if name not in PLACE)

    @classmethod
    def place(cls, layer_idx: int, layer_types: Sequence[str]) -> dict[str, Any]:
        """The keyword arguments that tell a member its place in a stack of these types of layers, for members that ask."""
        place = {"layer_idx": layer_idx, "num_layers": len(layer_types), "first": layer_types.index(cls.op) == layer_idx}
        return {name: place[name] for name in _keywords(cls) if name in PLACE}


def fill(parameter: Tensor, value: Tensor, copy: Callable[[Tensor, Tensor], Any]) -> None:
    """copy(parameter, value), or the parameter's shard of it."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor  # takes a second to import

        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    copy(parameter, value)


def _keywords(cls: type[Mixer]) -> Iterator[str]:
    """Each class names its own; one that swallows none (**options) hides those of its base."""
    for base in cls.__mro__:
        if base is nn.Module:
            return
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
            yield from (p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                return
