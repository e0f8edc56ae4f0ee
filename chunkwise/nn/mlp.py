"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from .activation import activation


def intermediate_size(hidden_size: int, hidden_ratio: float = 4.0) -> int:
    """Two thirds of ratio * hidden, so that three matrices cost what two did, rounded up to a multiple of 256."""
    return 256 * -(-int(hidden_size * hidden_ratio * 2 / 3) // 256)


class GatedMLP(nn.Module):
    """y = down(act(gate(x)) * up(x)); SwiGLU with the default activation. x, y: [..., D].

    Shazeer. GLU Variants Improve Transformer. 2020.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str = "silu", *, device=None, dtype=None):
        super().__init__()
        factory = {"bias": False, "device": device, "dtype": dtype}
        self.act = activation(hidden_act)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **factory)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
