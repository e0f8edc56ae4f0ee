"""The recurrent form on a GPU: one kernel. Its gradient is the chunk form's: the same function, recomputed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import Streams
from .plan_triton import initial, on_device
from .problem import Problem, bare, given, placed
from .raw import NOTHING, Raw
from .recipe import Made, replay
from .stages_triton_recurrent import States, recurrent


def forward(
    p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool, raw: Raw = NOTHING
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o [B, T, HV, V] in q's dtype, the last state [N, HV, K, V] fp32 if `final`, and nothing to save."""
    if p.T == 0 or p.N == 0:
        return torch.empty_like(x.v), initial(p, S0, x.q.device) if final else None, None

    q, plain = bare(p), raw._replace(A_log=None, dt_bias=None)  # nothing of a call is kept

    def hosts(*t: Tensor | None) -> Made:
        *streams, S0, A_log, dt_bias, cu = t
        ST = torch.empty(q.N, q.HV, q.K, q.V, dtype=torch.float32, device=given(t[0]).device) if final else None
        with on_device(given(t[0])):
            states = States(None if S0 is None else S0.contiguous(), ST)
            return recurrent(placed(q, cu), Streams._make(streams), states, plain._replace(A_log=A_log, dt_bias=dt_bias)), ST

    o, ST = replay((forward, final, p.key, plain), (*x, S0, raw.A_log, raw.dt_bias, p.cu_seqlens), hosts)
    return given(o), ST, None
