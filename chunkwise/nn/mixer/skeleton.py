"""The one layer of the family: projections, short convolution, feature map, operator, output norm, output projection."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from ...spec import PREFIX, Op, all_ops
from ..activation import activation
from ..activation import feature_map as _features
from ..conv import ShortConvolution
from ..norm import GatedRMSNorm, RMSNorm, wide
from ..packing import Packing, plan_packing

FORM = {prefix: form for form, prefix in PREFIX.items()}  # mode -> form
SHORT = 16  # outside training, calls of at most this many tokens take the recurrent form: beyond, a chunk is faster on CPUs too


class MixerState(NamedTuple):
    """What a layer remembers of N sequences: of constant size however long they are."""

    conv: Tensor | None  # [N, channels of q, k and v, W - 1]: the convolution's last inputs
    recurrent: Tensor  # [N, HV, K, V] float32 (float64 for float64 layers)
    seen: Tensor  # [N] int64: tokens so far, padding not counted

    def select(self, index: Tensor) -> MixerState:
        """The states of the sequences `index` [M]: beams, batch selection."""
        return self._map(lambda x: x.index_select(0, index.to(x.device)))

    def to(self, device: torch.device | str) -> MixerState:
        return self._map(lambda x: x.to(device))

    def _map(self, move: Callable[[Tensor], Tensor]) -> MixerState:
        return MixerState(None if self.conv is None else move(self.conv), move(self.recurrent), move(self.seen))


class MixerOptions(TypedDict, total=False):
    """Keyword arguments that every mixer takes; None is the member's own default."""

    num_kv_heads: int | None  # fewer key and value heads than query heads: each serves num_heads / num_kv_heads of them
    num_v_heads: int | None  # HV, a multiple of num_heads: more value heads than query and key heads
    head_dim: int | None  # K; default hidden_size * expand_k / num_heads
    expand_k: float | None  # the width of the keys, times hidden_size; not with head_dim
    expand_v: float | None  # V = head_dim * expand_v with head_dim, else hidden_size * expand_v / num_heads
    mode: str  # "chunk", "fused_chunk", "fused_recurrent" or "parallel", where the member has that form
    chunk_size: int  # 16, 32 or 64
    use_short_conv: bool | None  # convolve q, k and v over the last conv_size tokens
    conv_size: int
    conv_bias: bool
    feature_map: str | None  # applied to q and k, by name
    use_gate: bool | None  # gate the output by a projection of the input
    norm_eps: float


class Mixer(nn.Module):
    """What the members share. A member declares the class attributes below, and overrides `build`, `streams`, `initial_values`.

    A layer keeps nothing between calls: state goes in and comes out, and gradients go through it.
    """

    op: ClassVar[str]  # the operator's name in all_ops()
    member: ClassVar[Op]  # its declaration, looked up when the class is made: on the class it burdens neither copies nor compilation
    expand_k: ClassVar[float] = 1.0
    expand_v: ClassVar[float] = 1.0
    use_short_conv: ClassVar[bool] = False
    use_gate: ClassVar[bool] = True
    feature_map: ClassVar[str | None] = None
    gate_activation: ClassVar[str] = "silu"
    norm_name: ClassVar[str] = "o_norm"  # the key of the output norm in checkpoints
    qkv_activation: ClassVar[str | None] = None  # applied to q, k and v even without a convolution
    op_options: ClassVar[dict[str, Any]] = {}  # fixed options of the operator
    keep_float32: ClassVar[tuple[str, ...]] = ()  # parameters that no cast to a half type may round, and that weight decay spares

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.member = all_ops()[cls.op]

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        num_v_heads: int | None = None,
        head_dim: int | None = None,
        expand_k: float | None = None,
        expand_v: float | None = None,
        mode: str = "chunk",
        chunk_size: int = 64,
        use_short_conv: bool | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        feature_map: str | None = None,
        use_gate: bool | None = None,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        own = type(self)
        modes = [PREFIX[form] for form in self.member.forms]
        if mode not in modes:
            raise ValueError(f"{self.op}: mode must be one of {modes}, got {mode!r}")
        if hidden_size < 1 or num_heads < 1:
            raise ValueError(f"{self.op}: hidden_size and num_heads must be at least 1, got {hidden_size} and {num_heads}")
        if num_kv_heads is not None and num_v_heads is not None:
            raise ValueError(f"{self.op}: give num_kv_heads (fewer keys than queries) or num_v_heads (more values than keys), not both")
        if head_dim is not None and expand_k is not None:
            raise ValueError(f"{self.op}: head_dim and expand_k both say how wide a key is: give one, not both")
        expand_v = own.expand_v if expand_v is None else expand_v
        self.hidden_size, self.num_heads, self.mode, self.chunk_size = hidden_size, num_heads, mode, chunk_size
        self.num_k_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.num_v_heads = self.num_k_heads if num_v_heads is None else num_v_heads
        if self.num_k_heads < 1 or num_heads % self.num_k_heads:
            raise ValueError(f"{self.op}: num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
        if self.num_v_heads < 1 or self.num_v_heads % self.num_k_heads:
            raise ValueError(f"{self.op}: num_v_heads must be a multiple of num_heads = {num_heads}, got {num_v_heads}")
        if head_dim is not None and head_dim < 1:
            raise ValueError(f"{self.op}: head_dim must be at least 1, got {head_dim}")
        expand_k = own.expand_k if expand_k is None else expand_k
        self.head_k_dim = head_dim or _per_head("expand_k", expand_k, hidden_size, num_heads)
        self.head_v_dim = _per_head("expand_v", expand_v, head_dim or hidden_size, 1 if head_dim else num_heads)
        self.key_dim, self.value_dim = self.num_k_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self.out_heads = max(num_heads, self.num_v_heads)  # heads of o: HV of the operator
        self.conv_size, self.conv_bias, self.norm_eps = conv_size, conv_bias, norm_eps
        self.has_conv = own.use_short_conv if use_short_conv is None else use_short_conv
        self.has_gate = own.use_gate if use_gate is None else use_gate
        self.feature = _features(own.feature_map if feature_map is None else feature_map)

        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_k_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        if self.has_conv:
            self.q_conv1d = ShortConvolution(num_heads * self.head_k_dim, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(self.value_dim, conv_size, conv_bias)

    def finish(self) -> None:
        """Build what comes after the member's own parameters; every member's __init__ ends with it."""
        out = self.out_heads * self.head_v_dim
        if self.has_gate:
            self.g_proj = self.gate_projection(self.hidden_size, out)
            self.add_module(self.norm_name, GatedRMSNorm(self.head_v_dim, self.norm_eps, self.gate_activation))
        else:
            self.add_module(self.norm_name, RMSNorm(self.head_v_dim, self.norm_eps))
        self.o_proj = nn.Linear(out, self.hidden_size, bias=False)
        for name in self.keep_float32:
            shape, weight = self.initial_values(torch.device("meta"))[name].shape, self.q_proj.weight
            parameter = nn.Parameter(torch.empty(shape, device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32)))
            setattr(self, name, parameter)
        self.reset_parameters()

    def gate_projection(self, hidden_size: int, out: int) -> nn.Module:
        """The module that makes the output gate [.., out] of the input [.., hidden_size]."""
        return nn.Linear(hidden_size, out, bias=False)

    def initial_values(self, device: torch.device) -> dict[str, Tensor]:
        """Fresh float32 values of the parameters in `keep_float32`."""
        return {}

    def streams(self, x: Tensor) -> dict[str, Tensor]:
        """The operator's arguments besides q, k and v, from the input x [B, T, D]: gates and write strengths, in float32."""
        return {}

    def turn(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Position embedding of q and k [B, T, H, K]; none unless the member says so."""
        return q, k

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the parameters in `keep_float32`; the modules fill their own. Right after `to_empty` on a meta-device build too."""
        for name, value in self.initial_values(self.q_proj.weight.device).items():
            getattr(self, name).copy_(value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in torch; marks the parameters that optimisers must not decay, whoever sets them (loading replaces parameters)."""
        super().register_parameter(name, param)
        if param is not None and name in self.keep_float32:
            param._no_weight_decay = True  # type: ignore[attr-defined]

    def _apply(self, fn: Any, recurse: bool = True) -> Mixer:
        """Casts and moves; a cast to a half type moves the `keep_float32` parameters and leaves their values unrounded."""
        kept = {name: (getattr(self, name).data, getattr(self, name).grad) for name in self.keep_float32 if name in self._parameters}
        super()._apply(fn, recurse)
        for name, (value, grad) in kept.items():
            parameter = getattr(self, name)
            parameter._no_weight_decay = True
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
    ) -> tuple[Tensor, MixerState | None]:
        """Mix the tokens of each sequence.

        Args:
            hidden_states: [B, T, D].
            attention_mask, position_ids, cu_seqlens: padding and packed documents, see `plan_packing`.
            packing: the plan, when the caller has made it and packed `hidden_states` by it: then instead of the three before.
            state: what N sequences left behind; None begins afresh.
            output_state: return the state after the last token of each sequence, from which any later call continues exactly.

        Returns:
            (o [B, T, D], state or None); o is zero at padding.

        Raises:
            ValueError: shapes that do not fit, naming the argument.
        """
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(f"{self.op}: hidden_states must be [B, T, {self.hidden_size}], got {list(hidden_states.shape)}")
        if packing is not None:
            return self._mix(hidden_states, packing, state, output_state)
        B, T, _ = hidden_states.shape
        packing = plan_packing(
            B, T, device=hidden_states.device, attention_mask=attention_mask, position_ids=position_ids, cu_seqlens=cu_seqlens,
            offset=None if state is None else state.seen,
        )  # fmt: skip
        o, state = self._mix(packing.pack(hidden_states), packing, state, output_state)
        return packing.unpack(o), state

    def _mix(self, x: Tensor, packing: Packing, state: MixerState | None, output_state: bool) -> tuple[Tensor, MixerState | None]:
        q, k, v, conv = self._convolve(x, packing, state, output_state)
        q, k, v = q.unflatten(-1, (self.num_heads, -1)), k.unflatten(-1, (self.num_k_heads, -1)), v.unflatten(-1, (self.num_v_heads, -1))
        q, k = self.turn(self.feature(q), self.feature(k), packing.positions)
        inputs = {"q": q, "k": k, "v": v, **self.streams(x)}
        if self.num_k_heads < self.num_heads:
            share = self.num_heads // self.num_k_heads
            inputs = {name: t if name == "q" else t.repeat_interleave(share, 2) for name, t in inputs.items()}
        form = FORM["fused_recurrent" if not self.training and x.shape[1] <= SHORT else self.mode]
        o, recurrent = self.member(
            inputs,
            form=form.value,
            initial_state=None if state is None else state.recurrent,
            output_final_state=output_state,
            cu_seqlens=packing.cu_seqlens,
            chunk_size=self.chunk_size,
            **self.op_options,
        )  # o [B, T, HV, V]
        norm = getattr(self, self.norm_name)
        o = norm(o, self.g_proj(x).unflatten(-1, (self.out_heads, -1))) if self.has_gate else norm(o)
        o = self.o_proj(o.flatten(-2))
        if not output_state or recurrent is None:
            return o, None
        seen = x.new_zeros(packing.sequences, dtype=torch.int64) if state is None else state.seen
        return o, MixerState(conv, recurrent, seen + packing.lengths)

    def _convolve(
        self, x: Tensor, packing: Packing, state: MixerState | None, output_state: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v [B, T, heads * size] after projection, convolution and activation; the convolution's state [N, channels, W - 1]."""
        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        if not self.has_conv:
            act = activation(self.qkv_activation)
            return act(projected[0]), act(projected[1]), act(projected[2]), None
        sizes = [p.shape[-1] for p in projected]
        before = [None] * 3 if state is None or state.conv is None else state.conv.split(sizes, 1)
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        done = [conv(p, s, output_state, packing.cu_seqlens) for conv, p, s in zip(convs, projected, before, strict=True)]
        after = torch.cat([s for _, s in done if s is not None], 1) if output_state else None
        return done[0][0], done[1][0], done[2][0], after

    @classmethod
    def options(cls) -> Iterator[str]:
        """The names of the keyword arguments that this member takes."""
        for base in (cls, Mixer):
            for p in inspect.signature(base.__init__).parameters.values():
                if p.kind is p.KEYWORD_ONLY:
                    yield p.name

    def extra_repr(self) -> str:
        heads = f"heads={self.num_heads}, kv_heads={self.num_k_heads}, v_heads={self.num_v_heads}"
        return f"{self.op}, mode={self.mode}, {heads}, K={self.head_k_dim}, V={self.head_v_dim}"


def log_softplus_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -exp(A_log) softplus(a + dt_bias) <= 0, natural log, float32 at least whatever the dtype of a (Mamba's gate)."""
    return -A_log.to(wide(A_log).dtype).exp() * nn.functional.softplus(wide(a) + wide(dt_bias))


def mamba_gate_values(heads: int, channels: int, device: torch.device) -> dict[str, Tensor]:
    """A_log [heads], exp(A_log) uniform in [1, 16]; dt_bias [channels], softplus(dt_bias) log-uniform in [0.001, 0.1]."""
    A = torch.empty(heads, device=device, dtype=torch.float32).uniform_(1, 16)
    dt = torch.empty(channels, device=device, dtype=torch.float32).uniform_(math.log(0.001), math.log(0.1)).exp()
    return {"A_log": A.log(), "dt_bias": dt + torch.log(-torch.expm1(-dt))}


def _per_head(name: str, expand: float, width: int, heads: int) -> int:
    """expand * width / heads, which must be a whole number."""
    total = round(width * expand)
    if total < 1 or total % heads or abs(total - width * expand) > 1e-6:
        raise ValueError(f"{name} = {expand} of {width} must be a positive multiple of the {heads} heads, got {width * expand:g}")
    return total // heads
