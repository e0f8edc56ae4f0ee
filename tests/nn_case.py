"""Layers to test, and the comparison of their outputs and gradients."""

import inspect

import torch
from nn_agreement import agree

from chunkwise.nn import all_mixers, mixer_class

D = 24
MEMBERS = list(all_mixers())


def keywords(name):
    """What the layer's constructor takes, its place in the stack too, with the defaults."""
    signatures = [inspect.signature(c.__init__).parameters for c in reversed(mixer_class(name).__mro__) if c is not object]
    defaults = {n: p.default for s in signatures for n, p in s.items()}
    return {n: defaults[n] for n in (*mixer_class(name).options(), *mixer_class(name).place(0, [name]))}


def build(name, seed=0, **options):
    torch.manual_seed(seed)
    return mixer_class(name)(D, options.pop("num_heads", 2), **options)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def agree_with_gradients(got, truth, honest):
    """Gradients are judged together, each in units of its true norm: one of two numbers alone may be right by luck in the honest run."""
    scale = {n: t.norm() for n, t in truth.items() if n.startswith("d")}
    pooled = ({"o": r["o"], "d": torch.cat([r[n] / s.to(r[n].dtype) for n, s in scale.items()])} for r in (got, truth, honest))
    assert all(scale.values())
    agree(*pooled)


def with_gradients(layer, function, x):
    x = x.detach().clone().requires_grad_()
    leaves = {"x": x, **dict(layer.named_parameters())}
    y = function(layer, x).flatten(0, -2)
    gradients = torch.autograd.grad(y, list(leaves.values()), draw(*y.shape, seed=9).to(y.dtype))
    return {"o": y.detach(), **{f"d{n}": g.flatten() for n, g in zip(leaves, gradients, strict=True)}}
