"""Gradients of gradients: right, or refused; never dropped."""

import importlib
import pkgutil

import pytest
import torch

import chunkwise.nn
from chunkwise.nn.boundary import differentiable
from chunkwise.nn.norm import STRETCH

MODULES = sorted(m.name for m in pkgutil.iter_modules(chunkwise.nn.__path__))
TWICE = {"_Taps", "_Rows"}  # made of PyTorch's own operators, each of which has a gradient; the latter by asking for theirs


def functions():
    for name in MODULES:
        for thing in vars(importlib.import_module(f"chunkwise.nn.{name}")).values():
            if isinstance(thing, type) and issubclass(thing, torch.autograd.Function) and thing is not torch.autograd.Function:
                yield thing


@pytest.mark.parametrize("function", sorted(set(functions()), key=lambda f: f.__name__), ids=lambda f: f.__name__)
def test_a_gradient_by_kernels_refuses_to_be_differentiated(function):
    assert hasattr(function.backward, "__wrapped__") is (function.__name__ not in TWICE)  # once_differentiable wraps it


def test_what_compiles_with_gradients_compiles_without():
    """PyTorch traces a call of which no gradient is wanted in another way, which miscounts a forward pass of any number of arguments."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return args[0] * args[1]

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, d):
            a, b = ctx.saved_tensors
            return d * b, d * a

    a, b, product = torch.randn(5, requires_grad=True), torch.randn(5), differentiable(Product)
    norm, x = (lambda x: chunkwise.nn.rms_norm(x, a[:4])), torch.randn(2, STRETCH // 4, 4, requires_grad=True)  # more than one stretch
    for function, given in ((product, (a, b)), (norm, (x,))):
        torch._dynamo.reset()
        compiled, eager = torch.compile(function, backend="eager", fullgraph=True), function(*given)
        assert torch.allclose(compiled(*given), eager, rtol=1e-6, atol=0)
        assert all(map(torch.equal, *(torch.autograd.grad(f(*given).sum(), given[0]) for f in (compiled, function))))
        with torch.no_grad():
            assert torch.equal(compiled(*given), function(*given))


@pytest.mark.parametrize("what", ["operator", "elementwise scan", "loss"])
def test_compiled_forward_mode_is_refused_as_it_is_otherwise(what):
    """An operator of ours would drop tangents: derivatives of zero."""
    z, target, gate = torch.randn(6, 7), torch.arange(6), torch.randn(1, 6, 7).sigmoid().log()
    loss = {
        "operator": lambda z: chunkwise.gla(z[None, :, None], z[None, :, None], z[None, :, None], gate[:, :, None])[0].sum(),
        "elementwise scan": lambda z: chunkwise.hgrn(z[None], gate)[0].sum(),
        "loss": lambda z: chunkwise.nn.cross_entropy(z, target),
    }[what]
    along = lambda z: torch.func.jvp(loss, (z,), (torch.ones_like(z),))[1]
    for refused in (along, torch.compile(along, backend="eager", fullgraph=True)):
        torch._dynamo.reset()
        with pytest.raises(Exception):  # noqa: B017
            refused(z)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(loss, backend="eager", fullgraph=True)(z), loss(z))
