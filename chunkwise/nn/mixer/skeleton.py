"""The layer that most members are: projections to heads, short convolution, feature map, operator, output norm, output projection."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from ..activation import activation
from ..activation import feature_map as _features
from ..conv import ShortConvolution
from ..joint import alike, together
from ..linear import Linear
from ..norm import GatedRMSNorm, RMSNorm
from .layer import CallOptions, Depth, Mixer, Window


class MixerOptions(CallOptions, total=False):
    """Keyword arguments that every such layer takes; None is the member's own default."""

    num_kv_heads: int | None  # fewer key and value heads than query heads: each serves num_heads / num_kv_heads of them
    num_v_heads: int | None  # HV, a multiple of num_heads: more value heads than query and key heads
    head_dim: int | None  # K; default hidden_size * expand_k / num_heads
    expand_k: float | None  # the width of the keys, times hidden_size; not with head_dim
    expand_v: float | None  # V = head_dim * expand_v with head_dim, else hidden_size * expand_v / num_heads
    use_short_conv: bool | None  # convolve q, k and v over the last conv_size tokens
    conv_size: int
    conv_bias: bool
    feature_map: str | None  # applied to q and k, by name
    use_gate: bool | None  # gate the output by a projection of the input


class HeadMixer(Mixer):
    """A member whose operator takes queries, keys and values of heads. It declares the class attributes below, and overrides
    `streams` (or `operands`, where its keys are no projection) and `initial_values`.
    """

    letters: ClassVar[tuple[str, str, str]] = ("q", "k", "v")  # the names of the three projections in checkpoints
    beside: tuple[str, ...] = ()  # further maps of the input, named as the letters are; `streams` gets what they make
    expand_k: ClassVar[float] = 1.0
    expand_v: ClassVar[float] = 1.0
    steps: int | None = None  # keys and values a token, where the operator has an axis of them
    use_short_conv: ClassVar[bool] = False
    conv_activation: ClassVar[str | None] = "silu"
    use_gate: ClassVar[bool] = True
    feature_map: ClassVar[str | None] = None
    gate_activation: ClassVar[str] = "silu"
    norm_name: ClassVar[str] = "o_norm"  # the key of the output norm in checkpoints
    joint_norm: ClassVar[bool] = False  # one norm over the channels of all heads, not one for each head
    qkv_activation: ClassVar[str | None] = None  # applied to q, k and v where there is no convolution

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
        use_short_conv: bool | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        feature_map: str | None = None,
        use_gate: bool | None = None,
        **options: Unpack[CallOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        own = type(self)
        if num_kv_heads is not None and num_v_heads is not None:
            raise ValueError(f"{self.op}: give num_kv_heads (fewer keys than queries) or num_v_heads (more values than keys), not both")
        if head_dim is not None and expand_k is not None:
            raise ValueError(f"{self.op}: head_dim and expand_k both say how wide a key is: give one, not both")
        expand_v = own.expand_v if expand_v is None else expand_v
        self.num_k_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.num_v_heads = self.num_k_heads if num_v_heads is None else num_v_heads
        if self.num_k_heads < 1 or num_heads % self.num_k_heads:
            raise ValueError(f"{self.op}: num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
        if self.num_v_heads < 1 or self.num_v_heads % self.num_k_heads:
            raise ValueError(f"{self.op}: num_v_heads must be a multiple of num_heads = {num_heads}, got {num_v_heads}")
        if head_dim is not None and head_dim < 1:
            raise ValueError(f"{self.op}: head_dim must be at least 1, got {head_dim}")
        expand_k = own.expand_k if expand_k is None else expand_k
        self.head_k_dim = head_dim or per_head("expand_k", expand_k, hidden_size, num_heads)
        self.head_v_dim = per_head("expand_v", expand_v, head_dim or hidden_size, 1 if head_dim else num_heads)
        self.key_dim, self.value_dim = self.num_k_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self.out_heads = max(num_heads, self.num_v_heads)  # heads of o: HV of the operator
        self.conv_size, self.conv_bias = conv_size, conv_bias
        self.has_conv = own.use_short_conv if use_short_conv is None else use_short_conv
        self.has_gate = own.use_gate if use_gate is None else use_gate
        name = own.feature_map if feature_map is None else feature_map
        self.feature = _features(name)
        self.feature_dim = self.feature(torch.empty(self.head_k_dim, device="meta")).shape[-1]
        gate = self.member.args.get("g")
        if self.feature_dim != self.head_k_dim and gate is not None and "K" in gate.axes.split():
            made = f"{name!r} makes {self.feature_dim} of {self.head_k_dim}"
            raise ValueError(f"{self.op}: feature_map must keep the channels of a key, each of which has its gate; {made}")

        steps = 1 if self.steps is None else self.steps
        widths = (num_heads * self.head_k_dim, steps * self.key_dim, steps * self.value_dim)
        for letter, width in zip(self.letters, widths, strict=True):
            self.add_module(f"{letter}_proj", Linear(hidden_size, width, bias=False))
        if self.has_conv:
            for letter, width in zip(self.letters, widths, strict=True):
                self.add_module(f"{letter}_conv1d", ShortConvolution(width, conv_size, conv_bias, self.conv_activation))

    def finish(self) -> None:
        """Build what comes after the member's own modules."""
        out = self.out_heads * self.head_v_dim
        normed = out if self.joint_norm else self.head_v_dim
        if self.has_gate:
            self.g_proj = self.gate_projection(self.hidden_size, out)
            self.add_module(self.norm_name, GatedRMSNorm(normed, self.norm_eps, self.gate_activation))
        else:
            self.add_module(self.norm_name, RMSNorm(normed, self.norm_eps))
        self.o_proj = Linear(out, self.hidden_size, bias=False)
        super().finish()

    def gate_projection(self, hidden_size: int, out: int) -> nn.Module:
        """The module that makes the output gate [.., out] of the input [.., hidden_size]."""
        return Linear(hidden_size, out, bias=False)

    def streams(self, x: Tensor, *beside: Tensor) -> dict[str, Tensor]:
        """The operator's arguments besides q, k and v, from the input x [B, T, D] and what the maps `beside` made of it: gates and write
        strengths, in float32."""
        return {}

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The feature maps of q and k [B, T, H, K]."""
        return self.feature(q), self.feature(k)

    def turn(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Position embedding of q and k [B, T, H, K]; none unless the member says so."""
        return q, k

    def operands(self, x: Tensor, window: Window, positions: Tensor, depth: Depth) -> tuple[dict[str, Tensor], Tensor | None]:
        q, k, v, gate, beside = self.project(x, window)
        q, k = self.turn(*self.features(q, k), positions)
        return self.shared({"q": q, "k": k, "v": v, **self.streams(x, *beside)}), gate

    def project(self, x: Tensor, window: Window) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[Tensor]]:
        """q [B, T, H, K], k, v after projection and convolution (or activation), the output gate [B, T, channels of o] or None, and what
        the maps `beside` them make; k and v have an axis of `steps` before the heads' where the operator has it."""
        maps = [getattr(self, f"{name}_proj") for name in (*self.letters, *("g",) * self.has_gate, *self.beside)]
        convs = [getattr(self, f"{letter}_conv1d") for letter in self.letters] if self.has_conv else []
        made = together(x, *maps, merge=3 if convs and alike(convs) else 1)
        if len(made) < len(maps):
            (q, k, v), made = window.convolve_all(convs, made[0]), made[1:]
        else:
            (q, k, v), made = made[:3], made[3:]
            if convs:
                q, k, v = (window.convolve(conv, y) for conv, y in zip(convs, (q, k, v)))
            elif self.qkv_activation is not None:
                q, k, v = (activation(self.qkv_activation)(y) for y in (q, k, v))
        gate, rest = (made[0], made[1:]) if self.has_gate else (None, made)
        per_step = () if self.steps is None else (self.steps,)
        k, v = (y.unflatten(-1, (*per_step, n, -1)) for y, n in ((k, self.num_k_heads), (v, self.num_v_heads)))
        return q.unflatten(-1, (self.num_heads, -1)), k, v, gate, rest

    def shared(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every input but q with as many heads as q, where there are fewer."""
        share = self.num_heads // self.num_k_heads
        if share == 1:
            return inputs
        axis = {n: next(i for i, x in enumerate(a.axes.split()) if x in ("H", "HV")) for n, a in self.member.args.items()}
        return {n: t if n == "q" else t.repeat_interleave(share, axis[n]) for n, t in inputs.items()}

    def spread(self, p: Tensor) -> Tensor:
        """A parameter [HV * channels] of the key heads' gates, as `shared` does with the gates."""
        share = self.num_heads // self.num_k_heads
        return p if share == 1 else p.view(self.num_v_heads, -1).repeat_interleave(share, 0).flatten()

    def close(self, o: Tensor, gate: Tensor | None, inputs: dict[str, Tensor]) -> Tensor:
        norm = getattr(self, self.norm_name)
        if self.joint_norm:
            o = o.flatten(-2)
        o = norm(o) if gate is None else norm(o, gate.view(o.shape))
        return self.o_proj(o if self.joint_norm else o.flatten(-2))

    def extra_repr(self) -> str:
        heads = f"heads={self.num_heads}, kv_heads={self.num_k_heads}, v_heads={self.num_v_heads}"
        return f"{self.op}, mode={self.mode}, {heads}, K={self.head_k_dim}, V={self.head_v_dim}"


def mamba_gate_values(heads: int, channels: int, device: torch.device) -> dict[str, Tensor]:
    """A_log [heads], exp(A_log) uniform in [1, 16]; dt_bias [channels], softplus(dt_bias) log-uniform in [0.001, 0.1]."""
    A = torch.empty(heads, device=device, dtype=torch.float32).uniform_(1, 16)
    dt = torch.empty(channels, device=device, dtype=torch.float32).uniform_(math.log(0.001), math.log(0.1)).exp()
    return {"A_log": A.log(), "dt_bias": dt + torch.log(-torch.expm1(-dt))}


def per_head(name: str, expand: float, width: int, heads: int) -> int:
    """expand * width / heads, which must be a whole number."""
    total = round(width * expand) if math.isfinite(expand) else 0
    if total < 1 or total % heads or abs(total - width * expand) > 1e-6:
        raise ValueError(f"{name} = {expand} of {width} must be a positive multiple of the {heads} heads, got {width * expand:g}")
    return total // heads
