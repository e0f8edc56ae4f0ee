"""The recurrent form on a GPU: one kernel. Its gradient is the chunk form's: the same function, recomputed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import RAW_TENSORS, Raw, Streams
from .library import STREAMS
from .plan_triton import initial, on_device
from .problem import Problem, bare, given, placed
from .raw import NOTHING
from .recipe import Made, replay
from .stages_triton_recurrent import States, recurrent


def forward(
    p: Problem, x: Streams, S0: Tensor | None, *, final: bool, save: bool, raw: Raw = NOTHING
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o [B, T, HV, V] in q's dtype, the last state [N, HV, K, V] fp32 if `final`, and nothing to save."""
    if p.T == 0 or p.N == 0:
        return torch.empty_like(x.v), initial(p, S0, x.q.device) if final else None, None

    q, plain = bare(p), raw.place((None,) * len(RAW_TENSORS))  # nothing of a call is kept

    def hosts(*t: Tensor | None) -> Made:
        streams, S0, own, cu = t[:STREAMS], t[STREAMS], t[STREAMS + 1 : -1], t[-1]
        ST = torch.empty(q.N, q.HV, q.K, q.V, dtype=torch.float32, device=given(t[0]).device) if final else None
        with on_device(given(t[0])):
            states = States(None if S0 is None else S0.contiguous(), ST)
            return recurrent(placed(q, cu), Streams._make(streams), states, plain.place(own)), ST

    o, ST = replay((forward, final, p.key, plain), (*x, S0, *raw.tensors, p.cu_seqlens), hosts)
    return given(o), ST, None
