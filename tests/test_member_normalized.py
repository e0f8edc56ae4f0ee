"""Normalised linear attention: every output a weighted mean of the values, in forward and backward."""

import pytest
import torch
from oracle import check, same

import chunkwise
from chunkwise.nn import feature_map

MAPS = ("elu_plus_one", "relu", "taylor", "sigmoid")


def draw(T=64, H=2, HV=4, K=8, V=5, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(2, T, h, d, dtype=dtype).requires_grad_() for h, d in ((H, K), (H, K), (HV, V))]


def quadratic(q, k, v):
    n = v.shape[2] // q.shape[2]
    weights = q.shape[-1] ** -0.5 * torch.einsum("bthk,bshk->bhts", q, k).tril().repeat_interleave(n, 1)
    return torch.einsum("bhts,bshv->bthv", weights / (weights.sum(-1, keepdim=True) + 1e-10), v)


@pytest.mark.parametrize("form", ["chunk", "fused_chunk", "recurrent", "parallel"])
@pytest.mark.parametrize("name", MAPS)
def test_outputs_and_gradients_are_those_of_the_quadratic_form(form, name):
    feature, (q, k, v) = feature_map(name), draw()
    if name == "relu":  # queries that find nothing they share with a key, and keys that no query finds
        with torch.no_grad():
            q[:, 3:9], k[:, 20:30] = -q[:, 3:9].abs(), -k[:, 20:30].abs()
    got, _ = chunkwise.linear_attn(feature(q), feature(k), v, normalize=True, form=form, chunk_size=16)
    want = quadratic(feature(q), feature(k), v)
    do = torch.randn_like(want)
    names, (d, truth) = ("dq", "dk", "dv"), (torch.autograd.grad(o, (q, k, v), do) for o in (got, want))
    same(dict(zip(("o", *names), (got, *d))), dict(zip(("o", *names), (want, *truth))), "parallel")


def test_taylor_features_multiply_to_a_series_of_the_exponential():
    q, k, _ = draw(T=5, dtype=torch.float64)
    phi = feature_map("taylor")
    z = (q * k).sum(-1) * 8**-0.5
    check({"z": (phi(q) * phi(k)).sum(-1)}, {"z": 1 + z + z * z / 2})
    assert phi(q).shape == (2, 5, 2, 1 + 8 + 64)


def test_any_layer_takes_a_feature_map_by_name():
    torch.manual_seed(0)
    layer = chunkwise.nn.mixer_class("linear_attn")(16, 2, feature_map="taylor")
    x = torch.randn(1, 20, 16)
    o, state = layer(x)[:2]
    phi = feature_map("taylor")
    assert o.shape == x.shape and o.isfinite().all() and phi(torch.randn(1, 8)).shape == (1, 73)


def test_a_constant_value_comes_out():
    q, k, v = (t.detach().abs() + 0.1 for t in draw(T=200))
    o, _ = chunkwise.normalized_linear_attn(q, k, torch.full_like(v, 3.0), scale=7.0)
    check({"o": o.float()}, {"o": torch.full_like(o, 3.0)})


def test_the_keys_share_of_the_normaliser_is_in_their_gradient():
    q, k, v = draw()
    o, _ = chunkwise.linear_attn(q.exp(), k.exp(), torch.ones_like(v), normalize=True)
    (dk,) = torch.autograd.grad(o.sum(), k)
    assert dk.abs().max() < 1e-9 * o.sum()  # means of ones stay ones whatever the keys


def test_one_name_and_the_other_are_one_operator():
    q, k, v = (t.detach().abs() for t in draw())
    for form in ("chunk", "fused_chunk", "fused_recurrent", "parallel"):
        a = getattr(chunkwise, f"{form}_linear_attn")(q, k, v, normalize=True, output_final_state=True)
        b = getattr(chunkwise, f"{form}_normalized_linear_attn")(q, k, v, output_final_state=True)
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[1].shape == (2, 4, 8, 6)
    check({"z": b[1][..., -1]}, {"z": k.sum(1).repeat_interleave(2, 1)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_do_not_overflow_in_the_normaliser(dtype):
    q, k, v = (t.detach() for t in draw(T=300, K=16, dtype=torch.float32))
    q, k, v = ((t.abs() * s).to(dtype) for t, s in ((q, 30), (k, 30), (v, 1)))
    assert torch.einsum("bthk,bshk->bhts", q.double(), k.double()).tril().sum(-1).max() > torch.finfo(torch.float16).max
    o, _ = chunkwise.linear_attn(q, k, v, normalize=True)
    assert o.dtype == dtype
    check({"o": o}, {"o": quadratic(*(t.double() for t in (q, k, v)))})
