"""The identities of docs/derivation.md over a sequence: states and their gradients, gradients of the streams and gates, other forms."""

from __future__ import annotations

import pytest
import torch
from brute import BONUS, CELLS, SCALE, agree, cells, loop_gradients, normal, pairs, plan, streams, token_loop, with_bonus
from torch import Tensor

import chunkwise
from chunkwise.engine import chunk, recurrent
from chunkwise.engine.explain import choices
from chunkwise.spec import Gate, Rule, Streams


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


# ---- sections 1 and 4: the state pass, forwards and mirrored


def in_slots(per_chunk: list[Tensor]) -> Tensor:
    """States [B, HV, K, V], one a chunk, as the stages keep them: [NC * B, 1, HV, K, V]."""
    return torch.cat(per_chunk)[:, None]


@with_bonus
def test_state_pass_and_output_are_the_recurrence(gate, rule, bonus):
    x, S0, C = streams(gate, rule, bonus=bonus), normal(2, 2, 5, 3), 8
    f = plan(x, gate, rule, C)
    o = f.c.layout.empty(2, 3, dtype=torch.float64)
    out = f.states(S0, o=o, keep=True)

    def truth(x, S0):
        o, _, states = token_loop(x, S0, rule)
        return o, states[-1][:, None], in_slots(states[:-1:C])

    agree((o, out.last, out.met), truth, x, S0)


@cells
def test_state_pass_reversed_is_the_gradient_of_the_states(gate, rule):
    x, S0, C, z = streams(gate, rule), normal(2, 2, 5, 3), 8, torch.zeros(2, 21, 2, 3, dtype=torch.float64)
    do, dST = normal(2, 21, 2, 3), normal(2, 2, 5, 3)
    f = plan(x, gate, rule, C)
    split = f.c.layout.split
    back = f.gradients(dST, do)

    def truth(x, S0, z, do, dST):
        S0, z = S0.clone().requires_grad_(), z.clone().requires_grad_()
        o, _, states = token_loop(x, S0, rule, z)
        left = [*states[C::C], states[-1]]  # the state that each chunk leaves
        wanted = (S0, *left) if rule is Rule.ADD else (S0, *left, z)
        dS0, *dS = torch.autograd.grad((o * do).sum() + (states[-1] * dST).sum(), wanted)
        dz = [split(dS.pop(), do.dtype)] if rule is not Rule.ADD else []
        return dS0[:, None], in_slots(dS), *dz

    agree([t for t in (back.last, back.met, back.X) if t is not None], truth, x, S0, z, do, dST)
    if rule is not Rule.ADD:  # dX, what the correction is worth to the outputs and to the state that leaves, and U = T'dX
        dX = f.M.qw.mT @ split(do, torch.float64) + f.c.key.end(f.c.w) @ back.met
        agree(back.X, lambda M, dX: torch.linalg.solve(torch.eye(C, dtype=M.dtype) - M.mT, dX), f.M.rw, dX)


EXTRAS = [(*cell, "") for cell in BONUS] + [(*cell, False, erase) for cell in CELLS if cell[1] is Rule.DELTA for erase in "ea"]


@pytest.mark.parametrize(
    ("gate", "rule", "bonus", "erase"), EXTRAS, ids=[f"{g}-{r}{'-bonus' * b}{e and '-erase along ' + e}" for g, r, b, e in EXTRAS]
)
def test_grads_are_those_of_the_token_loop(gate, rule, bonus, erase):
    x = streams(gate, rule, erase=erase, bonus=bonus)
    S0, do, dST = normal(2, 2, 5, 3), normal(2, 21, 2, 3), normal(2, 2, 5, 3)
    d, dS0 = chunk.backward(plan(x, gate, rule, 8).p, x, S0, None, do, dST)
    agree([t for t in (*d, dS0) if t is not None], lambda *i: loop_gradients(*i, rule), x, S0, do, dST)


# ---- section 5: the gate's gradient

SHAPES = {"[1]": Gate.SCALAR, "[K, 1]": Gate.KEY, "[1, V]": Gate.VALUE}


@pytest.mark.parametrize(("shape", "rule"), [(s, r) for s in SHAPES for r in (Rule.ADD, Rule.DELTA) if (s, r) != ("[1, V]", Rule.DELTA)])
def test_gate_gradient_is_readers_minus_writers(shape, rule):
    gate, C = SHAPES[shape], 8
    x = streams(gate, rule, T=3 * C, n=1)
    x = x._replace(e=x.k) if rule is Rule.DELTA else x  # the key that erases counts apart from the key that writes
    S0, do, dST = normal(2, 1, 5, 3), normal(2, 3 * C, 1, 3), normal(2, 1, 5, 3)
    d, _ = chunk.backward(plan(x, gate, rule, C).p, x, S0, None, do, dST)

    def truth(x, S0, do, dST):
        return loop_gradients(x, S0, do, dST, rule)[3]

    agree(d.g, truth, x, S0, do, dST)

    # the formula: dG = q*dq + r*dr - k*dk - w*dw, S_end*dS_end on each chunk's last row, a reverse cumsum over the chunk
    y = Streams(*(None if t is None else t.clone().requires_grad_() for t in x))
    o, _, states = token_loop(y, S0, rule)
    ends = states[C::C]
    dends = torch.autograd.grad((o * do).sum() + (states[-1] * dST).sum(), ends)
    across = torch.stack([S * dS for S, dS in zip(ends, dends)], 1)[:, :, 0].detach()  # [B, NC, K, V]
    if gate is Gate.VALUE:
        dG = o.detach() * do - x.v * d.v
    else:
        dG = x.q * d.q - x.k * d.k + (x.e * d.e if rule is Rule.DELTA else 0)
    dG = dG[:, :, 0].clone()
    dG[:, C - 1 :: C] += across.sum(-2 if gate is Gate.VALUE else -1)
    dg = dG.unflatten(1, (3, C)).flip(2).cumsum(2).flip(2).flatten(1, 2)
    agree((dg.sum(-1) if gate is Gate.SCALAR else dg)[:, :, None], truth, x, S0, do, dST)


def test_gate_gradient_of_a_head_constant_is_the_sum_over_tokens():
    S0, do, dST = normal(2, 2, 5, 3), normal(2, 21, 2, 3), normal(2, 2, 5, 3)
    x = streams(Gate.HEAD, Rule.ADD)
    each = x._replace(g=x.g.expand(2, 21, 2).clone())
    got, per_token = (
        chunk.backward(plan(y, gate, Rule.ADD, 8).p, y, S0, None, do, dST)[0].g for y, gate in ((x, Gate.HEAD), (each, Gate.SCALAR))
    )
    agree((got, per_token.sum((0, 1))), lambda *i: [loop_gradients(*i, Rule.ADD)[3]] * 2, x, S0, do, dST)


@with_bonus
def test_gate_gradient_keeps_what_a_steep_gate_leaves(gate, rule, bonus):
    x = streams(gate, rule, T=16, n=1, bonus=bonus)
    x = x if x.g is None else x._replace(g=(x.g - 30).float().double())
    S0, do, dST = normal(2, 1, 5, 3), normal(2, 16, 1, 3), normal(2, 1, 5, 3)
    d, _ = chunk.backward(plan(x, gate, rule, 16).p, x, S0, None, do, dST)
    if gate is Gate.NONE:
        assert d.g is None
    else:
        agree(d.g, lambda *i: loop_gradients(*i, rule)[3], x, S0, do, dST, exponent=30)


PER_TOKEN = [cell for cell in BONUS if cell[0] in (Gate.SCALAR, Gate.KEY, Gate.VALUE)]


@pytest.mark.parametrize(("gate", "rule", "bonus"), PER_TOKEN, ids=[f"{g}-{r}{'-bonus' * b}" for g, r, b in PER_TOKEN])
def test_gate_gradient_of_one_steep_gate_is_lost_in_no_other(gate, rule, bonus):
    x = streams(gate, rule, T=16, n=1, bonus=bonus)
    S0, do, dST = normal(2, 1, 5, 3), normal(2, 16, 1, 3), normal(2, 1, 5, 3)
    for t in 0, 2, 7, 13:  # a chunk's first, inside a leaf, the last of the columns, among rows
        g = x.g.clone()
        g[:, t] = -30
        y = x._replace(g=g)
        d, _ = chunk.backward(plan(y, gate, rule, 16).p, y, S0, None, do, dST)
        agree(d.g[:, t], lambda *i, t=t: loop_gradients(*i, rule)[3][:, t], y, S0, do, dST, exponent=30)


# ---- section 6: the other forms


@cells
@pytest.mark.parametrize("C", [1, 4, 32])
def test_forms_differ_only_in_the_chunk(gate, rule, C):
    x, S0 = streams(gate, rule), normal(2, 2, 5, 3)

    def truth(x, S0):
        o, _, states = token_loop(x, S0, rule)
        return o, states[-1]

    p = plan(x, gate, rule, C).p
    agree(chunk.forward(p, x, S0, final=True, save=False)[:2], truth, x, S0)
    agree(recurrent.forward(p, x, S0, final=True, save=False)[:2], truth, x, S0)


@pytest.mark.parametrize("gate", [Gate.NONE, Gate.HEAD, Gate.SCALAR])
@pytest.mark.parametrize("rule", [Rule.ADD, Rule.DELTA])
def test_parallel_form_is_one_lower_triangular_matrix(gate, rule):
    x = streams(gate, rule, n=1, H=2)

    def quadratic(x):
        q, k, v = (t.transpose(1, 2) for t in x[:3])  # [B, H, T, D]
        g = torch.zeros(2, 21, 2, dtype=q.dtype) if x.g is None else x.g.expand(2, 21, 2)
        gamma = pairs(g.transpose(1, 2)[..., None])[..., 0]
        A = SCALE * (q @ k.mT) * gamma
        if rule is Rule.DELTA:
            beta = x.beta.transpose(1, 2)[..., None]
            A = A @ torch.linalg.inv(torch.eye(21, dtype=q.dtype) + (beta * (k @ k.mT) * gamma).tril(-1)) * beta.mT
        return (A @ v).transpose(1, 2)

    agree(chunk.forward(plan(x, gate, rule, 0).p, x, None, final=False, save=False)[0], quadratic, x)


@pytest.mark.parametrize("op", [op for op in chunkwise.all_ops().values() if op.parallel], ids=lambda op: op.name)
def test_parallel_form_is_one_chunk(op):
    for T in 1, 16, 21, 300:
        for chosen in (made := choices(op, T=T, grad=True, form="parallel")):
            assert plan(streams(Gate.NONE, Rule.ADD, T), Gate.NONE, Rule.ADD, chosen.chunk).c.layout.slots == 2  # one a sequence
        assert made
