"""The feature maps of linear attention: those of their papers, learnt or not."""

import copy

import pytest
import test_nn_paper as paper
import torch
from nn_case import D, agree_with_gradients, build, draw, with_gradients
from torch.nn import functional as F


def features(p, name, x, side):
    """Of a query or key x [.., K], as their papers have them; the last two are divided by their sum."""
    tied = not any(n.startswith("feature_map_k.") for n in p)
    maps = {n.split(".", 1)[1]: t for n, t in p.items() if n.startswith(f"feature_map_{'q' if tied else side}.")}
    if name == "elementwise_product":
        return F.linear(x, maps["layer1.weight"], maps["layer1.bias"]) * F.linear(x, maps["layer2.weight"], maps["layer2.bias"])
    if name == "hedgehog":
        y = F.linear(x, maps["layer.weight"], maps["layer.bias"])
        return torch.cat([(2 * y).exp(), (-2 * y).exp()], -1) / ((2 * y).exp() + (-2 * y).exp()).sum(-1, keepdim=True)
    if name == "t2r":
        y = F.linear(x, maps["layer.weight"]).clamp(min=0)
    else:
        r = torch.cat([x.clamp(min=0), (-x).clamp(min=0)], -1)
        n = r.shape[-1]
        y = torch.stack([r[..., i] * r[..., (i - j) % n] for j in (1, 2, 3, 4) for i in range(n)], -1)
    return y / (y.sum(-1, keepdim=True) + 1e-4)


@pytest.mark.parametrize("name", ["elementwise_product", "hedgehog", "hedgehog, tied", "t2r", "dpfp"])
def test_features_are_those_of_their_papers(name):
    name, _, tied = name.partition(", ")
    shares = name in ("t2r", "dpfp")
    layer, x = build("linear_attn", feature_map=name, tie_feature_map=bool(tied), norm_q=shares, norm_k=shares).train(), draw(1, 21, D)
    wide = copy.deepcopy(layer).double()

    def plain(m, x):
        p = dict(m.named_parameters())
        return paper.plain_linear_attn(m, p, x[0], lambda t, side: features(p, name, t, side))

    truth, honest = with_gradients(wide, plain, x.double()), with_gradients(layer, plain, x)
    agree_with_gradients(with_gradients(layer, lambda m, x: m(x)[0], x), truth, honest)


def test_learnt_features_begin_where_their_papers_do_and_are_named_where_nothing_is_learnt():
    layer = build("linear_attn", feature_map="hedgehog")
    assert torch.equal(layer.feature_map_q.layer.weight, torch.eye(12)) and not layer.feature_map_k.layer.bias.any()
    with pytest.raises(ValueError, match="tie_feature_map needs a feature_map that is learnt, .*hedgehog.*got 'relu'"):
        build("linear_attn", feature_map="relu", tie_feature_map=True)
