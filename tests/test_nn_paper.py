"""Every layer against a plain re-statement of its paper: one sequence, token by token, in PyTorch."""

import copy
from pathlib import Path

import pytest
import torch
from nn_case import MEMBERS, D, agree_with_gradients, build, draw, with_gradients
from torch.nn import functional as F

from chunkwise.nn import mixer_class
from chunkwise.spec import all_ops, public_functions

# The re-statement: one sequence x [T, D], token by token, straight from the papers; p holds the parameters by their checkpoint keys.


def normed(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def short_conv(p, name, x, activation=F.silu):
    if f"{name}_conv1d.weight" not in p:
        return x
    weight = p[f"{name}_conv1d.weight"]
    y = F.conv1d(F.pad(x.t()[None], (weight.shape[-1] - 1, 0)), weight, p.get(f"{name}_conv1d.bias"), groups=x.shape[1])
    return activation(y[0].t())


def low_rank(p, name, x):
    return F.linear(F.linear(x, p[f"{name}.0.weight"]), p[f"{name}.1.weight"], p.get(f"{name}.1.bias"))


def spread(x, heads):
    """[T, few, ...] -> [T, heads, ...]: every group of heads shares one."""
    return x if x.shape[1] == heads else torch.stack([x[:, h * x.shape[1] // heads] for h in range(heads)], 1)


def project(layer, p, x, silu_without_conv=False, letters="qkv", activation=F.silu):
    q, k, v = (short_conv(p, n, F.linear(x, p[f"{n}_proj.weight"]), activation) for n in letters)
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


def plain_linear_attn(layer, p, x, feature=lambda x, side: F.elu(x) + 1):
    q, k, v = project(layer, p, x)
    return output(layer, p, x, recurrence(feature(q, "q"), feature(k, "k"), v), "norm", swish_gate(p, x))


def plain_normalized_linear_attn(layer, p, x):
    q, k, v = project(layer, p, x)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = torch.einsum("thk,shk->hts", q, k).tril() * q.shape[2] ** -0.5
    o = torch.einsum("hts,shv->thv", weights / weights.sum(-1, keepdim=True), v)
    return output(layer, p, x, o, "norm", swish_gate(p, x))


def turned(x, theta=10000.0):
    frequency = theta ** (-2 * torch.arange(x.shape[2] // 2, dtype=torch.float64) / x.shape[2])
    angle = torch.outer(torch.arange(len(x), dtype=torch.float64), frequency)[:, None]
    y = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([y.real, y.imag], -1).to(x.dtype)


def plain_abc(layer, p, x):
    q, k, v = project(layer, p, x)
    T, M = len(x), layer.num_slots
    q, k = turned(q), turned(k)
    s = spread(F.linear(x, p["s_proj.weight"]).view(T, layer.num_v_heads, M), layer.out_heads)
    outputs = []
    for t in range(T):
        weight = s[: t + 1].softmax(0)  # [t + 1, HV, M]: how much of each slot each token makes up
        keys, values = torch.einsum("shm,shk->hmk", weight, k[: t + 1]), torch.einsum("shm,shv->hmv", weight, v[: t + 1])
        read = (torch.einsum("hmk,hk->hm", keys, q[t]) * q.shape[2] ** -0.5).softmax(-1)
        outputs.append(torch.einsum("hm,hmv->hv", read, values))
    return output(layer, p, x, torch.stack(outputs), "g_norm", swish_gate(p, x))


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


def preconditioned(layer, p, x, g, gate, decay):
    """The rule of both members: g [T, HV, K or 1], decay: the name of the projection that the preconditioner's gate comes from."""
    q, k, v = project(layer, p, x, silu_without_conv=True)
    q, k, HV = unit(q), unit(k), layer.out_heads
    keep = spread((-p["A_log_atk"].exp() * F.softplus(F.linear(x, p[f"{decay}.weight"]) + p["dt_bias_atk"])).exp(), HV)
    strength = spread(F.linear(x, p["b_atk_proj.weight"]).sigmoid(), HV)
    centre, beta = spread(p["log_atk_scale"][None], HV)[0][:, None], write_strength(layer, p, x)
    S, A, outputs = torch.zeros(HV, q.shape[2], v.shape[2], dtype=x.dtype), torch.zeros(HV, q.shape[2], dtype=x.dtype), []
    for t in range(len(x)):
        A = keep[t][:, None] * A + strength[t][:, None] * k[t].square()
        r = (A + 1e-6).log() - centre
        S = g[t].exp()[..., None] * S
        error = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
        S = S + (k[t] * 1.5 ** -(r / (1 + r.abs())))[..., None] * error[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", S, q[t]) * q.shape[2] ** -0.5)
    return output(layer, p, x, torch.stack(outputs), "o_norm", gate)


def plain_precond_gated_delta_rule(layer, p, x):
    g = -p["A_log"].exp() * F.softplus(F.linear(x, p["a_proj.weight"]) + p["dt_bias"])
    return preconditioned(layer, p, x, spread(g, layer.out_heads)[..., None], swish_gate(p, x), "a_atk_proj")


def plain_precond_kda(layer, p, x):
    f = low_rank(p, "f_proj", x) + p["dt_bias"]
    g = -p["A_log"].exp()[:, None] * F.softplus(f).view(len(x), layer.num_v_heads, -1)
    gate = low_rank(p, "g_proj", x).sigmoid() if "g_proj.0.weight" in p else None
    return preconditioned(layer, p, x, spread(g, layer.out_heads), gate, "a_proj")


def joint_output(p, o, norm, gate=None):
    o = normed(o.flatten(1), p[f"{norm}.weight"])
    return F.linear(o if gate is None else o * gate, p["o_proj.weight"])


def plain_hgrn2(layer, p, x):
    q, f, v = project(layer, p, x, letters="qfi", activation=lambda y: y)
    return joint_output(p, recurrence(F.silu(q), 1 - f.sigmoid(), v, f.sigmoid().log()), "g_norm", swish_gate(p, x))


def plain_hgrn(layer, p, x):
    i, f = (short_conv(p, n, F.linear(x, p[f"{n}_proj.weight"]), lambda y: y) for n in "if")
    h, outputs = torch.zeros_like(i[0]), []
    for t in range(len(x)):
        h = f[t].sigmoid() * h + (1 - f[t].sigmoid()) * F.silu(i[t])
        outputs.append(h)
    return F.linear(normed(torch.stack(outputs), p["g_norm.weight"]) * swish_gate(p, x), p["o_proj.weight"])


def plain_gsa(layer, p, x):
    q, k, v = project(layer, p, x)
    q, k, v = F.silu(q), F.silu(k), F.silu(v)
    forget = (F.logsigmoid(F.linear(x, p["f_proj.weight"])).view(len(x), layer.num_v_heads, -1) / 8).exp()
    forget = spread(forget, layer.out_heads)
    keys = torch.zeros(*forget.shape[1:], k.shape[2], dtype=x.dtype)  # [HV, M, K], and the values [HV, M, V]
    values, outputs = torch.zeros(*forget.shape[1:], v.shape[2], dtype=x.dtype), []
    for t in range(len(x)):
        a = forget[t][..., None]
        keys, values = a * keys + (1 - a) * k[t][:, None], a * values + (1 - a) * v[t][:, None]
        weight = torch.einsum("hmk,hk->hm", keys, q[t]).softmax(-1)
        outputs.append(torch.einsum("hmv,hm->hv", values, weight))
    return joint_output(p, F.silu(torch.stack(outputs)), "g_norm", swish_gate(p, x))


def plain_lightning_attn(layer, p, x):
    q, k, v = project(layer, p, x, silu_without_conv=True)
    g = -8 / layer.out_heads * torch.arange(layer.out_heads, dtype=x.dtype).expand(len(x), -1)
    gate = F.linear(x, p["g_proj.weight"]).sigmoid() if "g_proj.weight" in p else None
    return joint_output(p, recurrence(q, k, v, g), "norm", gate)


def rank_one_steps(q, forget, writes):
    """[T, HV, V]: forget, then for each (k, e, value) in turn S <- S + k (value - S'e)', then o = S'q / sqrt(K); all lists over tokens."""
    S, outputs = None, []
    for t in range(len(q)):
        if S is None:
            S = torch.zeros(q.shape[1], q.shape[2], writes[0][0][2].shape[-1], dtype=q.dtype)
        S = S * forget[t]
        for k, e, value in writes[t]:
            S = S + k[..., None] * (value - torch.einsum("hkv,hk->hv", S, e))[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", S, q[t]) * q.shape[2] ** -0.5)
    return torch.stack(outputs)


def plain_gated_delta_product(layer, p, x):
    T, R, HV = len(x), layer.steps, layer.out_heads
    q, k, v = (short_conv(p, n, F.linear(x, p[f"{n}_proj.weight"])) for n in "qkv")
    if "q_conv1d.weight" not in p:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    q = spread(unit(q.view(T, layer.num_heads, -1)), HV)
    k = [spread(unit(t.view(T, layer.num_k_heads, -1)), HV) for t in k.chunk(R, -1)]
    v = [spread(t.view(T, layer.num_v_heads, -1), HV) for t in v.chunk(R, -1)]
    beta = [spread(2 * t, HV)[..., None] for t in F.linear(x, p["b_proj.weight"]).sigmoid().chunk(R, -1)]
    g = spread(-p["A_log"].exp() * F.softplus(F.linear(x, p["a_proj.weight"]) + p["dt_bias"]), HV)
    writes = [[(k[j][t], beta[j][t] * k[j][t], beta[j][t] * v[j][t]) for j in range(R)] for t in range(T)]
    return output(layer, p, x, rank_one_steps(q, g.exp()[..., None, None], writes), "o_norm", swish_gate(p, x))


def plain_comba(layer, p, x):
    q, k, v = project(layer, p, x, silu_without_conv=True)
    q, k, HV = unit(q), unit(k), layer.out_heads
    per_head = lambda n: torch.repeat_interleave(p[n], HV // layer.num_k_heads)[:, None]
    e = k * per_head("decay").sigmoid()
    q = q - per_head("D") * e
    g = spread(-p["A_log"].exp() * F.softplus(F.linear(x, p["a_proj.weight"]) + p["dt_bias"]), HV)
    beta, S, outputs = write_strength(layer, p, x), torch.zeros(HV, q.shape[2], v.shape[2], dtype=x.dtype), []
    for t in range(len(x)):
        error = v[t] - torch.einsum("hkv,hk->hv", S, e[t])
        S = g[t].exp()[:, None, None] * S + k[t][..., None] * (beta[t][:, None] * error)[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", S, q[t]) * q.shape[2] ** -0.5)
    gate = F.linear(x, p["g_proj.weight"]).sigmoid() if "g_proj.weight" in p else None
    return output(layer, p, x, torch.stack(outputs), "o_norm", gate)


def plain_gdn2(layer, p, x):
    q, k, v = project(layer, p, x, silu_without_conv=True)
    q, k, HV, T = unit(q), unit(k), layer.out_heads, len(x)
    f = F.softplus(low_rank(p, "f_proj", x) + p["dt_bias"]).view(T, layer.num_k_heads, -1)
    forget = spread((-p["A_log"].exp()[:, None] * f).exp(), HV)
    b = spread(F.linear(x, p["b_proj.weight"]).sigmoid().view(T, layer.num_k_heads, -1), HV)
    w = spread(F.linear(x, p["w_proj.weight"]).sigmoid().view(T, layer.num_v_heads, -1), HV)
    o = rank_one_steps(q, forget[..., None], [[(k[t], b[t] * k[t], w[t] * v[t])] for t in range(T)])
    gate = low_rank(p, "g_proj", x).sigmoid() if "g_proj.0.weight" in p else None
    return output(layer, p, x, o, "o_norm", gate)


def plain_mamba2(layer, p, x):
    T, HV, G, K = len(x), layer.num_heads, layer.num_groups, layer.state_size
    width = HV * layer.head_v_dim
    z, mixed, dt = F.linear(x, p["in_proj.weight"]).split([width, width + 2 * G * K, HV], -1)
    value, B, C = short_conv({k.replace("conv1d", "all_conv1d"): t for k, t in p.items()}, "all", mixed).split([width, G * K, G * K], -1)
    value, B, C = value.view(T, HV, -1), spread(B.view(T, G, K), HV), spread(C.view(T, G, K), HV)
    dt = F.softplus(dt + p["dt_bias"])
    S, outputs = torch.zeros(HV, K, layer.head_v_dim, dtype=x.dtype), []
    for t in range(T):
        S = (-p["A_log"].exp() * dt[t]).exp()[:, None, None] * S + B[t][..., None] * (dt[t][:, None] * value[t])[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", S, C[t]) + p["D"][:, None] * value[t])
    y = torch.stack(outputs).view(T, G, -1) * F.silu(z).view(T, G, -1)
    return F.linear(normed(y, p["norm.weight"].view(G, -1)).flatten(1), p["out_proj.weight"])


def before(x):
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


def lora(p, name, x, act=lambda y: y):
    y = F.linear(act(F.linear(x, p[f"{name}.0.weight"])), p[f"{name}.2.weight"])
    return y + p[f"{name}.2.bias"] if f"{name}.2.bias" in p else y


def head_norm(p, o, eps):
    o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    return o.flatten(1) * p["g_norm.weight"] + p["g_norm.bias"]


def plain_rwkv6(layer, p, x):
    T, H, d = len(x), layer.num_heads, before(x) - x
    low = F.linear(x + d * p["x_mu"], p["x_proj.weight"]).tanh().chunk(5, -1)
    r, w, k, v, g = (x + d * (low[i] @ p["x_up"][i] + p["x_bias"][i]) for i in range(5))
    r, k, v, g = (F.linear(t, p[f"{n}_proj.weight"]) for n, t in zip("rkvg", (r, k, v, g)))
    w = lora(p, "w_lora", w, torch.tanh).exp().neg().exp()
    r, w, k, v = (t.view(T, H, -1) for t in (r, w, k, v))
    S, outputs = torch.zeros(H, k.shape[2], v.shape[2], dtype=x.dtype), []
    for t in range(T):
        pair = k[t][..., None] * v[t][:, None]
        outputs.append(torch.einsum("hkv,hk->hv", S + p["bonus"][..., None] * pair, r[t]))
        S = w[t][..., None] * S + pair
    return F.linear(head_norm(p, torch.stack(outputs), 1e-5) * F.silu(g), p["o_proj.weight"])


def plain_rwkv7(layer, p, x):
    T, H, d = len(x), layer.num_heads, before(x) - x
    r, w, k, v, a, g = (x + d * mix for mix in p["x_mix"])
    r, k, v = (F.linear(t, p[f"{n}_proj.weight"]) for n, t in zip("rkv", (r, k, v)))
    w = (-(-0.5 * torch.ones((), dtype=x.dtype)).exp() * lora(p, "w_lora", w, torch.tanh).sigmoid()).exp()
    a, g = lora(p, "a_lora", a).sigmoid(), lora(p, "g_lora", g, torch.sigmoid)
    kappa = (k * p["k_k"]).view(T, H, -1)
    kappa = kappa / kappa.norm(dim=-1, keepdim=True)
    k = k * (1 + (a - 1) * p["k_a"])
    r, w, k, v, a = (t.view(T, H, -1) for t in (r, w, k, v, a))
    S, outputs = torch.zeros(H, k.shape[2], v.shape[2], dtype=x.dtype), []
    for t in range(T):
        removed = torch.einsum("hkv,hk->hv", S, kappa[t])
        S = w[t][..., None] * S - (a[t] * kappa[t])[..., None] * removed[:, None] + k[t][..., None] * v[t][:, None]
        outputs.append(torch.einsum("hkv,hk->hv", S, r[t]))
    own = (r * k * p["r_k"]).sum(-1, keepdim=True) * v
    return F.linear((head_norm(p, torch.stack(outputs), layer.head_k_dim * 1e-5) + own.flatten(1)) * g, p["o_proj.weight"])


def restate(layer, x):
    if (plain := globals().get(f"plain_{layer.op}")) is None:
        raise NotImplementedError(f"write plain_{layer.op}(layer, p, x) in {Path(__file__).name}: the layer as its paper has it")
    return torch.stack([plain(layer, dict(layer.named_parameters()), row) for row in x])


SHAPES = {
    "defaults": {},
    "wide keys": dict(expand_k=1.5, expand_v=0.5, num_heads=3),
    "fewer key and value heads": dict(num_heads=6, num_kv_heads=2, expand_k=1.0),
    "three value heads a key head": dict(num_v_heads=6, head_dim=8),
    "without what is there, with what is not": dict(flip=True, conv_bias=True),
    "groups, three steps, few slots": dict(num_heads=6, num_groups=2, state_size=5, num_householder=3, num_slots=3),
}
OWN = {"num_groups", "num_householder", "num_slots"}


def fits(name, shape):
    """A shape says something about a member that takes all its options, or one of those that few take."""
    taken = {*mixer_class(name).options(), "num_heads", "flip"}
    if OWN & shape.keys():
        return bool(OWN & shape.keys() & taken)
    return shape.keys() <= taken and ("flip" not in shape or "use_gate" in taken)


@pytest.mark.parametrize(("name", "case"), [(n, c) for n in MEMBERS for c, s in SHAPES.items() if fits(n, s)])
def test_layer_is_its_paper(name, case):
    own, shape = mixer_class(name), SHAPES[case]
    options = {k: v for k, v in shape.items() if k == "num_heads" or k in set(own.options())}
    if "flip" in shape:
        options |= dict(use_short_conv=not own.use_short_conv, use_gate=not own.use_gate, conv_size=3)
    layer, x = build(name, **options).train(), draw(2, 37, D)
    wide = copy.deepcopy(layer).double()
    truth, honest = with_gradients(wide, restate, x.double()), with_gradients(layer, restate, x)
    agree_with_gradients(with_gradients(layer, lambda m, x: m(x)[0], x), truth, honest)


def test_every_operator_with_a_page_has_a_layer_and_a_restatement():
    assert set(MEMBERS) == {n[len("plain_") :] for n in globals() if n.startswith("plain_")}
    assert set(MEMBERS) <= public_functions().keys() and set(MEMBERS) - all_ops().keys() == {"hgrn"}
