"""HGRN: one number a channel, forgotten by a gate and refilled with what was forgotten; the higher the layer, the longer it remembers.

    f = floor + (1 - floor) sigmoid(f_proj(x)),   h <- f h + (1 - f) silu(i_proj(x)),   o = norm(h) silu(g_proj(x))

Qin, Yang, Zhong. Hierarchically Gated Recurrent Neural Network for Sequence Modeling. NeurIPS 2023.
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from ...ops.hgrn import hgrn
from ...spec import Form
from ..conv import ShortConvolution
from ..joint import together
from ..linear import Linear
from ..norm import GatedRMSNorm, wide
from .layer import CallOptions, Depth, Mixer, Window
from .skeleton import per_head


class HGRN(Mixer):
    """It has no heads: num_heads says nothing here. Its width is expand_v * hidden_size, its state [N, width]."""

    op = "hgrn"
    forms = (Form.CHUNK, Form.RECURRENT)
    floored = True
    expand_v: ClassVar[float] = 1.0
    use_short_conv: ClassVar[bool] = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        expand_v: float | None = None,
        use_short_conv: bool | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        **options: Unpack[CallOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        own = type(self)
        self.key_dim = per_head("expand_v", own.expand_v if expand_v is None else expand_v, hidden_size, 1)
        self.has_conv = own.use_short_conv if use_short_conv is None else use_short_conv
        self.i_proj, self.f_proj, self.g_proj = (Linear(hidden_size, self.key_dim, bias=False) for _ in "ifg")
        if self.has_conv:
            self.i_conv1d, self.f_conv1d = (ShortConvolution(self.key_dim, conv_size, conv_bias, None) for _ in "if")
        self.g_norm = GatedRMSNorm(self.key_dim, self.norm_eps)
        self.o_proj = Linear(self.key_dim, hidden_size, bias=False)
        self.finish()

    def operands(self, x: Tensor, window: Window, positions: Tensor, depth: Depth) -> tuple[dict[str, Tensor], Tensor | None]:
        i, f, gate = together(x, self.i_proj, self.f_proj, self.g_proj)
        if self.has_conv:
            i, f = window.convolve(self.i_conv1d, i), window.convolve(self.f_conv1d, f)
        g = F.logsigmoid(wide(f))  # [B, T, width]
        if depth.floor is not None:
            floor = wide(depth.floor)
            g = torch.logaddexp(floor.log(), torch.log1p(-floor) + g)
        return {"x": (F.silu(wide(i)) * -torch.expm1(g)).to(i.dtype), "g": g}, gate

    def operate(self, inputs: dict[str, Tensor], *, form: Form, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The scan is the same in every form, and in chunks of any size."""
        options.pop("chunk_size")
        return hgrn(inputs["x"], inputs["g"], **options)

    def close(self, o: Tensor, gate: Tensor | None, inputs: dict[str, Tensor]) -> Tensor:
        return self.o_proj(self.g_norm(o, gate))

    def extra_repr(self) -> str:
        return f"{self.op}, width={self.key_dim}"
