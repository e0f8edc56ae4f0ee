"""Modules around the operator as they are measured: inputs, the function written plainly, and who else has it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import nn
from .count import Count

Function = Callable[..., Any]  # of the inputs by name: a tensor, or several
EPS = 1e-5
IGNORED = -100


@dataclass(frozen=True, eq=False)
class Module:
    """One function of chunkwise.nn at one size."""

    name: str
    shape: str
    leaves: Mapping[str, Tensor]  # what gradients are wanted of; of a step's, none are
    plain: Function  # PyTorch's operators, in float64 too: the truth, and in the inputs' dtype the honest error
    ours: Function
    others: Mapping[str, Callable[[], Function]]  # by package; made only where asked for
    forward: Count
    both: Count | None  # forward and backward; None: there is no backward
    state: Tensor | None = field(default=None)  # what a call changes in place

    @property
    def record(self) -> dict[str, Any]:
        dtype = str(next(iter(self.leaves.values())).dtype).removeprefix("torch.")
        return {"module": self.name, "op": self.name, "shape": self.shape, "dtype": dtype}


class Draw:
    """Random inputs on a device; B and T of most modules."""

    def __init__(self, device: torch.device, dtype: torch.dtype, B: int, T: int, D: int):
        self.device, self.dtype, self.B, self.T, self.D = device, dtype, B, T, D

    def __call__(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return (torch.randn(shape, device=self.device) * scale + shift).to(self.dtype)


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def moved(*, into: int, out: int) -> tuple[Count, Count]:
    """Of a module that products do not bound: forward; and with its backward, which reads all inputs and a gradient for every output
    again, and writes the inputs' gradients."""
    return Count(into + out, 0), Count(into + out + into + out + into, 0)


def compiled(f: Function) -> Callable[[], Function]:
    return lambda: torch.compile(f, dynamic=False)


def conv(d: Draw) -> Module:
    D = 2 * d.D
    x, w = d(d.B, d.T, D), d(D, 4, scale=0.5)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        rows = F.pad(x, (0, 0, 3, 0))
        taps = [wide(rows[:, j : j + x.shape[1]]) * wide(w)[:, j] for j in range(4)]
        return F.silu(taps[0] + taps[1] + taps[2] + taps[3]).to(x.dtype)

    def fla() -> Function:
        from fla.modules.convolution import causal_conv1d

        return lambda x, w: causal_conv1d(x, w, activation="silu")[0]

    def dao() -> Function:
        from causal_conv1d import causal_conv1d_fn

        return lambda x, w: causal_conv1d_fn(x.transpose(1, 2), w, activation="silu").transpose(1, 2)

    return Module(
        "convolution", f"B={d.B}, T={d.T}, D={D}, W=4, SiLU", dict(x=x, w=w), plain,
        lambda x, w: nn.causal_conv1d(x, w, activation="silu")[0],
        {"torch.compile": compiled(plain), "fla-core": fla, "causal-conv1d": dao}, *moved(into=size(x), out=size(x)),
    )  # fmt: skip


def packed(d: Draw) -> Module:
    D, T = 2 * d.D, d.B * d.T
    x, w = d(1, T, D), d(D, 4, scale=0.5)
    ends = [0, T // 33, T // 33 + 3, T // 4, T // 2, T // 2 + 1, T - T // 5, T]
    cu = torch.tensor(ends, device=d.device)
    token = torch.arange(T, device=d.device)
    sequence = torch.searchsorted(cu, token, right=True) - 1
    seen = (token - cu[sequence])[:, None] >= torch.arange(3, -1, -1, device=d.device)  # [T, 4]: is the tap's row in the sequence?

    def plain(x: Tensor, w: Tensor) -> Tensor:
        rows = F.pad(x, (0, 0, 3, 0))
        taps = [wide(rows[:, j : j + T]) * wide(w)[:, j] * seen[:, j, None] for j in range(4)]
        return F.silu(taps[0] + taps[1] + taps[2] + taps[3]).to(x.dtype)

    def fla() -> Function:
        from fla.modules.convolution import causal_conv1d

        return lambda x, w: causal_conv1d(x, w, activation="silu", cu_seqlens=cu)[0]

    def dao() -> Function:
        from causal_conv1d import causal_conv1d_fn

        number = sequence[None].int()
        return lambda x, w: causal_conv1d_fn(x.transpose(1, 2), w, seq_idx=number, activation="silu").transpose(1, 2)

    return Module(
        "convolution", f"{len(ends) - 1} packed sequences, T={T}, D={D}, W=4, SiLU", dict(x=x, w=w), plain,
        lambda x, w: nn.causal_conv1d(x, w, activation="silu", cu_seqlens=cu)[0],
        {"torch.compile": compiled(plain), "fla-core": fla, "causal-conv1d": dao}, *moved(into=size(x), out=size(x)),
    )  # fmt: skip


def step(d: Draw) -> Module:
    B, D = 32 * d.B, 4 * d.D
    x, w, state = d(B, D), d(D, 4, scale=0.5), d(B, D, 4)
    before, index = state.clone(), torch.arange(B, dtype=torch.int32, device=d.device)

    def plain(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.cat((before[:, :, 1:].to(x.dtype), x[:, :, None]), 2)
        return F.silu((wide(rows) * wide(w)).sum(-1)).to(x.dtype), rows

    def ours(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return nn.causal_conv1d_update(x, state, w, activation="silu", state_indices=index), state

    def fla() -> Function:
        from fla.modules.convolution import causal_conv1d_update

        return lambda x, w: (causal_conv1d_update(x[:, None], state, weight=w, activation="silu")[0][:, 0], state)

    def dao() -> Function:
        from causal_conv1d import causal_conv1d_update

        return lambda x, w: (causal_conv1d_update(x, state, w, activation="silu", conv_state_indices=index), state)

    return Module(
        "convolution", f"a token of B={B}, D={D}, W=4, SiLU, states in slots", dict(x=x, w=w), plain, ours,
        {"fla-core": fla, "causal-conv1d": dao}, Count(2 * size(state, x), 0), None, state,
    )  # fmt: skip


def rms(x: Tensor, w: Tensor) -> Tensor:
    x = wide(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w.to(x.dtype)


def gated(d: Draw) -> Module:
    heads = (d.B, d.T, d.D // 128, 128)
    x, g, w = d(*heads), d(*heads), d(128, shift=1)

    def plain(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return (rms(x, w) * F.silu(wide(g))).to(x.dtype)

    def fla() -> Function:
        from fla.modules.fused_norm_gate import rms_norm_gated

        return lambda x, g, w: rms_norm_gated(x, g, w, None, "swish", eps=EPS)

    return Module(
        "gated RMS norm", f"{x.numel() // 128} rows of 128", dict(x=x, g=g, w=w), plain,
        lambda x, g, w: nn.rms_norm(x, w, eps=EPS, gate=g, activation="silu"),
        {"torch.compile": compiled(plain), "fla-core": fla}, *moved(into=size(x, g), out=size(x)),
    )  # fmt: skip


def added(d: Draw) -> Module:
    x, r, w = d(d.B, d.T, d.D), d(d.B, d.T, d.D), d(d.D, shift=1)

    def plain(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return rms(h, w).to(x.dtype), h

    def fla() -> Function:
        from fla.modules.layernorm import rms_norm

        return lambda x, r, w: rms_norm(x, w, None, residual=r, eps=EPS, prenorm=True)

    def liger() -> Function:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        return lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", False)

    n = size(x)  # x + r is one gradient
    return Module(
        "x + residual, RMS norm", f"{d.B * d.T} rows of {d.D}", dict(x=x, r=r, w=w), plain,
        lambda x, r, w: nn.add_rms_norm(x, r, w, eps=EPS),
        {"torch.compile": compiled(plain), "fla-core": fla, "liger-kernel": liger}, Count(4 * n, 0), Count(8 * n, 0),
    )  # fmt: skip


def rotary(d: Draw) -> Module:
    x, at = d(d.B, d.T, d.D // 128, 128), torch.arange(d.T, device=d.device)[None]

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.to(cos.dtype).chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    def table(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angle = at.double()[..., None, None] * 10000.0 ** (torch.arange(64, device=d.device, dtype=torch.float64) / -64)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def stored() -> Function:  # tables made beforehand: neither their making nor their memory is counted
        made, f = table(torch.float32), torch.compile(turn, dynamic=False)
        return lambda x: f(x, *made)

    def fla() -> Function:
        from fla.modules.rotary import rotary_embedding

        cos, sin = (t[0, :, 0] for t in table(x.dtype))
        return lambda x: rotary_embedding(x, cos, sin)

    return Module(
        "rotary positions", f"B={d.B}, T={d.T}, {x.shape[2]} heads of 128", dict(x=x),
        lambda x: turn(x, *table(torch.float64 if x.dtype == torch.float64 else torch.float32)), lambda x: nn.rotary(x, at),
        {"torch.compile": stored, "fla-core": fla}, Count(2 * size(x), 0), Count(4 * size(x), 0),  # the backward pass reads no x
    )  # fmt: skip


def swiglu(d: Draw) -> Module:
    width = d.D * 11 // 4
    a, b = d(d.B, d.T, width), d(d.B, d.T, width)

    def plain(a: Tensor, b: Tensor) -> Tensor:
        return (F.silu(wide(a)) * b).to(a.dtype)

    def fla() -> Function:
        from fla.modules.activations import swiglu

        return lambda a, b: swiglu(a, b)  # by position: an autograd.Function's apply

    def liger() -> Function:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return lambda a, b: LigerSiLUMulFunction.apply(a, b)

    return Module(
        "SwiGLU", f"{d.B * d.T} rows of {width}", dict(a=a, b=b), plain, nn.swiglu,
        {"torch.compile": compiled(plain), "fla-core": fla, "liger-kernel": liger}, *moved(into=size(a, b), out=size(a)),
    )  # fmt: skip


def loss(d: Draw) -> Module:
    N, V = d.B * d.T // 2, 125 * d.D // 8
    x, w, target = d(N, d.D), d(V, d.D, scale=d.D**-0.5), torch.randint(0, V, (N,), device=d.device)
    target[::9] = IGNORED

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(wide(F.linear(x, w)), target)

    def fla() -> Function:
        from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

        return lambda x, w: fused_linear_cross_entropy_loss(x, target, w, accumulate_grad_in_fp32=False)

    def liger(dtype: torch.dtype | None = None) -> Function:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        made = LigerFusedLinearCrossEntropyLoss(accum_dtype=dtype)
        return lambda x, w: made(w, x, target)

    others = {"torch": lambda: plain, "torch.compile": compiled(plain), "fla-core": fla, "liger-kernel": liger}
    once, n = 2 * N * d.D * V, size(x, w)
    return Module(
        "linear head, cross entropy", f"N={N}, D={d.D}, V={V}", dict(x=x, w=w), plain,
        lambda x, w: nn.linear_cross_entropy(x, w, target), {**others, "liger-kernel, float32 sums": lambda: liger(torch.float32)},
        Count(n, once), Count(2 * n, 3 * once),
    )  # fmt: skip


LIBRARIES = ("torch", "torch.compile", "fla-core", "liger-kernel", "liger-kernel, float32 sums", "causal-conv1d")
MODULES: Mapping[str, Callable[[Draw], Module]] = dict(
    conv=conv, packed=packed, step=step, gated=gated, added=added, rotary=rotary, swiglu=swiglu, loss=loss
)


def select(names: Sequence[str], libraries: Sequence[str]) -> tuple[list[str], list[str]]:
    """Modules by name, or "all"; other libraries by name, "all" or "none". Raises ValueError."""
    for known, wanted, kind in (((*MODULES, "all"), names, "module"), ((*LIBRARIES, "all", "none"), libraries, "library of modules")):
        for name in wanted:
            if name not in known:
                raise ValueError(f"bench: no {kind} {name!r}; there are {'; '.join(known)}")
    chosen = list(MODULES) if "all" in names else list(dict.fromkeys(names))
    return chosen, list(LIBRARIES) if "all" in libraries else [n for n in LIBRARIES if n in libraries]


def sizes(text: str, device: torch.device) -> tuple[int, int, int]:
    """B, T and D of a request; "": a large training batch, or what a CPU does in its time. Raises ValueError."""
    if not text:
        return (8, 4096, 2048) if device.type == "cuda" else (1, 512, 512)
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*){2}", text):
        raise ValueError(f"a module's shape must be B,T,D, got {text!r}")
    B, T, D = (int(n) for n in text.split(","))
    if D % 128 or B * T < 66:
        raise ValueError(f"a module's shape must have D a multiple of 128 and B T >= 66, got {text!r}")
    return B, T, D


def module(name: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> Module:
    """One of MODULES with its inputs."""
    torch.manual_seed(0)
    return MODULES[name](Draw(device, dtype, *shape))
