"""What members are to each other and to their papers: identities that `step` and the engine do not know of."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from oracle import check, operator_checks

import chunkwise
from chunkwise.spec import Rule, all_ops

SIZES = dict(B=2, T=37, H=2, HV=4, K=5, V=6)
OPS = all_ops()


def draw(name, seed=0, dtype=torch.float64, **sizes):
    return OPS[name].draw({**SIZES, **sizes}, seed=seed, dtype=dtype)


def same(name, x, other, y, tie=lambda o: o, **options):
    """Two members on their inputs: outputs and last states agree."""
    (o, S), (p, R) = OPS[name](x, output_final_state=True, chunk_size=16), OPS[other](y, output_final_state=True, chunk_size=16, **options)
    check({"o": o, "state": tie(S)}, {"o": p, "state": R})


def test_lightning_heads_decay_as_the_paper_says():
    x = draw("lightning_attn")
    for layer, layers in ((0, 1), (2, 8), (7, 8)):
        slopes = torch.tensor([-(8 / 4) * (1 - layer / layers) * h for h in range(4)], dtype=torch.float64)
        g = slopes.expand(2, 37, 4).contiguous()
        want, _ = chunkwise.simple_gla(**x, g=g)
        check({"o": chunkwise.lightning_attn(**x, layer_idx=layer, num_layers=layers)[0]}, {"o": want})


@pytest.mark.parametrize(("layer", "layers"), [(-1, 4), (4, 4), (0, 0)])
def test_layers_are_numbered_below_their_number(layer, layers):
    with pytest.raises(ValueError, match="lightning_attn: layer_idx must be in 0"):
        chunkwise.lightning_attn(**draw("lightning_attn"), layer_idx=layer, num_layers=layers)


@pytest.mark.parametrize("member", ["retention", "lightning_attn"])
def test_every_numbered_head_is_a_call_of_its_own(member):
    x = draw(member, HV=2)
    whole, _ = OPS[member](x)
    rate = {"retention": lambda h: math.log(1 - 2.0 ** (-5 - h)), "lightning_attn": lambda h: -(8 / 2) * (1 - 3 / 12) * h}[member]
    for h in range(2):
        one = {n: t[:, :, h : h + 1] for n, t in x.items()}
        check({"o": whole[:, :, h : h + 1]}, {"o": chunkwise.simple_gla(**one, g=torch.full((2, 37, 1), rate(h), dtype=torch.float64))[0]})


def test_hgrn2_is_gla_with_the_keys_its_gates_leave():
    x = draw("hgrn2")
    wide = x["g"].repeat_interleave(2, 2)
    same("hgrn2", x, "gla", dict(q=x["q"], k=1 - x["g"].exp(), v=x["v"], g=wide))


def test_rwkv6_reads_before_it_writes():
    x = draw("rwkv6", HV=2)
    o, _ = chunkwise.rwkv6(**x)
    own = (x["r"] * x["u"] * x["k"]).sum(-1, keepdim=True) * 5**-0.5 * x["v"]
    check({"first": o[:, :1]}, {"first": own[:, :1]})
    after, _ = chunkwise.linear_attn(x["r"], x["k"], x["v"])
    past = after - (x["r"] * x["k"]).sum(-1, keepdim=True) * 5**-0.5 * x["v"]
    check({"o": chunkwise.rwkv6(**dict(x, w=torch.zeros_like(x["w"])))[0]}, {"o": own + past})


def test_comba_that_erases_what_is_left_is_the_gated_delta_rule():
    x = draw("comba", HV=2)
    y = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    same("comba", dict(x, p=x["k"] * x["g"].exp()[..., None]), "gated_delta_rule", y)


def test_comba_erases_before_it_forgets():
    x = {n: t[:, :1] for n, t in draw("comba", HV=2).items()}
    S0 = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    _, S = chunkwise.comba(**x, initial_state=S0, output_final_state=True)
    q, k, v, p, g, beta = (t[:, 0] for t in x.values())
    held = torch.einsum("bhk,bhkv->bhv", p, S0)
    want = g.exp()[..., None, None] * S0 + torch.einsum("bhk,bhv->bhkv", k, beta[..., None] * (v - held))
    check({"state": S}, {"state": want})


def test_gdn2_with_one_gate_for_both_is_kda():
    x = draw("kda")
    b, w = x["beta"][..., None].expand(2, 37, 4, 5), x["beta"][..., None].expand(2, 37, 4, 6)
    same("gdn2", dict({n: x[n] for n in "qkvg"}, b=b, w=w), "kda", x)


def test_iplr_holds_the_delta_rule():
    x = draw("delta_rule")
    k = x["k"].repeat_interleave(2, 2)
    y = dict(q=x["q"], k=x["k"], v=x["beta"][..., None] * x["v"], a=-x["beta"][..., None] * k, b=k)
    same("iplr_delta_rule", y, "delta_rule", x)


def test_dplr_without_gates_is_iplr_and_rwkv7_is_dplr():
    x = draw("iplr_delta_rule")
    same("dplr_delta_rule", dict(x, g=torch.zeros_like(x["a"])), "iplr_delta_rule", x)
    x = draw("rwkv7", HV=2)
    same("rwkv7", x, "dplr_delta_rule", dict(q=x["r"], k=x["k"], v=x["v"], a=x["a"], b=x["b"], g=x["w"]), scale=1.0)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_product_is_delta_steps_of_which_the_last_is_read(steps):
    x = OPS["gated_delta_product"].draw(dict(SIZES, R=steps), dtype=torch.float64)
    flat = {n: x[n].flatten(1, 2) for n in ("k", "v", "beta")}
    cu = torch.tensor([0, 5, 5, 37])
    for form in ("chunk", "recurrent"):
        row = dict(q=x["q"][:1], g=x["g"][:1], **{n: t[:1] for n, t in flat.items()})
        o, S = chunkwise.gated_delta_product(**row, num_householder=steps, cu_seqlens=cu, output_final_state=True, form=form)
        q = x["q"][:1].repeat_interleave(steps, 1)
        g = torch.stack([x["g"][:1] if j == 0 else torch.zeros_like(x["g"][:1]) for j in range(steps)], 2).flatten(1, 2)
        p, R = chunkwise.gated_delta_rule(q, row["k"], row["v"], g, row["beta"], cu_seqlens=cu * steps, output_final_state=True)
        check({"o": o, "state": S}, {"o": p[:, steps - 1 :: steps], "state": R})


@pytest.mark.parametrize(
    ("gated", "plain"),
    [("gated_delta_rule", "delta_rule"), ("kda", "delta_rule"), ("simple_gla", "linear_attn"), ("gla", "linear_attn")],
)
@pytest.mark.parametrize("T", [7, 65, 513])
def test_gates_of_one_are_no_gates(gated, plain, T):
    x = draw(gated, T=T)
    same(gated, {**x, "g": torch.zeros_like(x["g"])}, plain, {n: t for n, t in x.items() if n != "g"})


def test_a_product_without_gate_or_strength_is_one_of_ones():
    x = draw("gated_delta_product")
    k, v = (x[n].flatten(1, 2) for n in ("k", "v"))
    plain, _ = chunkwise.gated_delta_product(x["q"], k, v, None, None, 2)
    check({"o": plain}, {"o": chunkwise.gated_delta_product(x["q"], k, v, x["g"] * 0, torch.ones_like(x["beta"]).flatten(1, 2), 2)[0]})


def test_rows_of_a_product_are_tokens_times_steps():
    x = draw("gated_delta_product")
    k, v, beta = (x[n].flatten(1, 2) for n in ("k", "v", "beta"))
    for name, bad in (("k", dict(k=k[:, :-1])), ("v", dict(v=v[:, :37])), ("beta", dict(beta=beta[:, 1:]))):
        with pytest.raises(ValueError, match=f"gated_delta_product: {name} must have T \\* num_householder = 37 \\* 2 rows"):
            chunkwise.chunk_gated_delta_product(**{**dict(q=x["q"], k=k, v=v, g=x["g"], beta=beta), **bad}, num_householder=2)
    with pytest.raises(ValueError, match="num_householder must be at least 1, got 0"):
        chunkwise.gated_delta_product(x["q"], k, v, x["g"], beta, 0)


def test_mamba2_is_the_state_space_model():
    x = draw("mamba2")
    want, S = [], torch.zeros(2, 4, 6, 5, dtype=torch.float64)  # Mamba's states are V before K
    B, C = x["B"].repeat_interleave(2, 2), x["C"].repeat_interleave(2, 2)
    dt = F.softplus(x["dt"] + x["dt_bias"])
    for t in range(37):
        S = torch.exp(dt[:, t] * x["A"])[..., None, None] * S + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x["x"][:, t], B[:, t])
        want.append(torch.einsum("bhpn,bhn->bhp", S, C[:, t]) + x["D"][:, None] * x["x"][:, t])
    y, ST = chunkwise.chunk_mamba2(**x, dt_softplus=True, state_v_first=True, output_final_state=True)
    check({"y": y, "state": ST}, {"y": torch.stack(want, 1), "state": S})
    bare, _ = chunkwise.mamba2(*(x[n] for n in ("x", "dt", "A", "B", "C")))
    full, _ = chunkwise.mamba2(**dict(x, D=torch.zeros(4).double(), dt_bias=torch.zeros(4).double()))
    check({"y": bare}, {"y": full})


def slots(x, weights, keep):
    """Two-pass slot attention by sums over pairs: weights [B, T, HV, M] of tokens, keep [B, T, T, HV, M] what is left of them later."""
    k, q = (x[n].repeat_interleave(2, 2) for n in "kq")
    held = torch.einsum("btshm,bshm->btshm", keep, weights)
    Hk, Hv = torch.einsum("btshm,bshk->bthkm", held, k), torch.einsum("btshm,bshv->bthmv", held, x["v"])
    p = torch.einsum("bthkm,bthk->bthm", Hk, q * 5**-0.5).softmax(-1)
    return torch.einsum("bthm,bthmv->bthv", p, Hv)


def test_gated_slots_by_pairs():
    x = draw("gsa")
    G = x["g"].cumsum(1)
    later = torch.ones(37, 37, dtype=torch.bool).triu(1)[None, :, :, None, None]
    keep = (G[:, :, None] - G[:, None]).masked_fill(later, -torch.inf).exp()
    check({"o": chunkwise.gsa(**x)[0]}, {"o": slots(x, x["s"], keep)})


@pytest.mark.parametrize("size", [1.0, 50.0])
def test_bounded_memory_by_pairs(size):
    x = draw("abc")
    x["s"] = x["s"] * size
    causal = torch.ones(37, 37, dtype=torch.bool).tril()[None, :, :, None, None]
    share = x["s"][:, None].expand(2, 37, 37, 4, 6).masked_fill(~causal, -torch.inf).softmax(2)
    check({"o": chunkwise.abc(**x)[0]}, {"o": slots(x, torch.ones_like(x["s"]), share)})


@pytest.mark.parametrize("shift", [-3000.0, 3000.0])
def test_bounded_memory_knows_no_zero_of_its_logits(shift):
    x = draw("abc", dtype=torch.float32)
    x["s"] = (x["s"] * 8).round() / 8  # so that adding the shift loses nothing
    S0 = torch.randn(2, 4, 6, 12)
    S0[..., -1] = (S0[..., -1] * 8).round() / 8
    moved = S0.clone()
    moved[..., -1] += shift
    o, _ = chunkwise.abc(**x, initial_state=S0)
    p, _ = chunkwise.abc(**dict(x, s=x["s"] + shift), initial_state=moved)
    assert torch.equal(o, p)


@pytest.mark.parametrize("rule", ["precond_gated_delta_rule", "precond_kda"])
def test_a_preconditioner_that_rescales_nothing_is_none(rule):
    x = draw(rule)
    o, S = OPS[rule](x, x=1.0, output_final_state=True, chunk_size=16)
    y = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    p, R = OPS[rule.removeprefix("precond_")](y, output_final_state=True, chunk_size=16)
    seen = x["beta_atk"][..., None] * x["k"].square()
    _, A = chunkwise.hgrn(seen.flatten(2), x["g_atk"][..., None].expand_as(seen).flatten(2), output_final_state=True)
    check({"o": o, "state": S[..., :-1], "A": S[..., -1]}, {"o": p, "state": R, "A": A.view(2, 2, 5).repeat_interleave(2, 1)})
    assert not torch.allclose(o, OPS[rule](x)[0])
    default, _ = OPS[rule](dict(x, log_atk_scale=None))
    check({"o": default}, {"o": OPS[rule](dict(x, log_atk_scale=torch.full((2,), -0.2, dtype=torch.float64)))[0]})


@pytest.mark.parametrize("name", [n for n, op in OPS.items() if op.rule is not Rule.ADD])
def test_states_stay_bounded_on_unit_keys(name):
    op = OPS[name]
    x = op.draw(dict(B=1, T=600, H=1, HV=1, K=8, V=4), dtype=torch.float32)
    values = "v" if "v" in x else "x"
    x[values] = F.normalize(x[values], dim=-1)
    for gate in ("g", "w"):
        if gate in x and op.args[gate].draw.__name__ == "log_decay":
            x[gate] = x[gate] * 1e-3
    o, S = op(x, output_final_state=True)
    room = 600**0.5 if op.rule is Rule.DPLR else 8  # dplr writes k v' whatever it removes: a random walk
    assert o.isfinite().all() and S.norm() < 4 * room * (2 if name.startswith("precond") else 1)


def test_long_keys_grow_without_limit_and_normalising_them_helps():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 1, 64, dtype=torch.float64) for _ in range(3))
    _, S = chunkwise.delta_rule(q, k, v, output_final_state=True)
    _, N = chunkwise.delta_rule(q, k, v, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert S.abs().max() > 1e20 and N.abs().max() < 10


def test_a_gate_on_the_value_side_passes_torch_s_checks():
    q, k, v = (torch.randn(2, 20, h, d) for h, d in ((1, 4), (1, 4), (2, 3)))
    g, S0 = F.logsigmoid(torch.randn(2, 20, 2, 3)), torch.randn(2, 2, 4, 3)
    operator_checks((q, k, v, g, *[None] * 5, S0, None), "value", "add", "chunk")


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (dict(query="r"), "declares no input r"),
        (dict(lower=None), "must declare lower or passes"),
        (dict(state="N HV K"), "state must have four axes"),
    ],
)
def test_broken_declarations_are_rejected(broken, text):
    with pytest.raises(ValueError, match=f"gla: {text}"):
        dataclasses.replace(OPS["gla"], **broken)
