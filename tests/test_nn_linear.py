"""Linear maps of few rows on a CPU: the product, its bits, and who takes it."""

import pytest
import torch
from nn_agreement import agree
from torch import nn
from torch.nn import functional as F

from chunkwise.nn import Linear, adopt_linear, all_mixers, mixer_class
from chunkwise.nn import linear as module

LARGE = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def taken(monkeypatch):
    """The products that oneDNN took."""
    calls, real = [], torch.ops.mkldnn._linear_pointwise

    def spy(x, *rest):
        calls.append(x.shape)
        return real(x, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", spy)
    return calls


@LARGE
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_are_the_product(taken, bias):
    layer, x = Linear(512, 1024, bias), draw(2, 3, 1024)[..., ::2]
    with torch.no_grad():
        made, honest = layer(x), F.linear(x, layer.weight, layer.bias)
        truth = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    assert len(taken) == 1
    agree({"y": made}, {"y": truth}, {"y": honest})


@LARGE
def test_a_row_has_its_bits_beside_any_others(taken):
    layer, x = Linear(1024, 512, bias=False), draw(33, 1024)
    with torch.no_grad():
        whole = layer(x)
        assert all(torch.equal(layer(x[:n]), whole[:n]) for n in (2, 7, 32)) and torch.equal(layer(x[9:20]), whole[9:20])
    assert len(taken) == 5


@LARGE
def test_all_other_products_are_pytorchs(taken):
    layer, small = Linear(512, 1024), Linear(16, 4)
    x = draw(3, 512).requires_grad_()
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias)) and layer(x).requires_grad
    with torch.no_grad():
        many = draw(module.ROWS + 1, 512)
        assert torch.equal(layer(many), F.linear(many, layer.weight, layer.bias))
        assert torch.equal(small(draw(3, 16)), F.linear(draw(3, 16), small.weight, small.bias))
        assert layer(draw(0, 512)).shape == (0, 1024) and layer.double()(draw(2, 512).double()).dtype == torch.float64
        layer.float()
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(draw(3, 512)).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(draw(3, 511))
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x.detach()), F.linear(x.detach(), layer.weight, layer.bias))
    vector = torch.func.vmap(lambda row: module.linear(row, layer.weight.detach(), layer.bias.detach()))(x.detach())
    agree({"y": vector}, {"y": F.linear(x.double(), layer.weight.double(), layer.bias.double()).detach()}, {"y": layer(x).detach()})
    assert not taken


def test_a_model_s_linear_maps_are_adopted():
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.ModuleList([nn.Linear(4, 2, bias=False), Other(2, 2)]))
    before = model.state_dict()
    assert adopt_linear(model) == 2 and adopt_linear(model) == 0
    assert isinstance(model[0], Linear) and isinstance(model[2][0], Linear) and type(model[2][1]) is Other
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items()) and len(before) == len(model.state_dict())


def test_what_is_no_model_is_not_adopted():
    with pytest.raises(TypeError, match="adopt_linear: model must be a torch.nn.Module, got str"):
        adopt_linear("model")


@pytest.mark.parametrize("op", all_mixers())
def test_layers_are_made_of_it(op):
    with torch.device("meta"):
        layer = mixer_class(op)(64, 2)
    assert not [name for name, module in layer.named_modules() if type(module) is nn.Linear]


@LARGE
@pytest.mark.parametrize(
    "bias",
    [draw(2048)[::2], draw(1).expand(1024), draw(1)[0], draw(1), draw(1, 1024), draw(6, 1024)],
    ids=["slices", "a number, often", "a number", "a number in a row", "a row", "rows"],
)
def test_any_bias_that_pytorch_adds_is_added(bias):
    x, weight = draw(6, 512), draw(1024, 512, seed=1)
    with torch.no_grad():
        torch.testing.assert_close(module.linear(x, weight, bias), F.linear(x, weight, bias))


@LARGE
def test_what_pytorch_refuses_is_refused_in_its_words():
    x, weight = draw(6, 512), draw(1024, 512, seed=1)
    for wrong in ((x, weight, draw(1023)), (x, weight, draw(1024).double()), (draw(1)[0], weight)):
        with torch.no_grad(), pytest.raises(RuntimeError) as said:
            F.linear(*wrong)
        with torch.no_grad(), pytest.raises(RuntimeError) as heard:
            module.linear(*wrong)
        assert str(heard.value) == str(said.value)


@LARGE
def test_a_trace_records_the_product():
    layer, x = Linear(512, 1024), draw(3, 512)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(layer, (x,))(x), F.linear(x, layer.weight, layer.bias))
