"""Norms over channels: root mean square, mean and variance, length; with a residual added before and a gate applied after.

    h = x + residual;  n = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps);  y = act(gate) (n weight + bias)

RMS norms take no mean off, L2 norms have a sum in place of the mean of squares, group norms do it for each of several groups of channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..engine.derivative import Tensors, gradients
from ..engine.library import direct
from ..engine.memory import room
from .activation import activation as activation_named
from .boundary import check_tensors, define, differentiable, present, uses_kernels

KINDS = ("rms", "layer", "l2")
GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}  # activations of a gate, by the names of one and the same
WIDEST = 8192  # channels of a group that a kernel keeps in registers; wider ones run PyTorch's operators


def wide(x: Tensor) -> Tensor:
    """x in the dtype that norms and gates are computed in: float32 for half types, unchanged otherwise."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _unit(h: Tensor, eps: float, groups: int, kind: str, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(n, one over what it was divided by), [..., D], of groups [..., groups, D / groups]; n in `into` [..., D] where that is given."""
    y = wide(h)
    y = y if groups == 1 else y.unflatten(-1, (groups, -1))
    if kind == "layer":
        y = y - y.mean(-1, keepdim=True)
    square = y.square()
    r = torch.rsqrt((square.sum(-1, keepdim=True) if kind == "l2" else square.mean(-1, keepdim=True)) + eps)
    return torch.mul(y, r, out=into if into is None else into.view(y.shape)), r


def _plain(
    h: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, eps: float, groups: int, kind: str, activation: str,
    out: torch.dtype | None, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y by PyTorch's operators; in `into`, which has the dtype that is computed in, where that is given."""
    y = _unit(h, eps, groups, kind, into)[0]
    y = y if groups == 1 else y.flatten(-2)
    y = y if weight is None else torch.mul(y, weight.to(y.dtype), out=into)
    y = y if bias is None else torch.add(y, bias.to(y.dtype), out=into)
    y = y if gate is None else torch.mul(y, activation_named(activation)(wide(gate)), out=into)
    return y.to(h.dtype if out is None else out)


def _plain_backward(
    h: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, dy: Tensor, eps: float, groups: int, kind: str,
    activation: str, out: torch.dtype | None, into: Tensor | None = None, into_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of h and gate [R, D], of weight and bias [D]. With m = d n, d that of n: dh = (d - n mean(m)) / what h was divided by.
    Those of h and gate lie in `into` and `into_gate`, which have the dtype that is computed in, where these are given."""
    n, r = _unit(h, eps, groups, kind)
    flat, d, dgate = n.view(h.shape), wide(dy).to(n.dtype), None
    w = None if weight is None else weight.to(n.dtype)
    if gate is not None:
        g, y = wide(gate).to(n.dtype), flat if w is None else torch.mul(flat, w, out=into)
        y = torch.mul(d, y if bias is None else torch.add(y, bias.to(n.dtype), out=into), out=into)
        act, place = activation_named(activation)(g), {} if into_gate is None else {"grad_input": into_gate}
        silu, backward = activation == "silu", torch.ops.aten
        dgate = backward.silu_backward(y, g, **place) if silu else backward.sigmoid_backward(y, act, **place)
        d = torch.mul(d, act, out=None if into is None else act)
    m, db = d * flat, None if bias is None else d.sum(0)
    dw, d, m = (None, d, m) if w is None else (m.sum(0), torch.mul(d, w, out=into), m.mul_(w))
    d, m, into = d.view(n.shape), m.view(n.shape), None if into is None else into.view(n.shape)
    d = torch.addcmul(d, n, m.sum(-1, keepdim=True) if kind == "l2" else m.mean(-1, keepdim=True), value=-1, out=into)
    return (d if kind != "layer" else torch.sub(d, d.mean(-1, keepdim=True), out=into)).mul_(r).view(h.shape), dw, db, dgate


STRETCH = 1 << 17  # numbers that a block of rows has, about


class _Rows(torch.autograd.Function):
    """`_plain` of rows h [R, D], or of h [R, H, D] alone. A block of rows at a time goes through all of it while caches hold it, into its
    place in the result; what is given alone is kept for the backward pass."""

    @staticmethod
    def forward(h: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, *switches: Any) -> Tensor:
        if len(stretches := _stretches(h)) == 1:
            return _plain(h, weight, bias, gate, *switches)
        y = room(*h.shape, dtype=switches[-1] or h.dtype, device=h.device)
        for rows in stretches:
            into = y[rows] if y.dtype == wide(h[:0]).dtype else None
            made = _plain(h[rows], weight, bias, None if gate is None else gate[rows], *(*switches, into))
            if into is None:
                y[rows] = made
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        h, weight, bias, gate, *ctx.switches = inputs
        ctx.save_for_backward(h, weight, bias, gate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        switches = ctx.switches
        find = lambda x, dy, _: _rows_backward(*x, *dy, *switches)
        plain = lambda h, weight, bias, gate: (_plain(h, weight, bias, gate, *switches),)
        return *gradients(find, plain, ctx.needs_input_grad[:4], ctx.saved_tensors, grads), *[None] * len(switches)


def _rows_backward(h: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, dy: Tensor, *switches: Any) -> Tensors:
    if torch.compiler.is_compiling():
        at_once = _plain_backward(h, weight, bias, gate, dy, *switches)
        return [None if t is None or d is None else d.to(t.dtype) for d, t in zip(at_once, (h, weight, bias, gate))]
    dh, dgate = _like(h), None if gate is None else _like(gate)
    dw, db = (None if t is None else t.new_zeros(t.shape, dtype=wide(h).dtype) for t in (weight, bias))
    for rows in _stretches(h):
        some = None if gate is None else gate[rows]
        into = [None if t is None or t.dtype != wide(h[:0]).dtype else t[rows] for t in (dh, dgate)]
        made, more_w, more_b, dg = _plain_backward(h[rows], weight, bias, some, dy[rows], *switches, *into)
        if into[0] is None:
            dh[rows] = made
        for total, more in ((dw, more_w), (db, more_b)):
            if total is not None and more is not None:
                total += more
        if dgate is not None and dg is not None and into[1] is None:
            dgate[rows] = dg
    return dh, *(None if t is None or s is None else s.to(t.dtype) for s, t in ((dw, weight), (db, bias))), dgate


_rows_function = differentiable(_Rows)


def _like(t: Tensor) -> Tensor:
    return room(*t.shape, dtype=t.dtype, device=t.device)


def _stretches(h: Tensor) -> list[slice]:
    if h.device.type != "cpu" or torch.compiler.is_compiling():
        return [slice(None)]
    n = max(16, STRETCH // max(1, h.shape[1:].numel()) // 16 * 16)  # whole vectors of lanes
    return [slice(a, a + n) for a in range(0, h.shape[0], n)]


def _forward(*args: Any) -> tuple[Tensor, Tensor | None]:
    from .launch.norm import forward

    return forward(*args)


def _backward(*args: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    from .launch.norm import backward

    return backward(*args)


def _fake_backward(h: Tensor, weight: Any, bias: Any, gate: Any, *_: Any) -> tuple[Tensor, ...]:
    return (h.new_empty(h.shape), *(h.new_empty(0) if t is None else torch.empty_like(t) for t in (weight, bias)),
            h.new_empty(0) if gate is None else gate.new_empty(h.shape))  # fmt: skip


def _fake_forward(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    wider = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    h = None if residual is None else x.new_empty(x.shape, dtype=wider)
    return x.new_empty(x.shape, dtype=rest[-1] or wider), present(h, x)


_SWITCHES = "float eps, int groups, str kind, str activation"
_norm_op = define(
    f"norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? gate, {_SWITCHES}, ScalarType? out) -> (Tensor y, Tensor h)",
    _forward,
    _fake_forward,
)
_norm_backward_op = define(
    f"norm_backward(Tensor h, Tensor? weight, Tensor? bias, Tensor? gate, Tensor dy, Tensor? dh, {_SWITCHES}) -> "
    "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dgate)",
    _backward,
    _fake_backward,
)


class _Norm(torch.autograd.Function):
    """The kernels as one differentiable function of x, residual, weight, bias and gate."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return _norm_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, residual, weight, bias, gate, *ctx.switches, _ = inputs
        ctx.save_for_backward(x if residual is None else output[1], weight, bias, gate)
        ctx.added = None if residual is None else (x.dtype, residual.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Any, ...]:
        switches, added, (x, residual, *rest) = ctx.switches, ctx.added, ctx.needs_input_grad[:5]
        find = lambda x, dy, _: _norm_backward_op(*x, *dy, *switches)
        how = (*switches, dy.dtype)
        plain = lambda h, weight, bias, gate: (_plain(h, weight, bias, gate, *how), h)
        d, *others = gradients(find, plain, (x or residual, *rest), ctx.saved_tensors, (dy, dh if added else None))
        both = (d, None) if added is None else (None if d is None else d.to(t) for t in added)
        return *(t if w else None for t, w in zip(both, (x, residual))), *others, *[None] * (len(switches) + 1)


_norm_function = differentiable(_Norm)


def _norm(
    name: str, kind: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, eps: float,
    groups: int, activation: str, out: torch.dtype | None = None, needed: tuple[str, ...] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y in `out` or the wider of x's and residual's dtypes, h)."""
    check_tensors(name, None, needed, x=x, residual=residual, gate=gate, weight=weight, bias=bias)
    if x.ndim < 1:
        raise ValueError(f"{name}: x must be [..., D], got a number")
    D = x.shape[-1]
    if groups < 1 or D % groups:
        raise ValueError(f"{name}: groups must divide the {D} channels, got {groups}")
    if activation not in GATES:
        raise ValueError(f"{name}: activation must be 'silu' ('swish') or 'sigmoid', got {activation!r}")
    if not eps >= 0:
        raise ValueError(f"{name}: eps must be at least 0, got {eps}")
    for label, t in (("residual", residual), ("gate", gate)):
        if t is not None and t.shape != x.shape:
            raise ValueError(f"{name}: {label} must have x's shape {list(x.shape)}, got {list(t.shape)}")
    for label, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != (D,):
            raise ValueError(f"{name}: {label} must be [D] = [{D}], got {list(t.shape)}")
    switches = (float(eps), groups, kind, GATES[activation], out)
    if uses_kernels(x) and (residual is None or uses_kernels(residual)) and D // groups <= WIDEST:
        y, h = _norm_function(x, residual, weight, bias, gate, *switches)
        return y, x if residual is None else h
    h = x if residual is None else x + residual
    if not (direct((h, weight, bias, gate)) or torch.compiler.is_compiling()) or h.numel() <= STRETCH and not torch.is_grad_enabled():
        return _plain(h, weight, bias, gate, *switches), h
    rows: tuple[int, ...] = (h.numel() // max(1, D), D)
    if weight is bias is gate is None and h.ndim == 4 and not h.is_contiguous() and h.shape[2] * D <= STRETCH // 16:
        rows = (-1, h.shape[2], D) if h.numel() else rows  # heads among other channels: tokens stand for rows, which need no copy
    return _rows_function(h.reshape(rows), weight, bias, None if gate is None else gate.reshape(rows), *switches).view(h.shape), h


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis, computed in float32; a zero row stays zero. Same shape and dtype as x."""
    return _norm("l2norm", "l2", x, None, None, None, None, eps, 1, "silu")[0]


def rms_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5, groups: int = 1, gate: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    """act(gate) (x / sqrt(mean(x^2) + eps) weight + bias) over the last axis.

    Args:
        x: [..., D]. Computed in float32 (float64 for float64), returned in x's dtype.
        weight, bias: [D], any float dtype, or None: ones and zeros.
        groups: that many groups of channels are normed each on its own.
        gate: [..., D] in any float dtype, or None: no gate. activation: "silu" ("swish") or "sigmoid", of the gate.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices, groups or an eps that do not fit, naming the argument.

    Zhang, Sennrich. Root Mean Square Layer Normalization. NeurIPS 2019.
    """
    return _norm("rms_norm", "rms", x, None, weight, bias, gate, eps, groups, activation)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5, groups: int = 1,
    gate: Tensor | None = None, activation: str = "silu",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(`rms_norm` of h, h) with h = x + residual, the next residual, rounded to the wider of their dtypes. residual: x's shape."""
    return _norm("add_rms_norm", "rms", x, residual, weight, bias, gate, eps, groups, activation, needed=("residual",))


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5, groups: int = 1, gate: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    """As `rms_norm`, of x with its mean taken off.

    Ba, Kiros, Hinton. Layer Normalization. 2016. With groups: Wu, He. Group Normalization. ECCV 2018, over channels alone.
    """
    return _norm("layer_norm", "layer", x, None, weight, bias, gate, eps, groups, activation)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5, groups: int = 1,
    gate: Tensor | None = None, activation: str = "silu",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(`layer_norm` of h, h) with h = x + residual, as `add_rms_norm`."""
    return _norm("add_layer_norm", "layer", x, residual, weight, bias, gate, eps, groups, activation, needed=("residual",))


class _Module(nn.Module):
    """What the norms share: weight [D], begun at one, and bias [D], begun at zero, on request.

    Under autocast the result is in autocast's dtype: products follow, which would round it, each anew.
    """

    kind = "rms"
    groups = 1

    def __init__(self, hidden_size: int, eps: float = 1e-5, bias: bool = False, *, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> y [..., D]."""
        return self._run(x)[0]

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of h, h) with h = x + residual, all [..., D]."""
        return self._run(x, residual)

    def _run(self, x: Tensor, residual: Tensor | None = None, gate: Tensor | None = None, act: str = "silu") -> tuple[Tensor, Tensor]:
        device = x.device.type
        on = device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64
        out = torch.get_autocast_dtype(device) if on else None
        return _norm(type(self).__name__, self.kind, x, residual, self.weight, self.bias, gate, self.eps, self.groups, act, out)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}" + (", bias=True" if self.bias is not None else "")


class RMSNorm(_Module):
    """`rms_norm` with its weight."""


class LayerNorm(_Module):
    """`layer_norm` with its weight and, on request, bias."""

    kind = "layer"


class GroupNorm(_Module):
    """`layer_norm` (rms=True: `rms_norm`) of each of `groups` groups of channels.

    Raises:
        ValueError: groups that do not divide hidden_size.
    """

    def __init__(self, groups: int, hidden_size: int, eps: float = 1e-5, bias: bool = False, rms: bool = False, *, device=None, dtype=None):
        if groups < 1 or hidden_size % groups:
            raise ValueError(f"GroupNorm: groups must divide hidden_size = {hidden_size}, got {groups}")
        super().__init__(hidden_size, eps, bias, device=device, dtype=dtype)
        self.groups, self.kind = groups, "rms" if rms else "layer"

    def extra_repr(self) -> str:
        return f"{self.groups}, {super().extra_repr()}, rms={self.kind == 'rms'}"


class GatedRMSNorm(_Module):
    """RMSNorm(x) * act(gate), both [..., D]: the output norm of gated linear-attention layers.

    Raises:
        ValueError: `activation` is neither "silu" nor "sigmoid"; x and gate differ in shape.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "silu", bias: bool = False, *, device=None, dtype=None):
        if activation not in GATES:
            raise ValueError(f"{type(self).__name__}: activation must be 'silu' or 'sigmoid', got {activation!r}")
        super().__init__(hidden_size, eps, bias, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return self._run(x, None, gate, self.activation)[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"


class GatedLayerNorm(GatedRMSNorm):
    """LayerNorm(x) * act(gate)."""

    kind = "layer"


__all__ = [
    "GatedLayerNorm", "GatedRMSNorm", "GroupNorm", "LayerNorm", "RMSNorm", "add_layer_norm", "add_rms_norm", "l2norm", "layer_norm",
    "rms_norm", "wide",
]  # fmt: skip
