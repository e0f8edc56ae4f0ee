"""Maps of one input as one product, which GPUs take: the same function, and only where nobody wants to see the modules called."""

import pytest
import torch
from nn_case import MEMBERS, agree_with_gradients, build, draw, with_gradients
from torch import nn

from chunkwise.nn import joint as page
from chunkwise.nn.joint import plain, together


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(page, "uses_kernels", lambda x: True)
    monkeypatch.setattr(page, "MANY", 1)


def states(layer, x):
    o, first = layer(x[:, :9], output_state=True)
    later, last = layer(x[:, 9:], state=first, output_state=True)
    return torch.cat([o, later, *(s.flatten(1)[:, None, : o.shape[-1]] for s in last if s is not None and s.is_floating_point())], 1)


@pytest.mark.parametrize("name", MEMBERS)
def test_layers_are_the_same_by_one_product(name, as_on_a_gpu, monkeypatch):
    layer, x = build(name), draw(2, 23, 24)
    calls = []
    one = with_gradients(layer, states, x)
    monkeypatch.setattr(page, "uses_kernels", lambda x: calls.append(x) or False)
    apart = with_gradients(layer, states, x)
    agree_with_gradients(one, with_gradients(layer.double(), states, x.double()), apart)
    assert calls or not hasattr(layer, "q_proj")


def test_a_module_that_does_more_is_called(as_on_a_gpu, monkeypatch):
    x, maps = draw(2, 3, 16), [nn.Linear(16, 8, bias=False), nn.Linear(16, 3, bias=False), nn.Linear(16, 16, bias=False)]
    products = []
    one = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, w, *rest: products.append(w.shape[0]) or one(x, w, *rest))
    for made, m in zip(together(x, *maps), maps, strict=True):
        assert torch.allclose(made, m(x), atol=1e-6)
    assert products[0] == 32
    maps[1].register_forward_hook(lambda *_: products.append("called"))
    others = [nn.Linear(16, 8), nn.Sequential(nn.Linear(16, 8, bias=False))]
    products.clear()
    assert [y.shape[-1] for y in together(x, *maps, *others)] == [8, 3, 16, 8, 8]
    assert products == [24, 3, "called", 8, 8]
    assert plain(nn.Identity(), nn.Identity) and not plain(maps[1], nn.Linear)


def test_alike_convolutions_are_one_and_others_are_called(as_on_a_gpu, monkeypatch):
    layer, x, widths = build("gated_delta_rule", conv_bias=True), draw(2, 20, 24), []
    one = page.causal_conv1d
    monkeypatch.setattr(page, "causal_conv1d", lambda x, *rest: widths.append(x.shape[-1]) or one(x, *rest))
    together = layer(x)[0]
    assert widths == [24 + 24 + 48]
    layer.k_conv1d.register_forward_hook(lambda *_: widths.append("called"))
    torch.testing.assert_close(layer(x)[0], together)
    assert widths == [24 + 24 + 48, "called"]
