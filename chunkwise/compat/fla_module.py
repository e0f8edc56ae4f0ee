"""The modules of flash-linear-attention that other packages import, under fla's signatures and parameter names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..engine.prologue import activate_gate
from ..nn import conv, loss, norm
from ..nn.activation import activation as activation_named
from ..nn.norm import wide


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis."""
    return norm.l2norm(x, eps) if output_dtype is None else norm.l2norm(wide(x), eps).to(output_dtype)


class L2Norm(nn.Module):
    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None):
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        return l2norm(x, self.eps, self.output_dtype)


def _add(x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> Tensor:
    """What is normed, and what prenorm returns: x plus the residual, in the residual's dtype or float32."""
    if residual is None:
        return x.float() if residual_in_fp32 else x
    return (wide(x) + wide(residual)).to(torch.float32 if residual_in_fp32 else residual.dtype)


def rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5, prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """x / rms(x) * weight + bias over the last axis of x + residual, in x's dtype; with prenorm also that sum."""
    total = _add(x, residual, residual_in_fp32)
    y = norm.rms_norm(total, weight, bias, eps=eps).to(x.dtype)
    return (y, total) if prenorm else y


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str = "swish", residual: Tensor | None = None,
    prenorm: bool = False, residual_in_fp32: bool = False, eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`rms_norm` times act(g), rounded once."""
    total = _add(x, residual, residual_in_fp32)
    y = norm.rms_norm(total, weight, bias, eps=eps, gate=g, activation=activation).to(x.dtype)
    return (y, total) if prenorm else y


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, elementwise_affine: bool = True, bias: bool = False, eps: float = 1e-5, device=None, dtype=None):
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        factory = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.ones(hidden_size, **factory)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(hidden_size, **factory)) if bias else None

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class FusedRMSNormGated(RMSNorm):
    """Raises ValueError for an activation that is none of swish, silu and sigmoid."""

    def __init__(
        self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5, activation: str = "swish", device=None, dtype=None
    ):
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f"FusedRMSNormGated: activation must be 'swish', 'silu' or 'sigmoid', got {activation!r}")
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)
        self.activation = activation

    def forward(  # type: ignore[override]
        self, x: Tensor, g: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm_gated(x, g, self.weight, self.bias, self.activation, residual, prenorm, residual_in_fp32, self.eps)


class FusedRMSNormSwishGate(FusedRMSNormGated):
    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5, device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, eps, "swish", device, dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunkwise.nn.causal_conv1d` with fla's state, the last W inputs [N, D, W] where W - 1 would do, and a residual added at the end.

    backend and chunk_indices choose how fla computes and change nothing here. Raises ValueError for cp_context.
    """
    if cp_context is not None:
        raise ValueError("causal_conv1d: cp_context: chunkwise has no context parallelism")
    W = weight.shape[-1]
    before = None if initial_state is None else initial_state[..., initial_state.shape[-1] - (W - 1) :]
    if output_final_state:  # one more tap, of weight zero, so that the state is one input longer
        weight = nn.functional.pad(weight, (1, 0))
        before = initial_state
    return conv.causal_conv1d(x, weight, bias, before, output_final_state, activation, cu_seqlens, residual=residual)


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token a sequence: x [B, 1, D] or [1, N, D]; cache [N, D, W] moves on in place. Returns (y in x's shape, cache)."""
    if weight is None:
        raise ValueError("causal_conv1d_update: weight must be [D, W], got None")
    with torch.no_grad():
        y = conv.causal_conv1d_update(x.reshape(cache.shape[0], -1), cache, weight, bias, activation).view(x.shape)
    return (y if residual is None else y + residual), cache


class ShortConvolution(nn.Conv1d):
    """A depthwise causal convolution whose state is [N, D, W]; weight [D, 1, W]."""

    def __init__(
        self, hidden_size: int, kernel_size: int, bias: bool = False, activation: str | None = "silu", backend: str | None = "triton",
        device=None, dtype=None, use_fast_conv1d: bool | None = None,
    ):  # fmt: skip
        super().__init__(
            hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, padding=kernel_size - 1, device=device, dtype=dtype
        )
        activation_named(activation)
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, D]; mask [B, T], zero at padding. With one token a sequence and no gradient the cache is moved in place."""
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("ShortConvolution: mask and cu_seqlens both say where sequences are: give one")
            x = x * mask.unsqueeze(-1).to(x.dtype)
        weight = self.weight.squeeze(1)
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        if cache is not None and not torch.is_grad_enabled() and x.shape[0] * x.shape[1] == N:
            y, cache = causal_conv1d_update(x, cache, residual, weight, self.bias, self.activation)
            return y, cache if output_final_state else None
        return causal_conv1d(x, weight, self.bias, residual, cache, output_final_state, self.activation, cu_seqlens=cu_seqlens)

    @property
    def state_size(self) -> int:
        return self.hidden_size * self.kernel_size[0]


class FusedCrossEntropyLoss(nn.Module):
    """`chunkwise.nn.loss.cross_entropy` as a module. inplace_backward changes nothing here. Raises ValueError for return_z_loss."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, logit_scale: float = 1.0,
        lse_square_scale: float = 0.0, logit_softcapping: float | None = None, inplace_backward: bool = False, process_group: Any = None,
        return_z_loss: bool = False,
    ):  # fmt: skip
        super().__init__()
        if return_z_loss:
            raise ValueError("FusedCrossEntropyLoss: return_z_loss: the z-loss is part of the loss, and not returned beside it")
        self.options: dict[str, Any] = dict(
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, scale=logit_scale, z_loss=lse_square_scale,
            softcap=logit_softcapping or 0.0, process_group=process_group,
        )  # fmt: skip

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return loss.cross_entropy(input, target, **self.options)


class FusedLinearCrossEntropyLoss(nn.Module):
    """`chunkwise.nn.loss.linear_cross_entropy` as a module: the logits are never stored. num_chunks and accumulate_grad_in_fp32 change
    nothing here. Raises ValueError for use_l2warp.
    """

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, logit_scale: float = 1.0, logit_softcapping: float | None = None,
        num_chunks: int = 8, reduction: str = "mean", use_l2warp: bool = False, l2_penalty_factor: float = 1e-4,
        accumulate_grad_in_fp32: bool = True, process_group: Any = None,
    ):  # fmt: skip
        super().__init__()
        if use_l2warp:
            raise ValueError("FusedLinearCrossEntropyLoss: use_l2warp: chunkwise has no such penalty")
        self.options: dict[str, Any] = dict(
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, scale=logit_scale,
            softcap=logit_softcapping or 0.0, process_group=process_group,
        )  # fmt: skip

    def forward(self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return loss.linear_cross_entropy(x, weight, target, bias, **self.options)


def fused_gdn_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), g [B, T, HV]."""
    return activate_gate(g, A_log, dt_bias).to(output_dtype)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | int | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
    g_bias: Tensor | None = None,
    head_dim: int | None = None,
) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), or with lower_bound: lower_bound sigmoid(exp(A_log) (g + dt_bias)). g: [..., HV, K].

    The signature before fla 0.5, which Kimi Linear's own code calls, works too: (g [..., HV * K], A_log, head_dim, g_bias=).
    """
    if isinstance(dt_bias, int):
        head_dim, dt_bias = dt_bias, None
    if g_bias is not None:
        dt_bias = g_bias
    if head_dim is not None and g.shape[-1] != head_dim:
        g = g.unflatten(-1, (-1, head_dim))
    if A_log is None:
        if lower_bound is None:
            raise ValueError("fused_kda_gate: A_log must be given, [HV], unless lower_bound is")
        A_log = g.new_zeros(g.shape[-2])
    flat = g.reshape(1, -1, *g.shape[-2:])
    return activate_gate(flat, A_log.flatten(), dt_bias, lower_bound).view(g.shape).to(output_dtype)
