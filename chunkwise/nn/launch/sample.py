"""One call of every host here with the switches that models use, on tensors without contents: what there is to build ahead of time."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from ...engine.precompile import DTYPES, Launch, hear
from ..mlp import HALF
from ..vocabulary import Terms
from . import conv, gate, glu, loss, norm, rotary


def launches(dtype: str, D: int, K: int, V: int) -> list[Launch]:
    """What models of width D, heads of K channels and a vocabulary of V launch for their convolutions, norms, units, positions and loss."""

    def run() -> None:
        for module in (_conv, _norm, _gate, _rest):
            module(DTYPES[dtype], D, K, V)

    return hear(run)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _conv(dtype: torch.dtype, D: int, K: int, V: int) -> None:
    cu = _empty(5, dtype=torch.int32)
    weight = _empty(D, 4, dtype=dtype)
    for packed, states in product((False, True), repeat=2):
        x, N = _empty(1 if packed else 4, 8192, D, dtype=dtype), 4
        state, bias = (_empty(N, D, 3, dtype=dtype), _empty(D, dtype=dtype)) if states else (None, None)
        for dy in ((x,), x.tensor_split((D // 4, D // 2), 2)):
            conv.forward(x, weight, bias, None, state, cu if packed else None, None, True, states, [t.shape[2] for t in dy])
            conv.backward(x, weight, bias, state, cu if packed else None, None, dy, state, True)
    x = _empty(4, 1, D, dtype=dtype)
    for index in (None, _empty(4, dtype=torch.int32)):
        conv.update(x, _empty(9, D, 3, dtype=dtype), weight, None, index, True)


def _norm(dtype: torch.dtype, D: int, K: int, V: int) -> None:
    for width, kind, added, activation in (
        (D, "rms", False, ""), (D, "rms", True, ""), (D, "layer", True, ""), (K, "rms", False, "silu"), (K, "rms", False, "sigmoid"),
        (K, "l2", False, ""),
    ):  # fmt: skip
        x, weight = _empty(1 << 14, width, dtype=dtype), None if kind == "l2" else _empty(width, dtype=dtype)
        bias, residual, gate = weight if kind == "layer" else None, x if added else None, x if activation else None
        norm.forward(x, residual, weight, bias, gate, 1e-6, 1, kind, activation, None)
        norm.backward(x, weight, bias, gate, x, residual, 1e-6, 1, kind, activation)
        if activation:  # by heads in wider rows
            x, wider = x.view(-1, 8, width), _empty(x.shape[0] // 8, 9 * width, dtype=dtype)[:, : 8 * width].view(-1, 8, width)
            norm.forward(x, None, weight, None, wider, 1e-6, 1, kind, activation, None)
            norm.backward(x, weight, None, wider, x, None, 1e-6, 1, kind, activation)


def _gate(dtype: torch.dtype, D: int, K: int, V: int) -> None:
    for axes, bound in (((16,), 0.0), ((16, K), 0.0), ((16, K), -5.0)):
        x, bias = _empty(2, 4096, *axes, dtype=dtype), _empty(torch.Size(axes).numel(), dtype=torch.float32)
        dy, A = _empty(*x.shape, dtype=torch.float32), _empty(16, dtype=torch.float32)
        kind = "bounded" if bound else "softplus"
        gate.forward(x, A, bias, kind, bound)
        gate.backward(x, A, bias, dy, kind, bound)
    x, dy = _empty(2, 4096, 16, dtype=dtype), _empty(2, 4096, 16, dtype=torch.float32)
    gate.forward(x, None, None, "sigmoid", 1.0)
    gate.backward(x, None, None, dy, "sigmoid", 1.0)


def _rest(dtype: torch.dtype, D: int, K: int, V: int) -> None:
    x, at = _empty(2, 4096, 8, K, dtype=dtype), _empty(1, 4096, dtype=torch.int64)
    for interleaved in (False, True):
        rotary.turn(x, at, 10000.0, interleaved, False)
    glu.forward(x, x, "silu")
    glu.backward(x, x, x, "silu")
    if x.shape[-1] % (2 * HALF) == 0:
        glu.forward_halves(x, "silu")
        glu.backward_halves(x, x[..., : x.shape[-1] // 2], "silu")
    z, target = _empty(512, V, dtype=dtype), _empty(512, dtype=torch.int64)
    for smoothing, softcap in ((0.0, 0.0), (0.1, 30.0)):
        terms = Terms(-100, smoothing, 0.0, 1.0, softcap, 0, V, "")
        for grad in (False, True):
            lse, _, _ = loss.rows(z, target, terms, grad)
        loss.slopes_(z, target, lse, lse, terms)
