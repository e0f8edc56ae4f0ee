"""The identities of docs/derivation.md up to a chunk's forward pass, and the text itself: its examples run, and what it names exists."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch
from brute import CELLS, agree, brute_scores, normal, outer, pairs, plan, streams, token_loop, unit, wide
from torch import Tensor

from chunkwise.engine import chunk
from chunkwise.engine import stages_torch as stages
from chunkwise.engine.decay import ChannelDecay, Cumulated, NoDecay, ScalarDecay
from chunkwise.spec import Gate, Rule, Streams

TEXT = Path(__file__).parents[1] / "docs" / "derivation.md"
SOLVED = [(gate, rule) for gate, rule in CELLS if rule is not Rule.ADD]
solved = pytest.mark.parametrize(("gate", "rule"), SOLVED, ids=["-".join(c) for c in SOLVED])


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def wy(f: chunk.Plan) -> tuple[Tensor, Tensor]:
    return stages.wy(f.p, f.c, f.M, f.T)


def factors(x: Streams, rule: Rule) -> list[tuple[Tensor, Tensor]]:
    """The token's (F, w) of S <- F S + w: [B, HV, K, K] and [B, HV, K, V]."""
    x, out = wide(x), []
    I = torch.eye(x.q.shape[-1], dtype=x.q.dtype)
    for t in range(x.q.shape[1]):
        D = I if x.g is None else I * x.g[:, t]
        if rule is Rule.DELTA:
            beta = x.beta[:, t, :, None]
            out.append(((I - outer(beta * x.k[:, t], x.k[:, t])) @ D, outer(beta * x.k[:, t], x.v[:, t])))
        else:
            out.append((D + outer(x.b[:, t], x.a[:, t]), outer(x.k[:, t], x.v[:, t])))
    return out


# ---- section 2: the chunkwise delta rule


def test_delta_rule_has_the_papers_wy_form():
    x = streams(Gate.NONE, Rule.DELTA, T=16)
    f = plan(x, Gate.NONE, Rule.DELTA, 16)
    c, (u, w) = f.c, wy(f)

    def solve(k, v, beta):
        A = torch.eye(16, dtype=k.dtype) + (beta * (k @ k.mT)).tril(-1)
        T = torch.linalg.inv(A) * beta.mT
        return T, T @ k, T @ v

    def induction(k, v, beta):
        W, U = torch.zeros_like(k * beta), torch.zeros_like(v)
        for i in range(16):
            met = k[..., i, None, :] @ k[..., :i, :].mT  # k_i . k_j of the tokens before
            W[..., i, :] = beta[..., i, :] * (k[..., i, :] - (met @ W[..., :i, :])[..., 0, :])
            U[..., i, :] = beta[..., i, :] * (v[..., i, :] - (met @ U[..., :i, :])[..., 0, :])
        return W, U

    agree((f.T * c.beta.mT, -w, u), solve, c.k, c.v, c.beta)
    agree((-w, u), induction, c.k, c.v, c.beta)


@solved
def test_wy_is_the_product_of_the_token_factors(gate, rule):
    x = streams(gate, rule, T=16)
    f = plan(x, gate, rule, 16)
    p, total = f.p, f.c.key.total()
    D = torch.eye(p.K, dtype=torch.float64) * (1 if total is None else total[..., None])

    def product(x):
        P = torch.eye(p.K, dtype=x.q.dtype)
        for F, _ in factors(x, rule):
            P = F @ P
        return P.view(p.B, 1, 2, p.K, p.K)

    agree(D + f.c.key.end(f.c.w).mT @ wy(f)[1], product, x)


@solved
def test_wy_is_the_sum_of_the_carried_writes(gate, rule):
    x = streams(gate, rule, T=16)
    f = plan(x, gate, rule, 16)
    p, H = f.p, f.c.key.end(f.c.w).mT @ wy(f)[0]
    if rule is Rule.DPLR:
        H = H + f.c.key.end(f.c.k).mT @ f.c.v

    def carried(x):
        F = factors(x, rule)
        H = 0
        for j, (_, written) in enumerate(F):
            for later, _ in F[j + 1 :]:
                written = later @ written
            H = H + written
        return H.view(p.B, 1, 2, p.K, p.V)

    agree(H, carried, x)


@pytest.mark.parametrize("C", [1, 2, 8, 16, 32, 64])
@pytest.mark.parametrize("alike", [0.0, 0.9], ids=["random keys", "keys nearly alike"])
def test_inverse_solves_the_triangle(C, alike):
    k = unit(3, C, 8) * (1 - alike) + unit(3, 1, 8) * alike
    k = torch.nn.functional.normalize(k.float(), dim=-1).double()
    L = -(0.99 * (k @ k.mT)).float().double().tril(-1)
    agree(stages.inverse(L), lambda L: torch.linalg.inv(torch.eye(C, dtype=L.dtype) - L), L)


def test_inverse_of_a_scalar_gate_is_gate_free():
    x = streams(Gate.SCALAR, Rule.DELTA, T=16, steep=3.0)
    f, bare = plan(x, Gate.SCALAR, Rule.DELTA, 16), plan(x._replace(g=None), Gate.NONE, Rule.DELTA, 16)
    c, g = f.c, f.c.layout.split(x.g, torch.float64)[..., None]

    def gated(k, beta, g):
        return torch.linalg.inv(torch.eye(16, dtype=k.dtype) + (beta * (k @ k.mT) * pairs(g)[..., 0]).tril(-1))

    agree(f.T, gated, c.k, c.beta, g)
    agree(c.key.gamma(False) * bare.T, gated, c.k, c.beta, g)


@solved
def test_correction_reads_the_state_first(gate, rule):
    x, S0 = streams(gate, rule, T=16), normal(2, 2, 5, 3)
    f = plan(x, gate, rule, 16)
    c, S, (u, w) = f.c, f.state(S0), wy(f)

    def truth(x, S0):
        return c.layout.split(token_loop(x, S0, rule)[1], S0.dtype)

    agree(u + w @ S, truth, x, S0)
    agree(f.T @ (stages.base(f.p, c, f.M) + c.key.start(c.r, before=f.p.before) @ S), truth, x, S0)
    if rule is Rule.DELTA:
        agree(f.T @ (c.beta * (c.v - c.key.start(c.k) @ S)), truth, x, S0)


# ---- section 3: decays inside a chunk

PROFILES = {
    "calm": lambda g: -g,
    "steep": lambda g: -50 * g,
    "open": lambda g: 0 * g,
    "with a reset": lambda g: torch.where(g > 0.9, -1e4, -g),
}
profiles = pytest.mark.parametrize("profile", PROFILES)
kinds = pytest.mark.parametrize("kind", [NoDecay, ScalarDecay, ChannelDecay])
before_or_after = pytest.mark.parametrize("before", [False, True], ids=["reads after forgetting", "reads before"])


def decay_and_gates(kind, profile: str, C: int, D: int = 4):
    """A decay, and its gates [2, 1, 3, C, D or 1]."""
    shape = (2, 1, 3, C, 1 if kind is not ChannelDecay else D)
    g = PROFILES[profile](torch.rand(shape).double()).float().double()
    return (NoDecay(), 0 * g) if kind is NoDecay else (ScalarDecay(g[..., 0]), g) if kind is ScalarDecay else (ChannelDecay(g), g)


@kinds
@profiles
@before_or_after
@pytest.mark.parametrize("C", [1, 2, 16, 64])
def test_scores_are_pairwise_decayed_products(kind, profile, before, C):
    decay, g = decay_and_gates(kind, profile, C)
    x, y = normal(2, 1, 1, C, 4), normal(2, 1, 3, C, 4)
    for strict in {before, True}:
        agree(decay.scores(x, y, strict=strict, before=before), lambda *i, s=strict: brute_scores(*i, before, s), x, y, g)


@kinds
@profiles
@before_or_after
def test_rows_and_pairs_are_the_gradient_of_scores(kind, profile, before):
    decay, g = decay_and_gates(kind, profile, 16)
    x, y = normal(2, 1, 3, 16, 4), normal(2, 1, 3, 16, 4)
    dM = normal(2, 1, 3, 16, 16).tril(-1)

    def gradients(x, y, g, dM):
        x, y, g = x.clone().requires_grad_(), y.clone().requires_grad_(), g.clone().requires_grad_()
        dx, dy, dg = torch.autograd.grad(brute_scores(x, y, g, before), (x, y, g), dM)
        return dx, dx, dy, dg

    dx, dy, between = torch.zeros_like(x), torch.zeros_like(y), {}
    decay.pairs_(dM, x, y, dx, dy, between, before=before)
    assert bool(between) == (kind is ChannelDecay)
    across = decay.across(between) if between else gradients(x, y, g, dM)[3]
    agree((decay.rows(dM, y, before=before), dx, dy, across), gradients, x, y, g, dM)


@kinds
@profiles
def test_start_end_and_total_meet_the_chunks_ends(kind, profile):
    decay, g = decay_and_gates(kind, profile, 16)
    x = normal(2, 1, 3, 16, 4)

    def ends(x, g):
        upto = torch.stack([g[..., : i + 1, :].sum(-2) for i in range(16)], -2)
        earlier = torch.stack([g[..., :i, :].sum(-2) for i in range(16)], -2)
        after = torch.stack([g[..., i + 1 :, :].sum(-2) for i in range(16)], -2)
        return x * upto.exp(), x * earlier.exp(), x * after.exp(), g.sum(-2).exp()

    total = decay.total()
    total = torch.ones_like(g[..., 0, :]) if total is None else total
    agree((decay.start(x), decay.start(x, before=True), decay.end(x), total), ends, x, g)


def test_row_blocks_meet_the_columns_before_them_at_an_anchor():
    decay, g = decay_and_gates(ChannelDecay, "steep", 64)
    x, y, G = normal(2, 1, 3, 64, 4), normal(2, 1, 3, 64, 4), g.cumsum(-2)
    assert not ((x * G.exp()) @ (y * (-G).exp()).mT).isfinite().all()  # one product of the whole chunk overflows, even in float64
    M = decay.scores(x, y)
    for first in range(16, 64, 16):
        I, J, anchor = slice(first, first + 16), slice(0, first), G[..., first - 1, None, :]
        row, col = G[..., I, :] - anchor, anchor - G[..., J, :]
        assert row.max() <= 0 and col.max() <= 0
        block = (x[..., I, :] * row.exp()) @ (y[..., J, :] * col.exp()).mT
        agree(M[..., I, J], lambda *i, I=I, J=J: brute_scores(*i)[..., I, J], x, y, g)
        agree(block, lambda *i, I=I, J=J: brute_scores(*i)[..., I, J], x, y, g)


def test_cumulated_gates_keep_small_decays_behind_a_large_one():
    g = -torch.rand(64) * 1e-3
    g[[5, 6, 7]] = torch.tensor([-100.0, -1e4, -torch.inf])
    G, plain = Cumulated.of(g, 0)[0], g.clamp(min=-104).cumsum(0)
    i, j, t = torch.arange(8, 64)[:, None], torch.arange(8, 64)[None, :], torch.arange(64)  # all pairs behind the reset
    want = torch.where((t > j[..., None]) & (t <= i[..., None]), g.double(), 0).sum(-1)
    error, naive = (((x[i] - x[j]).double().tril() - want).norm() for x in (G, plain))
    rounding = torch.finfo(torch.float32).eps * 64**0.5 / 16  # of a sum of 64 fine parts, each below 1/16
    assert error <= rounding * want.numel() ** 0.5 < naive


# ---- the text itself


def test_text_runs_its_examples():
    fences = re.findall(r"^```python\n(.*?)^```$", TEXT.read_text(), re.S | re.M)
    example = doctest.DocTestParser().get_doctest("\n".join(fences), {}, TEXT.name, str(TEXT), 0)
    assert example.examples
    failures = []
    doctest.DocTestRunner(verbose=False).run(example, out=failures.append)
    assert not failures, "".join(failures)


def test_text_names_functions_and_tests_that_exist():
    text = TEXT.read_text()
    for module, name in re.findall(r"`(stages_torch|decay|chunk|gradient|recurrent|layout|problem|dispatch)\.([A-Za-z_.]+)`", text):
        found = importlib.import_module(f"chunkwise.engine.{module}")
        for part in name.split("."):
            assert hasattr(found, part) or part in getattr(found, "__dataclass_fields__", {}), f"{module}.{name}"
            found = getattr(found, part, None)
    named = set(re.findall(r"`(test_\w+)`", text))
    tree = [n for file in Path(__file__).parent.glob("test_derivation*.py") for n in ast.parse(file.read_text()).body]
    assert named == {n.name for n in tree if isinstance(n, ast.FunctionDef) and n.name.startswith("test_") and "_text_" not in n.name}
