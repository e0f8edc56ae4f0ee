"""The recurrent form on a GPU: one kernel. Its gradient is the chunk form's: the same function, recomputed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import Streams
from .plan_triton import initial, on_device
from .problem import Problem
from .raw import again
from .stages_triton_recurrent import States, recurrent


def forward(p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o [B, T, HV, V] in q's dtype, the last state [N, HV, K, V] fp32 if `final`, and nothing to save."""
    return *again(whole, p, x, S0, final), None


def whole(p: Problem, x: Streams, S0: Tensor | None, final: bool) -> tuple[Tensor, Tensor | None]:
    """The same by its kernel; streams may be raw."""
    if p.T == 0 or p.N == 0:
        return torch.empty_like(x.v), initial(p, S0, x.q.device) if final else None
    ST = torch.empty(p.N, p.HV, p.K, p.V, dtype=torch.float32, device=x.q.device) if final else None
    with on_device(x.q):
        return recurrent(p, x, States(None if S0 is None else S0.contiguous(), ST), p.raw), ST
