"""fla's operators under their own signatures: each computes its member's definition, from and to fla's states."""

import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nn_agreement import agree

from chunkwise.compat import alias as aliases
from chunkwise.compat import install_as_fla
from chunkwise.compat.alias import parameters
from chunkwise.compat.fla_op import OPS, SHORT
from chunkwise.engine.dispatch import DIGITS
from chunkwise.reference import reference
from chunkwise.spec import all_ops

SIZES = dict(B=2, T=19, H=2, HV=2, K=6, V=4)
RECORDED = dict(line.split("(", 1) for line in (Path(__file__).parent / "fla_signature.txt").read_text().splitlines())  # fla 0.6.0's own
by_name = pytest.mark.parametrize("alias", OPS, ids=lambda a: a.name)
members = pytest.mark.parametrize("alias", [a for a in OPS if a.folder != "hgrn"], ids=lambda a: a.name)
carrying = [a for a in OPS if a.folder not in ("hgrn", "abc") and "initial_state" in parameters(a.signature)]


def named(name):
    return next(a for a in OPS if a.name == name)


def member(alias):
    last = alias.folder.rpartition(".")[2]
    return all_ops()[{"dplr": "dplr_delta_rule", "iplr": "iplr_delta_rule"}.get(last, last)]


def drawn(alias):
    """The member of an alias, its inputs in float32, and the same as fla calls them."""
    op = member(alias)
    x = {n: t.float() for n, t in op.draw(SIZES, dtype=torch.float64).items()}
    if alias.folder.startswith("precond") and "use_qk_l2norm_in_kernel" not in parameters(alias.signature):
        x |= {n: torch.nn.functional.normalize(x[n], dim=-1) for n in "qk"}  # that name always normalises
    back = {new: old for old, new in alias.rename.items()}
    given = {back.get(n, n): t for n, t in x.items()} | dict(op.settings)
    if op.name == "gated_delta_product":
        given |= {n: x[n].flatten(1, 2) for n in ("k", "v", "beta")} | {"num_householder": x["k"].shape[2]}
    if alias.name == "fused_mul_recurrent_rwkv7":
        given |= {"kk": -x["a"], "a": -x["b"] / x["a"]}
    return op, x, {n: t for n, t in given.items() if n in parameters(alias.signature)}


def call(alias, given, **options):
    """As fla's callers do: what has no default by position. Options that the name does not take are left out."""
    takes = parameters(alias.signature)
    plain = {n: False for n in ("normalize", "use_qk_l2norm_in_kernel") if n in takes}
    position = [given[n] for n, d in takes.items() if n in given and d is inspect.Parameter.empty]
    keywords = {n: t for n, t in given.items() if takes[n] is not inspect.Parameter.empty}
    return alias.function()(*position, **keywords, **plain, **{n: o for n, o in options.items() if n in takes})


def per_token(alias, name):
    op, own = member(alias), "a" if name == "kk" else alias.rename.get(name, name)
    return own in op.args and op.args[own].per_token


def flat(states):
    return [s for state in states for s in (state if isinstance(state, tuple) else (state,))]


@by_name
def test_parameters_are_those_of_fla_in_the_same_order(alias):
    takes = parameters(alias.signature)
    shown = inspect.signature(alias.function()).parameters
    assert list(shown) == list(takes) and {n: p.default for n, p in shown.items()} == dict(takes)
    assert {p.kind for p in shown.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    theirs = parameters(f"f({RECORDED[alias.name]}")
    assert list(takes)[: len(theirs)] == list(theirs) and {n: takes[n] for n in theirs} == dict(theirs)


@members
def test_each_name_computes_its_member(alias):
    op, x, given = drawn(alias)
    scale = 0.3 if "scale" in parameters(alias.signature) else None
    o = call(alias, given, scale=scale)[0]
    agree({"o": o}, {"o": reference(op, x, scale=scale)[0]}, {"o": reference(op, x, dtype=None, scale=scale)[0]})


@pytest.mark.parametrize("alias", carrying, ids=lambda a: a.name)
def test_states_carry_in_the_form_that_fla_has(alias):
    op, x, given = drawn(alias)
    steps = given.get("num_householder", 1)

    def part(a, b, *states):
        def cut(n, t):
            many = steps if n in ("k", "v", "beta") else 1
            return t[:, a * many : b * many] if per_token(alias, n) else t

        before = dict(zip(("initial_state", "initial_A_state"), states))
        return call(alias, {n: cut(n, t) for n, t in given.items()}, output_final_state=True, **before)

    first = part(0, 12)
    second = part(12, 19, *first[1:])
    scale = x[op.query].shape[-1] ** -0.5 if parameters(alias.signature)["scale"] is None else 1.0
    truth, honest = (reference(op, x, dtype=d, scale=scale)[0] for d in (torch.float64, None))
    agree({"o": torch.cat([first[0], second[0]], 1)}, {"o": truth}, {"o": honest})
    assert {s.dtype for s in flat(second[1:])} == {torch.float32}


def test_states_are_laid_out_as_callers_of_fla_expect():
    B, H, K, V, M = 2, 2, 6, 4, all_ops()["gsa"].draw(SIZES)["s"].shape[-1]
    shapes = {
        "chunk_gla": [(B, H, K, V)],
        "chunk_gsa": [(B, H, K, M), (B, H, M, V)],
        "chunk_precond_kda": [(B, H, K, V), (B, H, K)],
    }
    for name, want in shapes.items():
        out = call(named(name), drawn(named(name))[2], output_final_state=True)
        assert [tuple(s.shape) for s in flat(out[1:])] == want
    q, k, v = torch.rand(B, 19, H, K), torch.rand(B, 19, H, K), torch.randn(B, 19, H, V)
    o, (S, z) = named("chunk_linear_attn").function()(q, k, v, output_final_state=True)  # normalises by default
    assert S.shape == (B, H, K, V)
    torch.testing.assert_close(z, k.sum(1, keepdim=True))
    weights = torch.einsum("bthk,bshk->bhts", q, k).tril()
    torch.testing.assert_close(o, torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v))


def test_state_v_first_and_its_older_name():
    alias = named("chunk_gated_delta_rule")
    given = drawn(alias)[2]
    plain = call(alias, given, output_final_state=True)[1]
    assert torch.equal(call(alias, given, output_final_state=True, state_v_first=True)[1], plain.mT)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        assert torch.equal(call(alias, given, output_final_state=True, transpose_state_layout=True)[1], plain.mT)


@pytest.mark.parametrize("alias", [a for a in OPS if "reverse" in parameters(a.signature)], ids=lambda a: a.name)
def test_reverse_runs_from_the_last_token_of_each_sequence_to_its_first(alias):
    given = {n: t[:1] if per_token(alias, n) else t for n, t in drawn(alias)[2].items()}
    got = call(alias, given, reverse=True, cu_seqlens=torch.tensor([0, 7, 7, 19]), output_final_state=True)
    for i, (a, b) in ((0, (0, 7)), (2, (7, 19))):
        turned = {n: t[:, a:b].flip(1) if per_token(alias, n) else t for n, t in given.items()}
        alone = call(alias, turned, output_final_state=True)
        torch.testing.assert_close(got[0][:, a:b], alone[0].flip(1))
        for whole, one in zip(flat(got[1:]), flat(alone[1:]), strict=True):
            torch.testing.assert_close(whole[i : i + 1], one)


def test_gates_may_be_given_as_fla_names_them():
    x = drawn(named("chunk_gated_delta_rule"))[2]
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    gk = -torch.rand(2, 19, 2, 6)
    recurrent, kda = (named(n).function() for n in ("fused_recurrent_gated_delta_rule", "chunk_kda"))
    torch.testing.assert_close(recurrent(q, k, v, g, gk, beta=beta)[0], kda(q, k, v, gk + g[..., None], beta)[0])
    simple, gamma = named("chunk_simple_gla").function(), torch.tensor([-0.1, -0.4])
    torch.testing.assert_close(simple(q, k, v, g, gamma)[0], simple(q, k, v, g + gamma)[0])
    torch.testing.assert_close(simple(q, k, v)[0], named("chunk_linear_attn").function()(q, k, v, normalize=False)[0])
    bounded = kda(q, k, v, gk, beta, use_gate_in_kernel=True, lower_bound=-5.0, safe_gate=True)[0]
    torch.testing.assert_close(bounded, kda(q, k, v, -5 * gk.sigmoid(), beta)[0])


@pytest.mark.parametrize(
    "name, options, error, said",
    [
        ("chunk_gla", dict(chunksize=64), TypeError, "chunk_gla: unexpected keyword 'chunksize'; it takes q, k, v"),
        ("chunk_gla", dict(q=None), TypeError, "chunk_gla: q is given twice"),
        ("chunk_delta_rule", dict(head_first=True), ValueError, "head first"),
        ("chunk_kda", dict(cp_context=object()), ValueError, "chunk_kda: cp_context: chunkwise has no context parallelism"),
        ("chunk_kda", dict(return_intermediate_states=True), ValueError, "return_intermediate_states"),
        ("parallel_retention", dict(output_attentions=True), ValueError, "output_attentions"),
        ("fused_recurrent_gla", dict(gv=torch.zeros(1)), ValueError, "gv"),
        ("fused_recurrent_gated_delta_rule", dict(gv=torch.zeros(1)), ValueError, "gv"),
        ("chunk_gsa", dict(g=None), ValueError, "g must be given"),
        ("chunk_abc", dict(output_final_state=True), ValueError, "output_final_state"),
        ("chunk_precond_kda", dict(solve_tril_precision="tf16"), ValueError, "solve_tril_precision must be None or .*tf32x3.*, got 'tf16'"),
    ],
)
def test_what_cannot_be_met_is_refused_by_name(name, options, error, said):
    alias = named(name)
    given, takes = drawn(alias)[2], parameters(alias.signature)
    position = [given[n] for n, d in takes.items() if n in given and d is inspect.Parameter.empty]
    with pytest.raises(error, match=said):
        alias.function()(*position, **options)


def test_missing_and_superfluous_arguments_are_named():
    function = named("chunk_kda").function()
    with pytest.raises(TypeError, match="chunk_kda: needs g, beta"):
        function(1, 2, 3)
    with pytest.raises(TypeError, match="takes at most"):
        function(*range(99))


def test_any_chunk_size_is_taken():
    """transformers' own tests pass 4; the result does not depend on it."""
    alias = named("chunk_gated_delta_rule")
    given = drawn(alias)[2]
    assert torch.equal(call(alias, given, chunk_size=4)[0], call(alias, given)[0])
    torch.testing.assert_close(call(alias, given, chunk_size=16)[0], call(alias, given)[0])


def test_the_precision_of_the_solve_is_the_inverse_s(monkeypatch):
    asked, evaluate = [], aliases.evaluate
    monkeypatch.setattr(aliases, "evaluate", lambda target, x: asked.append(x.get("inverse_precision", "auto")) or evaluate(target, x))
    alias = named("chunk_precond_kda")
    for way in (None, *DIGITS):
        call(alias, drawn(alias)[2], solve_tril_precision=way)
    assert asked == ["auto", *DIGITS]


def test_hgrn_is_the_elementwise_scan():
    x, g = torch.randn(2, 9, 5), -torch.rand(2, 9, 5)
    h, last = named("fused_recurrent_hgrn").function()(x, g, output_final_state=True)
    state = torch.zeros(2, 5)
    for t in range(9):
        state = g[:, t].exp() * state + x[:, t]
        torch.testing.assert_close(h[:, t], state)
    torch.testing.assert_close(last, state)


def test_installed_modules_are_found_as_packages_are():
    with install_as_fla() as done:
        import causal_conv1d
        import fla
        from fla.ops import chunk_gdn
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule as deep

        assert chunk_gdn is chunk_gated_delta_rule is deep is fla.ops.gated_delta_rule.chunk_gated_delta_rule
        for name in done.modules:
            assert importlib.util.find_spec(name) is sys.modules[name].__spec__ and sys.modules[name].__path__ == []
        assert fla.__version__.startswith("0.6.0+chunkwise") and callable(causal_conv1d.causal_conv1d_fn)
        with pytest.raises(ImportError):
            importlib.import_module("fla.ops.nsa")
        assert install_as_fla().modules == {}
    assert not any(n.partition(".")[0] in ("fla", "causal_conv1d") for n in sys.modules)


def test_a_real_package_that_is_imported_is_left_alone_unless_told():
    real = sys.modules["fla"] = type(sys)("fla")
    try:
        with pytest.raises(ValueError, match="fla is imported already.*replace=True"):
            install_as_fla()
        assert "causal_conv1d" not in sys.modules and sys.modules["fla"] is real
        with install_as_fla(replace=True):
            assert sys.modules["fla"] is not real
        assert sys.modules["fla"] is real
    finally:
        del sys.modules["fla"]


def test_importing_chunkwise_installs_nothing():
    roots = "('fla', 'causal_conv1d', 'transformers')"
    code = f"import sys, chunkwise, chunkwise.compat; sys.exit(any(n.split('.')[0] in {roots} for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_short_name_stands_for_a_full_one():
    assert set(SHORT.values()) <= {a.name for a in OPS}
