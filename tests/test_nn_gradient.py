"""Gradients of gradients: right, or refused; never dropped."""

import importlib
import pkgutil

import pytest
import torch

import chunkwise.nn

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
