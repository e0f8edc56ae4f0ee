"""Raw gates and write strengths, forward and backward, in one pass each."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.gate import gate_grad_kernel, gate_kernel
from .row import rows, start

WIDEST = 256  # channels of a program
ELEMENTS = 1024  # of a block
PROGRAMS = 528  # of the backward pass: a few a multiprocessor, each adding the parameters' gradients over its rows


def _tile(D: int) -> tuple[int, int]:
    BD = min(WIDEST, max(8, 1 << (D - 1).bit_length()))
    return ELEMENTS // BD, BD


def forward(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, kind: str, bound: float) -> Tensor:
    """y like x [B, T, HV] or [B, T, HV, K], float32."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if y.numel():
        (a, sx), K = rows(x.flatten(2)), x.shape[3:].numel()
        R, D = x.shape[0] * x.shape[1], x.shape[2:].numel()
        BR, BD = _tile(D)
        start(
            gate_kernel, (-(-R // BR), -(-D // BD)),
            a, a if A_log is None else A_log, a if dt_bias is None else dt_bias, y, sx, R, bound, D=D, K=K, BR=BR, BD=BD, KIND=kind,
            BIAS=dt_bias is not None, warps=4,
        )  # fmt: skip
    return y


def backward(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dy: Tensor, kind: str, bound: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dx, dA_log, ddt_bias), None where there is nothing to differentiate."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (a, sx), (u, sy), K = rows(x.flatten(2)), rows(dy.flatten(2)), x.shape[3:].numel()
    R, D = x.shape[0] * x.shape[1], x.shape[2:].numel()
    BR, BD = _tile(D)
    wide = -(-D // BD)
    blocks = max(1, -(-R * wide // (BR * PROGRAMS)))
    programs = -(-R // (BR * blocks))
    parts = None if A_log is None else torch.empty(programs, 2, D, dtype=torch.float32, device=x.device)
    if dx.numel():
        start(
            gate_grad_kernel, (programs, wide),
            a, a if A_log is None else A_log, a if dt_bias is None else dt_bias, u, dx, dx if parts is None else parts, sx, sy, R, blocks,
            bound, D=D, K=K, BR=BR, BD=BD, KIND=kind, BIAS=dt_bias is not None, warps=4,
        )  # fmt: skip
    if A_log is None or parts is None:
        return dx, None, None
    sums = parts.sum(0)  # [2, D]
    dA = sums[0].view(-1, K).sum(1).to(A_log.dtype).view(A_log.shape)
    return dx, dA, None if dt_bias is None else sums[1].to(dt_bias.dtype, copy=True).view(dt_bias.shape)  # aligned
