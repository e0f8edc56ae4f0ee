"""What layers hand over raw and an op may finish itself: q and k to be normalised, gates and write strengths to be activated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ..spec import Op


def activate_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float | None = None) -> Tensor:
    """Log decay from a raw gate g [B, T, HV] or [B, T, HV, K], in float32 (float64 if g is).

    -exp(A_log) softplus(g + dt_bias), or with `lower_bound` (negative): lower_bound sigmoid(exp(A_log) (g + dt_bias)).
    A_log: [HV]; dt_bias: [HV] or, for gates per channel, [HV * K].
    """
    dtype = torch.float64 if g.dtype == torch.float64 else torch.float32
    g = g.to(dtype)
    A = A_log.to(dtype).exp().view(-1, *[1] * (g.ndim - 3))
    if dt_bias is not None:
        g = g + dt_bias.to(dtype).view(g.shape[2:])
    return -A * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(A * g)


def activate_strength(beta: Tensor, factor: float = 1.0) -> Tensor:
    """factor sigmoid(beta), in float32 (float64 if beta is)."""
    beta = torch.sigmoid(beta if beta.dtype == torch.float64 else beta.float())
    return beta if factor == 1.0 else factor * beta


def all_raw(op: Op) -> dict[str, Any]:
    """Options that leave to the member's function all that it can prepare; raw gates want A_log besides."""
    return {n: True for n in op.defaults if n.startswith("use_")}


NORMALIZED = ("q", "k", "p")  # by use_qk_l2norm_in_kernel, where a member has them


def check_prologue(name: str, x: Mapping[str, Any], o: Mapping[str, Any]) -> None:
    """Raises ValueError naming the option that does not fit."""
    if o.get("use_gate_in_kernel"):
        g, A_log, dt_bias = x["g"], o["A_log"], o["dt_bias"]
        if g is None:
            raise ValueError(f"{name}: use_gate_in_kernel needs g")
        for label, t in (("A_log", A_log), ("dt_bias", dt_bias)):
            if t is None:
                continue
            if not isinstance(t, Tensor) or not t.is_floating_point():
                raise TypeError(f"{name}: {label} must be a floating tensor, got {getattr(t, 'dtype', type(t).__name__)}")
            if t.device != g.device:
                raise ValueError(f"{name}: {label} is on {t.device}, g is on {g.device}")
        if A_log is None or A_log.numel() != g.shape[2]:
            raise ValueError(f"{name}: A_log must be [HV] with HV={g.shape[2]}, got {None if A_log is None else list(A_log.shape)}")
        if dt_bias is not None and dt_bias.numel() != g.shape[2:].numel():
            axes = " * ".join(("HV", "K")[: g.ndim - 2])
            raise ValueError(f"{name}: dt_bias must have {axes} = {g.shape[2:].numel()} entries, got {list(dt_bias.shape)}")
        if o["lower_bound"] is not None and o["lower_bound"] >= 0:
            raise ValueError(f"{name}: lower_bound must be negative, got {o['lower_bound']}")
    elif any(o.get(n) is not None for n in ("A_log", "dt_bias", "lower_bound")):
        raise ValueError(f"{name}: A_log, dt_bias and lower_bound need use_gate_in_kernel=True")
    if o.get("use_beta_sigmoid_in_kernel"):
        if x["beta"] is None:
            raise ValueError(f"{name}: use_beta_sigmoid_in_kernel needs beta")
    elif o.get("allow_neg_eigval"):
        raise ValueError(f"{name}: allow_neg_eigval needs use_beta_sigmoid_in_kernel=True")


def prologue(name: str, inputs: Mapping[str, Any], o: Mapping[str, Any]) -> dict[str, Any]:
    """The member's inputs with what the options ask for done. Raises ValueError naming the option that does not fit."""
    check_prologue(name, inputs, o)
    x = dict(inputs)
    decay, strength = (activate_gate, activate_strength) if _on_cpu(x) else _fused()
    if o.get("use_qk_l2norm_in_kernel"):
        from ..nn.norm import l2norm

        x.update({n: l2norm(x[n]) for n in NORMALIZED if x.get(n) is not None})
    if o.get("use_gate_in_kernel"):
        x["g"] = decay(x["g"], o["A_log"], o["dt_bias"], o["lower_bound"])
    if o.get("use_beta_sigmoid_in_kernel"):
        x["beta"] = strength(x["beta"], 2.0 if o["allow_neg_eigval"] else 1.0)
    return x


def _on_cpu(x: Mapping[str, Any]) -> bool:
    return all(t.device.type == "cpu" for t in x.values() if isinstance(t, Tensor))


def _fused() -> tuple[Any, ...]:
    """The same two functions where a GPU has kernels for them; layers have them from the same place."""
    from ..nn.gate import log_decay, write_strength

    return log_decay, write_strength
