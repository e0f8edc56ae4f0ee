"""Gradients of gradients: right, or refused; never dropped."""

import importlib
import threading
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import chunkwise.nn
from chunkwise.engine.derivative import Gradient
from chunkwise.nn.boundary import differentiable
from chunkwise.nn.norm import STRETCH

PACKAGE = Path(chunkwise.__file__).parent


def functions():
    """Every autograd function of the package, with the names that its backward pass uses."""
    for path in PACKAGE.rglob("*.py"):
        if "autograd.Function)" in path.read_text():
            module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
            for thing in vars(module).values():
                if isinstance(thing, type) and issubclass(thing, torch.autograd.Function) and thing.__module__ == module.__name__:
                    yield thing


@pytest.mark.parametrize("function", sorted(set(functions()) - {Gradient}, key=lambda f: f.__name__), ids=lambda f: f.__name__)
def test_every_gradient_can_be_differentiated_or_says_why_not(function):
    """By one mechanism, which the kernels' and members' own tests put to the proof; or by the function itself."""
    assert {"gradients", f"{function.__name__.lower()}_function"} & set(function.backward.__code__.co_names)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_that_come_with_the_loss_have_a_derivative(reduction):
    """Of x, head and bias, one and all, against the plain formula's."""
    x, head, bias = (torch.randn(*s, dtype=torch.float64).requires_grad_() for s in ((5, 4), (7, 4), (7,)))
    target, found = torch.tensor([0, 3, -100, 6, 2]), []
    ours = chunkwise.nn.linear_cross_entropy(x, head, target, bias, reduction=reduction, label_smoothing=0.1, rows=2)
    plain = torch.nn.functional.cross_entropy(x @ head.t() + bias, target, reduction=reduction, label_smoothing=0.1)
    for loss in (ours, plain):
        d = torch.autograd.grad(loss.square().sum(), (x, head, bias), create_graph=True)
        found.append([*d, *torch.autograd.grad(sum(t.square().sum() for t in d), (x, head, bias))])
    torch.testing.assert_close(*found)


def test_a_first_gradient_is_a_plain_functions():
    x, head = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    loss = lambda x: chunkwise.nn.linear_cross_entropy(x, head, torch.arange(5))
    (d,) = torch.autograd.grad(loss(x), x, create_graph=True)  # a loss of its own right, and so is its gradient
    (once,) = torch.func.grad(lambda x: loss(x[0]))((x,))
    assert torch.equal(d, once)


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
    for function, given in ((product, (a, b)), (lambda a: product(a, a), (a,)), (norm, (x,))):
        torch._dynamo.reset()
        compiled, eager = torch.compile(function, backend="eager", fullgraph=True), function(*given)
        assert torch.allclose(compiled(*given), eager, rtol=1e-6, atol=0)
        assert all(map(torch.equal, *(torch.autograd.grad(f(*given).sum(), given[0]) for f in (compiled, function))))
        with torch.no_grad():
            assert torch.equal(compiled(*given), function(*given))


@pytest.mark.parametrize("what", ["operator", "elementwise scan", "loss"])
def test_forward_mode_is_right_or_refused(what):
    """An operator of ours would drop tangents, compiled or not: derivatives of zero."""
    z, target, gate = torch.randn(6, 7), torch.arange(6), torch.randn(1, 6, 7).sigmoid().log()
    loss = {
        "operator": lambda z: chunkwise.gla(z[None, :, None], z[None, :, None], z[None, :, None], gate[:, :, None])[0].sum(),
        "elementwise scan": lambda z: chunkwise.hgrn(z[None], gate)[0].sum(),
        "loss": lambda z: chunkwise.nn.cross_entropy(z, target),
    }[what]
    along = lambda z: torch.func.jvp(loss, (z,), (torch.ones_like(z),))[1]
    slope = torch.func.grad(loss)(z).sum()
    for carried in (along, torch.compile(along, backend="eager", fullgraph=True)):
        torch._dynamo.reset()
        try:
            made = carried(z)
        except (NotImplementedError, torch._dynamo.exc.TorchDynamoException):
            assert what == "loss" or carried is not along
            continue
        torch.testing.assert_close(made, slope)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(loss, backend="eager", fullgraph=True)(z), loss(z))


@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "without"])
def test_a_convolution_carries_tangents_outside_transforms_too(grad):
    x, weight = torch.randn(2, 5, 6), torch.randn(6, 4)
    call = lambda x: chunkwise.nn.causal_conv1d(x, weight, activation="silu")[0]
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        made, along = forward_ad.unpack_dual(call(forward_ad.make_dual(x, x)))
        assert torch.equal(call(x), call(x.clone()))
    torch.testing.assert_close((made, along), torch.func.jvp(call, (x,), (x,)))


def test_modules_under_transforms_are_themselves():
    """vmap, gradients for every sample, Jacobians: as one call after the other."""
    nn, func = chunkwise.nn, torch.func
    weight, norm, head, target = torch.randn(6, 4), torch.randn(6), torch.randn(9, 6), torch.randint(0, 9, (2, 5))
    modules = {
        "convolution": lambda x: nn.causal_conv1d(x, weight, activation="silu")[0],
        "norm": lambda x: nn.rms_norm(x, norm, gate=x.flip(-1)),
        "loss": lambda x: nn.cross_entropy(x @ head.t(), target),
        "head": lambda x: nn.linear_cross_entropy(x, head, target),
        "losses": lambda x: nn.linear_cross_entropy(x, head, target, reduction="none"),
    }
    x = torch.randn(3, 2, 5, 6, dtype=torch.float64)
    weight, norm, head = weight.double(), norm.double(), head.double()
    for name, f in modules.items():
        slope = func.grad(lambda x, f=f: f(x).sin().sum())
        for many, each in ((func.vmap(f), f), (func.vmap(slope), slope), (func.vmap(func.jacrev(f)), func.jacrev(f))):
            torch.testing.assert_close(many(x), torch.stack([each(y) for y in x]), msg=name)


def test_gradients_for_every_sample():
    """Of a layer's parameters under a loss whose targets are many, too: the host reads none of them."""
    layer, head = chunkwise.nn.mixer_class("gated_delta_rule")(16, 2).double(), torch.randn(7, 16, dtype=torch.float64)
    x, target = torch.randn(3, 5, 16, dtype=torch.float64), torch.randint(0, 7, (3, 5))
    weights = {n: p.detach() for n, p in layer.named_parameters()}

    def loss(weights, x, target):
        out = torch.func.functional_call(layer, weights, (x[None],))
        return chunkwise.nn.cross_entropy((out[0] if isinstance(out, tuple) else out)[0] @ head.t(), target)

    slope = torch.func.grad(loss)
    many = torch.func.vmap(slope, (None, 0, 0))(weights, x, target)
    each = [slope(weights, *given) for given in zip(x, target)]
    for name, d in many.items():
        torch.testing.assert_close(d, torch.stack([e[name] for e in each]))


def test_many_gradients_at_once_in_a_thread_of_their_own():
    """As a GPU's backward passes are: PyTorch tells that thread nothing of the batch."""
    from torch._vmap_internals import _vmap

    x = torch.randn(3, 4, requires_grad=True)
    y = chunkwise.nn.rms_norm(x)

    def backward(d):
        made = []
        thread = threading.Thread(target=lambda: made.append(torch.autograd.grad(y, x, d, retain_graph=True)[0]))
        thread.start()
        thread.join()
        return made[0]

    many = torch.randn(5, 3, 4)
    want = torch.stack([torch.autograd.grad(y, x, d, retain_graph=True)[0] for d in many])
    torch.testing.assert_close(_vmap(backward, 0, 0)(many), want)
