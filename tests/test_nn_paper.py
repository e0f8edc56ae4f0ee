"""Every layer against a plain re-statement of its paper: one sequence, token by token, in PyTorch."""

import copy

import pytest
import torch
from nn_case import MEMBERS, D, agree_with_gradients, build, draw, with_gradients
from torch.nn import functional as F

from chunkwise.nn import mixer_class
from chunkwise.spec import all_ops

# The re-statement: one sequence x [T, D], token by token, straight from the papers; p holds the parameters by their checkpoint keys.


def normed(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def short_conv(p, name, x):
    if f"{name}_conv1d.weight" not in p:
        return x
    weight = p[f"{name}_conv1d.weight"]
    y = F.conv1d(F.pad(x.t()[None], (weight.shape[-1] - 1, 0)), weight, p.get(f"{name}_conv1d.bias"), groups=x.shape[1])
    return F.silu(y[0].t())


def low_rank(p, name, x):
    return F.linear(F.linear(x, p[f"{name}.0.weight"]), p[f"{name}.1.weight"], p.get(f"{name}.1.bias"))


def spread(x, heads):
    """[T, few, ...] -> [T, heads, ...]: every group of heads shares one."""
    return x if x.shape[1] == heads else torch.stack([x[:, h * x.shape[1] // heads] for h in range(heads)], 1)


def project(layer, p, x, silu_without_conv=False):
    q, k, v = (short_conv(p, n, F.linear(x, p[f"{n}_proj.weight"])) for n in "qkv")
    if silu_without_conv and "q_conv1d.weight" not in p:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    T, HV = x.shape[0], layer.out_heads
    heads = (q.view(T, layer.num_heads, -1), k.view(T, layer.num_k_heads, -1), v.view(T, layer.num_v_heads, -1))
    return tuple(spread(t, HV) for t in heads)


def recurrence(q, k, v, g=None, beta=None):
    """[T, HV, V]: S <- e^g S, then S += k v' or S += beta k (v - S'k)', then o = S'q / sqrt(K)."""
    S, outputs = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=q.dtype), []
    for t in range(q.shape[0]):
        if g is not None:
            S = S * (g[t] if g[t].ndim == 2 else g[t][:, None]).exp()[..., None]
        write = v[t] if beta is None else beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
        S = S + k[t][..., None] * write[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", S, q[t]) * q.shape[2] ** -0.5)
    return torch.stack(outputs)


def output(layer, p, x, o, norm, gate=None):
    o = normed(o, p[f"{norm}.weight"])
    if gate is not None:
        o = o * gate.view_as(o)
    return F.linear(o.flatten(1), p["o_proj.weight"])


def swish_gate(p, x):
    return F.silu(F.linear(x, p["g_proj.weight"])) if "g_proj.weight" in p else None


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def plain_linear_attn(layer, p, x, feature=lambda x: F.elu(x) + 1):
    q, k, v = project(layer, p, x)
    return output(layer, p, x, recurrence(feature(q), feature(k), v), "norm", swish_gate(p, x))


def plain_retention(layer, p, x, theta=10000.0):
    q, k, v = project(layer, p, x)
    frequency = theta ** (-2 * torch.arange(q.shape[2] // 2, dtype=torch.float64) / q.shape[2])
    turn = torch.outer(torch.arange(len(x), dtype=torch.float64), frequency)
    turn = torch.polar(torch.ones_like(turn), turn)[:, None]
    q, k = (torch.complex(*t.chunk(2, -1)) * turn for t in (q.double(), k.double()))
    q, k = (torch.cat([t.real, t.imag], -1).to(x.dtype) for t in (q, k))
    heads = torch.arange(layer.out_heads, dtype=x.dtype)
    g = (1 - 2 ** (-5 - heads)).log().expand(len(x), -1)
    return output(layer, p, x, recurrence(q, k, v, g), "g_norm_swish_gate", swish_gate(p, x))


def plain_simple_gla(layer, p, x):
    q, k, v = project(layer, p, x)
    g = spread(F.logsigmoid(F.linear(x, p["gk_proj.weight"])) / 16, layer.out_heads)
    return output(layer, p, x, recurrence(q, k, v, g), "g_norm_swish_gate", swish_gate(p, x))


def plain_gla(layer, p, x):
    q, k, v = project(layer, p, x)
    g = F.logsigmoid(low_rank(p, "gk_proj", x)).view(len(x), layer.num_v_heads, -1) / 16
    return output(layer, p, x, recurrence(q, k, v, spread(g, layer.out_heads)), "g_norm_swish_gate", swish_gate(p, x))


def write_strength(layer, p, x):
    return spread(F.linear(x, p["b_proj.weight"]).sigmoid(), layer.out_heads)


def plain_delta_rule(layer, p, x):
    q, k, v = project(layer, p, x, silu_without_conv=True)
    return output(layer, p, x, recurrence(unit(q), unit(k), v, beta=write_strength(layer, p, x)), "o_norm", swish_gate(p, x))


def plain_gated_delta_rule(layer, p, x):
    q, k, v = project(layer, p, x, silu_without_conv=True)
    g = -p["A_log"].exp() * F.softplus(F.linear(x, p["a_proj.weight"]) + p["dt_bias"])
    o = recurrence(unit(q), unit(k), v, spread(g, layer.out_heads), write_strength(layer, p, x))
    return output(layer, p, x, o, "o_norm", swish_gate(p, x))


def plain_kda(layer, p, x):
    q, k, v = project(layer, p, x, silu_without_conv=True)
    f = low_rank(p, "f_proj", x) + p["dt_bias"]
    g = -p["A_log"].exp()[:, None] * F.softplus(f).view(len(x), layer.num_v_heads, -1)
    o = recurrence(unit(q), unit(k), v, spread(g, layer.out_heads), write_strength(layer, p, x))
    gate = low_rank(p, "g_proj", x).sigmoid() if "g_proj.0.weight" in p else None
    return output(layer, p, x, o, "o_norm", gate)


def restate(layer, x):
    return torch.stack([globals()[f"plain_{layer.op}"](layer, dict(layer.named_parameters()), row) for row in x])


SHAPES = {
    "defaults": {},
    "wide keys": dict(expand_k=1.5, expand_v=0.5, num_heads=3),
    "fewer key and value heads": dict(num_heads=6, num_kv_heads=2, expand_k=1.0),
    "three value heads a key head": dict(num_v_heads=6, head_dim=8),
    "without what is there, with what is not": dict(flip=True, conv_bias=True),
}


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layer_is_its_paper(name, shape):
    own = mixer_class(name)
    options = {k: v for k, v in shape.items() if k != "flip"}
    if "flip" in shape:
        options |= dict(use_short_conv=not own.use_short_conv, use_gate=not own.use_gate, conv_size=3)
    layer, x = build(name, **options).train(), draw(2, 37, D)
    wide = copy.deepcopy(layer).double()
    truth, honest = with_gradients(wide, restate, x.double()), with_gradients(layer, restate, x)
    agree_with_gradients(with_gradients(layer, lambda m, x: m(x)[0], x), truth, honest)


def test_every_operator_with_a_page_has_a_layer_and_a_restatement():
    assert set(MEMBERS) == {n[len("plain_") :] for n in globals() if n.startswith("plain_")}
    assert set(MEMBERS) <= all_ops().keys()
