"""Is a result right? Against float64, on as many whole rows and heads as are cheap, in total and in the worst head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..spec import Gate
from .case import Case, Inputs

ENOUGH = 1 << 17  # token-heads that are checked; sequences and heads do not mix, so whole ones can be picked
OUTPUT, GRADIENT = 2, 8  # how many times the honest error another order of the same sums may have


@dataclass(frozen=True)
class Part:
    """Rows (B) and heads (H, and their value heads HV) that are checked."""

    rows: Tensor
    heads: Tensor
    values: Tensor

    def pick(self, t: Tensor, axes: str) -> Tensor:
        for i, letter in enumerate(axes.split()):
            chosen = {"B": self.rows, "N": self.rows, "H": self.heads, "HV": self.values}.get(letter)
            if chosen is not None and len(chosen) < t.shape[i]:
                t = t.index_select(i, chosen.to(t.device))
        return t

    def of_heads(self, t: Tensor, HV: int) -> Tensor:
        """Numbers of value heads, one after the other: [HV * n]."""
        return self.pick(t.unflatten(0, (HV, -1)), "HV").flatten()


def part(c: Case) -> Part:
    """Which: the first and the last row, then heads spread evenly. Where a head's number is its gate, all heads."""
    op, n = c.member, c.HV // c.H
    shared = any("B" not in a.axes.split() for a in op.args.values())  # such an input's gradient sums over rows
    rows = torch.arange(c.B) if shared or c.B <= 2 else torch.tensor([0, c.B - 1])
    most = max(1, ENOUGH // (len(rows) * c.T * n))
    count = c.H if op.gate is Gate.HEAD or most >= c.H else most
    heads = torch.linspace(0, c.H - 1, count).round().long() if count > 1 else torch.tensor([c.H - 1])
    return Part(rows if c.N == 0 else torch.arange(max(1, c.N)), heads, (heads[:, None] * n + torch.arange(n)).flatten())


def axes_of(c: Case) -> dict[str, str]:
    """Axes of every result by its name: o, S, and d before an input's name."""
    return {"o": "B T HV V", "S": c.member.state, **{f"d{n}": a.axes for n, a in c.member.args.items()}}


def solve(c: Case, x: Inputs, backward: bool, p: Part, dtype: torch.dtype) -> dict[str, Tensor]:
    """The PyTorch chunk pipeline on the part: in float64 the truth (proved in the tests), in the inputs' own dtype the honest error."""
    op = c.member
    wide = {n: torch.promote_types(t.dtype, dtype) if dtype == torch.float64 else t.dtype for n, t in x.x.items()}
    leaves = {n: p.pick(t, op.args[n].axes).to(wide[n]).detach().requires_grad_(backward) for n, t in x.x.items()}
    own = {n: p.of_heads(t, c.HV) if isinstance(t, Tensor) else t for n, t in x.options.items()}
    S0 = None if x.S0 is None else p.pick(x.S0, op.state).to(torch.promote_types(dtype, torch.float32))
    with torch.set_grad_enabled(backward):
        o, S = op(leaves, backend="torch", form="chunk", initial_state=S0, output_final_state=S0 is not None, cu_seqlens=x.cu, **own)
    made = {"o": o.detach(), **({} if S is None else {"S": S.detach()})}
    if backward:
        d = torch.autograd.grad(o, list(leaves.values()), p.pick(x.do, "B T HV V").to(o.dtype), allow_unused=True)
        made |= {f"d{n}": torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), d)}
    return made


def _norms(t: Tensor, axes: str) -> tuple[Tensor, Tensor]:
    """L2 norm of all, and of every head."""
    t, letters = t.double(), axes.split()
    head = next((letters.index(x) for x in ("HV", "H") if x in letters), None)
    return t.norm(), t.norm()[None] if head is None else t.movedim(head, 0).flatten(1).norm(dim=1)


def allowed(honest: float, factor: float, eps: float) -> float:
    """The largest relative error: so many honest ones and roundings, at most half of the dtype's digits."""
    return min(factor * (honest + eps), eps**0.5)


def _relative(wrong: Tensor, size: Tensor) -> Tensor:
    return torch.where(wrong == 0, torch.zeros_like(wrong), wrong / size)


@dataclass(frozen=True)
class Proof:
    """The truth about a part of a case, and the honest error in the case's dtype."""

    c: Case
    at: Part
    truth: Mapping[str, Tensor]
    honest: Mapping[str, Tensor]

    def outputs(self) -> Proof:
        """That of a forward pass alone."""
        return replace(self, truth={n: t for n, t in self.truth.items() if n in ("o", "S")})

    def judge(self, made: Mapping[str, Tensor], other: bool = False) -> tuple[dict[str, dict[str, float]], str]:
        """Errors by result, {"error", "worst_head", "allowed"}, and what is wrong in words, or "".

        Allowed: factor * (honest error + one rounding), relative, at most half of the dtype's digits; in the worst head likewise.
        other: another library's; it may sum in any order, so outputs get the gradients' factor too.
        """
        axes, errors, wrong = axes_of(self.c), {}, []
        eps = torch.finfo(self.c.torch_dtype).eps
        for n, t in self.truth.items():
            if n not in made or t.numel() == 0:
                continue
            got = self.at.pick(made[n], axes[n])
            if got.shape != t.shape:
                wrong.append(f"{n} has shape {list(made[n].shape)}")
                continue
            factor = GRADIENT if other or n.startswith("d") else OUTPUT
            size, by_head = _norms(t, axes[n])
            bad, bad_head = (_relative(*z) for z in zip(_norms(got.double() - t, axes[n]), (size, by_head)))
            fair, fair_head = (_relative(*z) for z in zip(_norms(self.honest[n].double() - t, axes[n]), (size, by_head)))
            most = allowed(fair.item(), factor, eps)
            errors[n] = {"error": bad.item(), "worst_head": bad_head.max().item(), "allowed": most}
            if not bad.item() <= most or not bool((bad_head <= factor * (fair_head + eps)).all()):  # NaN is never <=
                wrong.append(f"{n} is off by {bad.item():.1e}, by {bad_head.max().item():.1e} in the worst head; {most:.1e} is allowed")
        return errors, "; ".join(wrong)


def prove(c: Case, x: Inputs, backward: bool) -> Proof:
    at = part(c)
    return Proof(c, at, solve(c, x, backward, at, torch.float64), solve(c, x, backward, at, c.torch_dtype))


def detached(made: Mapping[str, Any]) -> dict[str, Tensor]:
    return {n: t.detach() for n, t in made.items() if t is not None}
