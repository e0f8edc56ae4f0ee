"""Brute force for the tests of docs/derivation.md: definitions that share no code with the engine, and the rule by which they are met.

Everything is computed in float64 from inputs that float32 holds exactly. An identity may err as much as its own definition does:
`agree` evaluates the definition in float32 too, and scales the error found there by the ratio of the two precisions.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from chunkwise.engine import chunk
from chunkwise.engine.problem import problem
from chunkwise.spec import Gate, Rule, Streams

SCALE = 0.5
FACTOR = 8  # of rounding errors: a chain of sums in another order
CELLS = [(gate, rule) for rule in Rule for gate in Gate if rule is Rule.ADD or gate is not Gate.VALUE]
BONUS = [(gate, rule, bonus) for gate, rule in CELLS for bonus in (False, True) if not bonus or rule is Rule.ADD and gate is not Gate.VALUE]
cells = pytest.mark.parametrize(("gate", "rule"), CELLS, ids=["-".join(c) for c in CELLS])
with_bonus = pytest.mark.parametrize(("gate", "rule", "bonus"), BONUS, ids=[f"{g}-{r}{'-bonus' * b}" for g, r, b in BONUS])


def agree(got, truth, *inputs, exponent: float = 1.0) -> None:
    """`got` (one tensor or several) is truth(*inputs), up to the rounding error that truth itself makes.

    exponent: how large the sums are that are exponentiated; one rounding of such a sum is so many of its exponential.
    """
    want, rough = truth(*inputs), truth(*tree_map_only(Tensor, Tensor.float, inputs))
    eps, ratio = torch.finfo(torch.float64).eps, torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    if isinstance(got, Tensor):
        got, want, rough = (got,), (want,), (rough,)
    assert len(got) == len(want)
    for i, (a, b, c) in enumerate(zip(got, want, rough)):
        assert a.dtype == torch.float64, f"result {i}"
        a = a.expand(b.shape)  # the stages keep one copy of what all value heads share
        allowed = FACTOR * ((c.double() - b).norm() * ratio + b.norm() * eps * exponent)
        assert (a - b).norm() <= allowed, f"result {i}: off by {(a - b).norm():.1e}, of a norm of {b.norm():.1e}; {allowed:.1e} is allowed"


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).double()


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1).double()


def streams(gate: Gate, rule: Rule, T: int = 21, *, B=2, H=1, n=2, K=5, V=3, steep=1.0, erase="", bonus=False) -> Streams:
    """Random engine inputs; keys of length one, gates between -steep and 0. erase: the delta rule's own erase key, stream e or a."""
    HV, a = H * n, unit(B, T, H, K)
    shapes = {Gate.HEAD: (HV,), Gate.SCALAR: (B, T, HV), Gate.KEY: (B, T, HV, K), Gate.VALUE: (B, T, HV, V)}
    x = Streams(normal(B, T, H, K), unit(B, T, H, K), normal(B, T, HV, V))
    if gate is not Gate.NONE:
        x = x._replace(g=-steep * torch.rand(shapes[gate]).double())
    if rule is Rule.DELTA:
        x = x._replace(beta=torch.rand(B, T, HV).double())
        x = x._replace(**{erase: unit(B, T, H, K)}) if erase else x
    if rule is Rule.DPLR:
        x = x._replace(a=a, b=(-a * torch.rand(B, T, H, 1)).float().double())
    return x._replace(u=normal(HV, K)) if bonus else x


def plan(x: Streams, gate: Gate, rule: Rule, C: int) -> chunk.Plan:
    """Chunks, scores, T and the decayed operands of the state pass, as the text obtains them."""
    return chunk.prepare(problem(x, None, None, gate=gate, rule=rule, chunk=C, scale=SCALE, precision="ieee"), x)


def wide(x: Streams) -> Streams:
    """Every stream with HV heads, q scaled, the gate as a factor that broadcasts against S [B, HV, K, V]: [B, T, HV, K or 1, V or 1]."""
    n, HV = x.v.shape[2] // x.q.shape[2], x.v.shape[2]
    heads = {i: getattr(x, i).repeat_interleave(n, 2) for i in "qkabe" if getattr(x, i) is not None}
    g = x.g
    if g is not None:
        if g.ndim == 1:
            g = g.expand(*x.v.shape[:2], HV)
        key = g.ndim == 4 and g.shape[3] == x.q.shape[3]  # the tests keep K and V apart
        g = (g[..., None, None] if g.ndim == 3 else g[..., None] if key else g[..., None, :]).exp()
    heads["q"] = heads["q"] * SCALE
    return x._replace(**heads, g=g)


def read(x: Tensor, S: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", x, S)


def outer(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bhk,bhv->bhkv", x, y)


def token_loop(x: Streams, S: Tensor, rule: Rule, z: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o, X and the states before the first, after the first, ..., after the last token. z is added to every X: its gradient is U."""
    x, o, X, states = wide(x), [], [], [S]
    for t in range(x.q.shape[1]):
        kept = S if x.g is None else S * x.g[:, t]
        new = torch.zeros_like(x.v[:, t])
        if rule is Rule.DELTA:
            seen = read((x.k if x.e is None else x.e)[:, t], kept) if x.a is None else read(x.a[:, t], S)
            new = x.beta[:, t, :, None] * (x.v[:, t] - seen)
        if rule is Rule.DPLR:
            new = read(x.a[:, t], S)
        new = new if z is None else new + z[:, t]
        before = S
        S = kept + (outer(x.k[:, t], new) if rule is Rule.DELTA else outer(x.k[:, t], x.v[:, t]))
        S = S + outer(x.b[:, t], new) if rule is Rule.DPLR else S
        if x.u is None:
            o.append(read(x.q[:, t], S))
        else:
            o.append(read(x.q[:, t], before) + (x.q[:, t] * x.u * x.k[:, t]).sum(-1, keepdim=True) * x.v[:, t])
        X.append(new)
        states.append(S := S.clone())  # a tensor that o_t did not read: its gradient is what later tokens make of it
    return torch.stack(o, 1), torch.stack(X, 1), states


def pairs(g: Tensor, before: bool = False, strict: bool = False) -> Tensor:
    """e^(sum of g over the tokens after j, up to i) where i meets j, else 0: [..., C, C, D] of g [..., C, D]. No cumulated sums."""
    i, j, t = (torch.arange(g.shape[-2]).view(s) for s in ((-1, 1, 1), (1, -1, 1), (1, 1, -1)))
    between = ((t > j) & ((t < i) if before else (t <= i))).to(g.dtype)
    met = (i > j) if before or strict else (i >= j)
    return torch.einsum("ijt,...td->...ijd", between, g).exp() * met


def brute_scores(x: Tensor, y: Tensor, g: Tensor, before: bool = False, strict: bool = False) -> Tensor:
    return (x[..., :, None, :] * y[..., None, :, :] * pairs(g, before, strict)).sum(-1)


def loop_gradients(x: Streams, S0: Tensor, do: Tensor, dST: Tensor, rule: Rule) -> list[Tensor]:
    """Autograd through the token loop: of every stream given, and of S0."""
    x, S0 = Streams(*(None if t is None else t.clone().requires_grad_() for t in x)), S0.clone().requires_grad_()
    o, _, states = token_loop(x, S0, rule)
    return torch.autograd.grad((o * do).sum() + (states[-1] * dST).sum(), [t for t in (*x, S0) if t is not None])
