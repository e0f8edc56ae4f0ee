"""The kernels of gated linear units in Triton's interpreter, against their form in PyTorch."""

import pytest
import torch
from module_case import check, draw

from chunkwise.nn import glu, mlp


@pytest.mark.parametrize("act", ["silu", "sigmoid", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gated_linear_units(monkeypatch, dtype, act):
    check(monkeypatch, [mlp], lambda a, b: glu(a, b, act), draw(3, 1001, dtype=dtype), draw(3, 1001, dtype=dtype, seed=1))
