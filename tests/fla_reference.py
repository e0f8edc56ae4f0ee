"""flash-linear-attention's own models on a CPU: its layers as they are, its kernels replaced by its own naive references and by PyTorch.

    python tests/fla_reference.py FOLDER      writes FOLDER/<name>/ as fla saves it, with logits.pt beside it: {"x", "logits"}

A process of its own, because it imports fla and changes it.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import fla
import torch
from fla.layers import attn
from fla.modules.activations import ACT2FN
from fla.ops.abc.naive import naive_recurrent_abc
from fla.ops.comba.naive import naive_chunk_comba
from fla.ops.delta_rule.naive import delta_rule_recurrence
from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.gsa.naive import naive_recurrent_gsa
from fla.ops.hgrn.naive import naive_recurrent_hgrn
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
from fla.ops.precond_gated_delta_rule import naive as precond_gdn
from fla.ops.precond_kda.naive import naive_recurrent_precond_kda
from fla.ops.retention.naive import naive_retention
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
from torch.nn import functional as F

SIZES = dict(hidden_size=16, num_hidden_layers=2, vocab_size=37, intermediate_size=24, initializer_range=0.3, fuse_cross_entropy=False)
HYBRID = dict(layers=[1], num_heads=4, num_kv_heads=2, window_size=6, rope_theta=5e3)
MODELS = {
    "RetNet": dict(num_heads=2),
    "RetNet, fewer key and value heads": dict(num_heads=4, num_kv_heads=2),
    "GLA": dict(num_heads=2),
    "GLA, convolved": dict(num_heads=2, use_short_conv=True),
    "GLA, without a gate": dict(num_heads=2, use_output_gate=False),
    "DeltaNet": dict(num_heads=2),
    "DeltaNet, gated, reflecting": dict(num_heads=2, use_gate=True, allow_neg_eigval=True),
    "GatedDeltaNet": dict(num_heads=2, head_dim=4, num_v_heads=4),
    "GatedDeltaNet, without a gate, tied": dict(num_heads=2, head_dim=4, use_gate=False, tie_word_embeddings=True),
    "KDA": dict(num_heads=2, head_dim=4, num_v_heads=4),
    "KDA, bounded": dict(num_heads=2, head_dim=4, safe_gate=True, lower_bound=-5.0),
    "LinearAttention": dict(num_heads=2),
    "LinearAttention, elu, means": dict(num_heads=2, feature_map="elu", norm_feature_map=True),
    "LinearAttention, hedgehog, tied": dict(num_heads=4, num_kv_heads=2, feature_map="hedgehog", tie_feature_map_qk=True),
    "LinearAttention, t2r, shares": dict(num_heads=2, feature_map="t2r", norm_q=True, norm_k=True),
    "LinearAttention, dpfp": dict(num_heads=2, expand_k=0.5, feature_map="dpfp"),
    "LinearAttention, relu, hybrid": dict(num_heads=2, feature_map="relu", norm_feature_map=True, tie_feature_map_qk=True, attn=HYBRID),
    "Mamba2": dict(head_dim=8, state_size=6, chunk_size=16, pad_token_id=0),
    "GatedDeltaProduct": dict(num_heads=2, head_dim=4, num_householder=2, use_forget_gate=True, allow_neg_eigval=True),
    "GatedDeltaProduct, one step, without a forget gate": dict(num_heads=2, head_dim=4),
    "Comba": dict(num_heads=2, head_dim=4),
    "GSA": dict(num_heads=2, num_slots=3),
    "ABC": dict(num_heads=2, num_slots=3),
    "ABC, convolved": dict(num_heads=2, num_slots=5, use_short_conv=True),
    "RWKV6": dict(num_heads=2, proj_low_rank_dim=3, gate_low_rank_dim=5),
    "RWKV7": dict(head_dim=8, decay_low_rank_dim=3, gate_low_rank_dim=5, a_low_rank_dim=4, v_low_rank_dim=6, fuse_norm=False),
    "HGRN": dict(),
    "HGRN, wide, convolved": dict(expand_ratio=2, use_short_conv=True),
    "PrecondGatedDeltaNet": dict(num_heads=2, head_dim=4, num_v_heads=4),
    "PrecondKDA": dict(num_heads=2, head_dim=4),
    "PrecondKDA, bounded": dict(num_heads=2, head_dim=4, safe_gate=True, lower_bound=-5.0, squash_x=1.2),
    "HGRN2": dict(expand_ratio=8),
    "Transformer": dict(num_heads=2, num_kv_heads=1),
    "Transformer, windowed": dict(num_heads=2, window_size=5),
    "GatedDeltaNet, hybrid": dict(num_heads=2, head_dim=4, attn=HYBRID),
}


def rms(x, weight=None, bias=None, residual=None, eps=1e-5, prenorm=False, **_):
    x = x if residual is None else x + residual
    y = F.rms_norm(x, x.shape[-1:], weight, eps)
    return (y, x) if prenorm else y


def rms_gated(x, g, weight, bias, activation="swish", eps=1e-6, **_):
    return rms(x, weight, eps=eps) * (g.sigmoid() if activation == "sigmoid" else F.silu(g))


def conv(x, weight, bias=None, activation=None, **_):
    y = F.conv1d(F.pad(x.mT, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=x.shape[-1]).mT
    return (F.silu(y) if activation else y), None


def rotary(x, cos, sin, **_):
    cos, sin = (torch.cat([t[: x.shape[1]]] * 2, -1)[None, :, None] for t in (cos, sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def flash(q, k, v, causal=True, window_size=(-1, -1), **_):
    n, T = q.shape[2] // k.shape[2], q.shape[1]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(n, 2), v.repeat_interleave(n, 2)))
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & ((distance <= window_size[0]) if window_size[0] >= 0 else True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


def gsa(q, k, v, s, g, scale=None, **_):
    return naive_recurrent_gsa(q, k, v, s, g, scale)


def norm_linear(x, norm_weight, norm_bias, linear_weight, linear_bias, eps=1e-5, **_):
    return F.linear(rms(x, norm_weight, eps=eps), linear_weight)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def heads(q, k, v):
    n = v.shape[2] // q.shape[2]
    return unit(q).repeat_interleave(n, 2), unit(k).repeat_interleave(n, 2), v


def raw_beta(beta, negative):
    return beta.sigmoid() * (2 if negative else 1)


def gdn(q, k, v, g, beta, A_log=None, dt_bias=None, allow_neg_eigval=False, **_):
    g = -A_log.exp() * F.softplus(g + dt_bias)
    return naive_recurrent_gated_delta_rule(*heads(q, k, v), raw_beta(beta, allow_neg_eigval), g)


def kda(q, k, v, g, beta, A_log=None, dt_bias=None, lower_bound=None, allow_neg_eigval=False, **_):
    g = kda_gate(g, A_log, dt_bias, lower_bound)
    return naive_recurrent_kda(*heads(q, k, v), g, raw_beta(beta, allow_neg_eigval))


def kda_gate(g, A_log, dt_bias=None, lower_bound=None, **_):
    f, A = g + dt_bias.view(g.shape[2:]), A_log.exp()[:, None]
    return -A * F.softplus(f) if lower_bound is None else lower_bound * (A * f).sigmoid()


def preconditioned(q, k, v, g, g_atk, beta, beta_atk, log_atk_scale=None, **given):
    given = {n: given[n] for n in ("x", "eps") if n in given} | dict(g=g, g_atk=g_atk, beta=beta, beta_atk=beta_atk)
    naive = naive_recurrent_precond_kda if g.ndim == 4 else precond_gdn.naive_recurrent_precond_gated_delta_rule
    return naive(unit(q), unit(k), v, **given, log_atk_scale=log_atk_scale)


def gla(q, k, v, g=None, gk=None, **_):
    return naive_recurrent_gla(q, k, v, g if gk is None else gk)


def delta(q, k, v, beta=None, **_):
    o, _ = delta_rule_recurrence(*(t.transpose(1, 2) for t in (unit(q), unit(k), v, beta)))
    return o.transpose(1, 2), None


def product(q, k, v, g, beta, num_householder, **_):
    q, k, v = heads(q, k, v)
    return naive_recurrent_gated_delta_product(q, k, v, g, beta, q.shape[-1] ** -0.5, None, None, num_householder=num_householder)


def comba(q, k, v, p, g, beta, **_):
    """As fla's kernels and its chunked reference have it: it erases what was there before forgetting; its recurrent one forgets first."""
    return naive_chunk_comba(unit(q), unit(k), v, unit(p), g, beta, chunk_size=q.shape[1])


def additive(q, k, v, normalize=False, **_):
    return naive_recurrent_linear_attn(q, k, v, normalize=normalize)


def retention(q, k, v, **_):
    return naive_retention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2), None


def abc(q, k, v, s, **_):
    o, _ = naive_recurrent_abc(*(t.transpose(1, 2) for t in (q, k, v, s)))
    return o.transpose(1, 2), None


def shift(x, cu_seqlens=None, cache=None, output_cache=False):
    delta = F.pad(x, (0, 0, 1, -1)) - x
    return (delta, x[:, -1]) if output_cache else delta


def mixtures(x, delta, *mixed):
    return [x.addcmul(delta, m) for m in mixed]


def layer_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, **_):
    x = x if residual is None else x + residual
    y = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return (y, x) if prenorm else y


def group_norm(x, weight, bias, residual=None, eps=1e-5, num_groups=1, **_):
    return F.group_norm(x.flatten(0, -2), num_groups, weight, bias, eps).view(x.shape)


def correction(o, r, k, r_k, v, g):
    return (o + ((r * k * r_k).sum(-1, keepdim=True) * v).flatten(-2)) * g


def six(r, k, v, w, u, scale=1.0, **_):
    o, _ = naive_recurrent_rwkv6(*(t.transpose(1, 2) for t in (r, k, v, w)), u, scale=scale)
    return o.transpose(1, 2), None


def seven(r, w, k, v, a, b, **_):
    """By fla's reference of DPLR, which RWKV-7 is a case of: there is none of its own. It divides by sqrt(K)."""
    o, _ = dplr_recurrence(*(t.transpose(1, 2) for t in (r * r.shape[-1] ** 0.5, k, v, a, b, w)))
    return o.transpose(1, 2), None


def gated_norm(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True, **_):
    y = x * F.silu(z)
    return rms(y.unflatten(-1, (-1, group_size or y.shape[-1])), eps=eps).flatten(-2) * weight


REPLACED = {
    "rms_norm": rms, "rms_norm_gated": rms_gated, "causal_conv1d": conv, "rotary_embedding": rotary, "elu_p1": lambda x: F.elu(x) + 1,
    "swiglu": lambda x, y: F.silu(x) * y, "swiglu_linear": lambda x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias),
    "chunk_gated_delta_rule": gdn, "fused_recurrent_gated_delta_rule": gdn, "chunk_kda": kda, "fused_recurrent_kda": kda,
    "chunk_gla": gla, "fused_recurrent_gla": gla, "chunk_delta_rule": delta, "fused_recurrent_delta_rule": delta,
    "chunk_linear_attn": additive, "fused_recurrent_linear_attn": additive, "chunk_retention": retention,
    "fused_recurrent_retention": retention, "chunk_gated_delta_product": product, "chunk_comba": comba, "fused_recurrent_comba": comba,
    "flash_attn_func": flash, "chunk_rwkv6": six, "fused_recurrent_rwkv6": six, "chunk_rwkv7": seven, "token_shift": shift,
    "fused_addcmul_rwkv7": mixtures, "fused_k_rwkv7": lambda k, a, k_a: k.addcmul(k * (a - 1), k_a), "layer_norm": layer_norm,
    "group_norm": group_norm, "gate_output_correction": correction, "l2_norm": unit, "chunk_abc": abc,
    "fused_kda_gate": kda_gate, "chunk_precond_kda": preconditioned, "fused_recurrent_precond_kda": preconditioned,
    "chunk_precond_gated_delta_rule": preconditioned, "fused_recurrent_precond_gated_delta_rule": preconditioned,
    "chunk_hgrn": naive_recurrent_hgrn, "fused_recurrent_hgrn": lambda x, g, **_: naive_recurrent_hgrn(x, g),
    "chunk_gsa": gsa, "fused_recurrent_gsa": gsa, "rms_norm_linear": norm_linear, "swish": F.silu, "rmsnorm_fn": gated_norm,
}  # fmt: skip


def main(folder: Path) -> None:
    ACT2FN.update(swish=F.silu, silu=F.silu, sqrelu=lambda x: F.relu(x).square())
    precond_gdn.F = SimpleNamespace(normalize=lambda x, **_: x)  # it makes unit vectors of its own, without the eps of fla's kernels
    attn.flash_attn_func = flash  # a layer without flash-attn refuses to be built
    for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == "fla"]:
        for name in REPLACED.keys() & vars(module).keys():
            setattr(module, name, REPLACED[name])
    torch.manual_seed(0)
    x = torch.randint(1, 37, (2, 21))
    for name, given in MODELS.items():
        kind = name.partition(",")[0]
        config = getattr(fla.models, f"{kind}Config")(**SIZES, **given)
        model = getattr(fla.models, f"{kind}ForCausalLM")(config).eval()
        with torch.no_grad():
            for n, p in model.named_parameters():
                if (p.ndim == 1 or not p.any()) and not n.endswith(("A_log", "dt_bias")):
                    p.add_(0.2 * torch.randn_like(p))
            if kind in ("GatedDeltaProduct", "RWKV7"):  # as in training: short calls take an inference kernel's path otherwise
                model.train()
            logits = model(x, use_cache=False).logits
        state = {n: t.clone() if "feature_map_k" in n else t for n, t in model.state_dict().items()}  # transformers saves no tied maps
        model.save_pretrained(folder / name, state_dict=state)
        torch.save({"x": x, "logits": logits}, folder / name / "logits.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
