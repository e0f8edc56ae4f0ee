"""The kernels of rotary positions and of gated linear units in Triton's interpreter, against their forms in PyTorch."""

import pytest
import torch
from module_case import check, draw

from chunkwise.nn import glu, mlp, rotary


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_turns_and_turns_back(monkeypatch, dtype, interleaved):
    import chunkwise.nn.rotary  # noqa: F401  (the module, beside the function of its name)

    module = __import__("sys").modules["chunkwise.nn.rotary"]
    x = draw(2, 5, 2, 20, dtype=dtype)
    for at in (torch.arange(5)[None] + 1_000_000, torch.tensor([[0, 1, 0, 70_000, 2], [9, 8, 7, 6, 5]]).int()):
        check(monkeypatch, [module], lambda x: rotary(x, at, interleaved=interleaved), x)  # noqa: B023
        check(monkeypatch, [module], lambda x: rotary(x[:, :, 1:], at, 500.0, interleaved=interleaved), x)  # noqa: B023
    check(monkeypatch, [module], lambda x: rotary(x, at[:, :0], interleaved=interleaved), x[:, :0])


def test_many_turns_back_at_once_have_gradients(monkeypatch):
    """PyTorch drops a graph that is made of all of them: with it what the turned numbers owe to the gradient."""
    module = __import__("sys").modules["chunkwise.nn.rotary"]
    x, at, ways = draw(1, 3, 1, 4), torch.arange(3)[None], draw(2, 1, 3, 1, 4, seed=1)

    def twice():
        leaf = x.clone().requires_grad_()
        (d,) = torch.autograd.grad(rotary(leaf, at).sin(), leaf, ways, is_grads_batched=True, create_graph=True)
        return torch.autograd.grad(d.sin().sum(), leaf)[0]

    want = twice()
    monkeypatch.setattr(module, "uses_kernels", lambda x: True)
    torch.testing.assert_close(twice(), want)


@pytest.mark.parametrize("act", ["silu", "sigmoid", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gated_linear_units(monkeypatch, dtype, act):
    check(monkeypatch, [mlp], lambda a, b: glu(a, b, act), draw(3, 1001, dtype=dtype), draw(3, 1001, dtype=dtype, seed=1))
    ab = draw(3, 1536, dtype=dtype)  # rows of three programs
    check(monkeypatch, [mlp], lambda ab: mlp.glu_halves(ab, act), ab)
    a, b = ab.chunk(2, -1)
    assert torch.equal(mlp.glu_halves(ab, act), glu(a, b, act))
    check(monkeypatch, [mlp], lambda ab: mlp.glu_halves(ab[..., :40], act), ab)  # too narrow for it: side by side, read one by one
