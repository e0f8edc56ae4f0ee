"""The truth: a member's `step`, token by token, in float64. Slow on purpose, and sharing no code with the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .engine.prologue import prologue
from .spec import Op


def _scan(op: Op, inputs: Mapping[str, Tensor | None], S: Tensor, V: int, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """inputs of one or more equally long sequences; S: the state [B, HV, K, V], or as the member says."""
    tokens = {n: t for n, t in inputs.items() if t is not None and op.args[n].per_token}
    fixed = {n: t for n, t in inputs.items() if t is None or not op.args[n].per_token}
    out = []
    for t in range(next(iter(tokens.values())).shape[1]):
        S, o = op.step(S, **{n: x[:, t] for n, x in tokens.items()}, **fixed, **settings)
        out.append(o)
    return (torch.stack(out, 1) if out else S.new_zeros(S.shape[0], 0, S.shape[1], V)), S


def reference(
    op: Op, inputs: Mapping[str, Tensor | None], *, dtype: torch.dtype | None = torch.float64, **options: Any
) -> tuple[Tensor, Tensor]:
    """(o, final state) of a member by its definition, in `dtype` (None: as the inputs are). Takes the member's options; differentiable.

    Raises TypeError for an option that the member does not take.
    Heads are expanded to value heads first, packed sequences are run one by one.
    """
    o = op.whole(options)

    def cast(t: Any) -> Any:
        return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and dtype is not None else t

    x = prologue(op.name, {n: cast(t) for n, t in inputs.items()}, {n: cast(t) for n, t in o.items()})
    sizes = op.check({n: t for n, t in inputs.items()})
    HV, S = sizes.get("HV", sizes["H"]), cast(o["initial_state"])
    for n, t in x.items():
        axes = op.args[n].axes.split()
        if t is not None and "H" in axes:
            x[n] = t.repeat_interleave(HV // sizes["H"], axes.index("H"))
    q, scale = x[op.query], op.scale if o["scale"] is None else o["scale"]
    x[op.query] = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    B, V, settings = q.shape[0], sizes["V"], {n: o[n] for n in op.settings}
    N = B if o["cu_seqlens"] is None else o["cu_seqlens"].shape[0] - 1
    if S is None:
        S = op.empty_state(sizes, N, dtype=q.dtype, device=q.device)
    elif o["state_v_first"]:
        S = S.mT
    if o["cu_seqlens"] is None:
        out, S = _scan(op, x, S, V, settings)
    else:
        ends = o["cu_seqlens"].tolist()
        cut = [{n: t[:, a:b] if t is not None and op.args[n].per_token else t for n, t in x.items()} for a, b in zip(ends, ends[1:])]
        parts = [_scan(op, c, S[i : i + 1], V, settings) for i, c in enumerate(cut)]
        out, S = torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts])
    return out, S.mT if o["state_v_first"] else S
