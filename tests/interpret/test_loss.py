"""The loss's kernel in Triton's interpreter, against its form in PyTorch."""

import pytest
import torch
from module_case import check, draw

from chunkwise.nn import cross_entropy, linear_cross_entropy, vocabulary

TERMS = {"plain": {}, "every term": dict(label_smoothing=0.1, z_loss=0.01, scale=0.7, softcap=3.0)}


@pytest.fixture
def on_kernels(monkeypatch):
    """Run the losses on kernels although there is no GPU."""
    monkeypatch.setattr(vocabulary, "uses_kernels", lambda x: x.dtype != torch.float64)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("dtype, V", [(torch.float32, 37), (torch.bfloat16, 37), (torch.float16, 5000)], ids=str)
def test_losses_and_slopes_are_those_of_the_torch_form(monkeypatch, dtype, V, terms, reduction):
    x, w, b = draw(7, 12, dtype=dtype), draw(V, 12, dtype=dtype, seed=1), draw(V, dtype=dtype, seed=2)
    target = torch.tensor([0, V - 1, -100, 3, 4, 5, 6])
    linear = lambda x, w, b: linear_cross_entropy(x, w, target, b, reduction=reduction, rows=3, **terms)
    plain = lambda x, w, b: cross_entropy(x @ w.t() + b, target, reduction=reduction, **terms)
    for function in (linear, plain):
        check(monkeypatch, [vocabulary], function, x, w, b, twice=function is plain or reduction == "none")


def test_rows_of_extreme_logits_stay_finite(on_kernels):
    z = torch.tensor([[1e4, -1e4, 0.0, 3.0], [-3e4, -3e4, -3e4, -3e4], [float("-inf"), 0.0, 1.0, float("-inf")]])
    target = torch.tensor([1, 2, 2])
    loss = cross_entropy(z.requires_grad_(), target, reduction="none")
    loss.sum().backward()
    want = torch.nn.functional.cross_entropy(z.double(), target, reduction="none")
    assert torch.allclose(loss.double(), want) and z.grad.isfinite().all()
    assert cross_entropy(z, torch.tensor([1, 2, -100]), reduction="none")[2] == 0


def test_a_missing_class_is_loud_where_it_cannot_be_refused(on_kernels):
    z, t = draw(2, 5), vocabulary.Terms(-100, 0.0, 0.0, 1.0, 0.0, 0, 5, "")
    target = torch.tensor([1, 7])
    losses = vocabulary.losses(*vocabulary.score(z, target, t, True), target, t)
    assert losses[0].isfinite() and losses[1].isnan()
