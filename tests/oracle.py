"""The one tolerance rule of the tests, and the cases every member is put through.

A result is right when its error against float64 is at most `factor` times the honest error: what the definition itself, run token by
token in the result's own dtype, gets wrong, plus one rounding of the largest true value. Nothing is typed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chunkwise.draw import offsets
from chunkwise.reference import reference
from chunkwise.spec import Form, Op, all_ops

OUTPUT, GRADIENT = 2, 8  # factors of the chunk form against the token form; the parallel form sums T terms at once and gets 8 for both
DEVICE = torch.device("cpu")  # conftest.py sets it
OPS = list(all_ops().values())
OP_FORMS = [(op, form) for op in OPS for form in op.forms if form is not Form.FUSED_CHUNK]  # that one has the chunk form's bits: a contract


def ids(x: Any) -> str:
    return getattr(x, "name", None) if isinstance(x, Op) else str(x)


@dataclass(frozen=True)
class Case:
    """Sizes of a call. N: sequences packed into the row, with random, possibly zero, lengths."""

    B: int = 1
    T: int = 1
    H: int = 1
    n: int = 1
    K: int = 4
    V: int = 4
    N: int | None = None
    chunk: int = 16
    strength: float = 1.0  # multiplies log decays
    correlated: bool = False  # keys nearly parallel, written with strength near one

    @property
    def sizes(self) -> dict[str, int]:
        return dict(B=self.B, T=self.T, H=self.H, HV=self.H * self.n, K=self.K, V=self.V)


# Few sizes, and those of the contracts: a GPU builds its kernels once for each. Keys and values of 8 and 16 lie so that its copy engine can
# bring them, those of 5 to 7 do not.
CASES = {
    "one token": Case(H=2, K=8, V=16),
    "one short of a chunk": Case(T=15, H=2, K=8, V=16),
    "one chunk": Case(B=2, T=16, H=2, K=8, V=16),
    "one past a chunk": Case(T=17, H=2, K=8, V=16),
    "ragged, odd sizes, three value heads a head": Case(B=2, T=50, H=2, n=3, K=7, V=5),
    "two chunks of 64 and a bit": Case(T=133, H=2, n=2, K=16, V=8, chunk=64),
    "packed, empty sequences too": Case(T=75, H=2, n=2, K=6, V=5, N=6),
    "heads of one channel": Case(T=20, H=16, K=1, V=1),
    "strong gates": Case(T=40, H=2, K=8, V=16, strength=20.0),
    "strong gates over several blocks of keys": Case(T=70, H=1, K=80, V=6, chunk=64, strength=20.0),
    "gates that forget everything": Case(T=33, H=2, K=8, V=16, strength=1e4),
    "correlated keys": Case(T=70, H=2, n=2, K=16, V=8, chunk=64, correlated=True),
}


@dataclass
class Call:
    """Inputs of one call; all floating ones require gradients."""

    op: Op
    case: Case
    x: dict[str, Tensor]
    S0: Tensor
    cu: Tensor | None

    @property
    def options(self) -> dict[str, Any]:
        return dict(initial_state=self.S0, cu_seqlens=self.cu)

    def leaves(self) -> dict[str, Tensor]:
        return {**self.x, "S0": self.S0}


def make(op: Op, case: Case, dtype: torch.dtype = torch.float64, seed: int = 0, **change: Callable[[Tensor], Tensor]) -> Call:
    """Draw the inputs in float64 and round them to dtype; members' own statistics, sharpened by the case.

    change: what becomes of inputs of a kind, by the name of the function in chunkwise.draw that drew them: `log_decay=lambda g: 0 * g`.
    """
    x = op.draw(case.sizes, seed=seed, coupled=False, dtype=torch.float64)
    for name, arg in op.args.items():
        if arg.draw.__name__ == "log_decay":
            x[name] = x[name] * case.strength
        if case.correlated and arg.draw.__name__ == "unit":
            x[name] = torch.nn.functional.normalize(x[name][:, :1] + 0.1 * x[name], dim=-1)
        if case.correlated and arg.draw.__name__ == "write_strength":
            x[name] = torch.sigmoid(8 + x[name])
        x[name] = change.get(arg.draw.__name__, lambda t: t)(x[name])
    x = op.couple(x)
    cu = None if case.N is None else offsets(case.T, case.N, torch.Generator().manual_seed(seed))
    S0 = op.draw_state(case.sizes, case.B if case.N is None else case.N, dtype=torch.float64)
    x = {n: t.to(DEVICE, dtype).requires_grad_() for n, t in x.items()}
    S0 = S0.to(DEVICE, torch.promote_types(dtype, torch.float32)).requires_grad_()
    return Call(op, case, x, S0, None if cu is None else cu.to(DEVICE))


def widen(op: Op, name: str, t: Tensor, n: int) -> Tensor:
    """Key heads repeated until every value head has its own."""
    axes = op.args[name].axes.split()
    return t.repeat_interleave(n, axes.index("H")) if "H" in axes else t


def head(op: Op, name: str, t: Tensor, i: int) -> Tensor:
    """The input of one head."""
    axes = op.args[name].axes.split()
    at = next((axes.index(a) for a in ("H", "HV") if a in axes), None)
    return t if at is None else t.narrow(at, i, 1)


def with_gradients(o: Tensor, S: Tensor, leaves: Mapping[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Outputs, and the gradients of a random, dense function of both."""
    gen = torch.Generator().manual_seed(seed)
    weights = [torch.randn(t.shape, generator=gen, dtype=torch.float64).to(t) for t in (o, S)]
    d = torch.autograd.grad([o, S], list(leaves.values()), weights, allow_unused=True)
    zero = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), d)}
    return {"o": o.detach(), "final state": S.detach(), **{f"d{n}": g for n, g in zero.items()}}


def twice(function: Callable[[], tuple[Tensor, ...]], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a random function of the gradients of a curved function of the results."""
    gen = torch.Generator().manual_seed(3)

    def weighted(tensors: tuple[Tensor, ...], curve: Callable[[Tensor], Tensor] = lambda t: t) -> Any:
        return sum((curve(t) * torch.randn(t.shape, generator=gen, dtype=torch.float64).to(t)).sum() for t in tensors)

    d = torch.autograd.grad(weighted(function(), torch.sin), list(leaves.values()), create_graph=True)
    return {f"d{n}": dd for n, dd in zip(leaves, torch.autograd.grad(weighted(d), list(leaves.values())))}


def engine(call: Call, **options: Any) -> dict[str, Tensor]:
    """What the library computes."""
    o, S = call.op(call.x, output_final_state=True, chunk_size=call.case.chunk, **call.options, **options)
    return with_gradients(o, S, call.leaves())


class Results(dict[str, Tensor]):
    """Results by name. summed: of each gate's gradient, a sum of x dx over the other inputs, the largest term, all of which may cancel.
    along: of dq, what o do says of its part along q, in whose place a normaliser leaves nothing but rounding."""

    summed: Mapping[str, float] = {}
    along: Mapping[str, Tensor] = {}


KEPT: dict[tuple[Any, ...], tuple[Op, Results]] = {}  # of `definition`, oldest first


def definition(call: Call, dtype: torch.dtype | None = torch.float64) -> Results:
    """The definition, token by token in `dtype` (None: the inputs' own); the weights are rounded as the engine's.

    Forms and options are compared with one truth, so the last calls' are kept, by every bit of their inputs.
    """
    bits = [
        None if t is None else (t.dtype, t.shape, t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for t in (*call.leaves().values(), call.cu)
    ]
    key = (id(call.op), dtype, *call.x, *bits)
    if key not in KEPT:
        while len(KEPT) >= 32:
            del KEPT[next(iter(KEPT))]
        KEPT[key] = call.op, _definition(call, dtype)  # with the member, lest another one gets its id
    return KEPT[key][1]


def _definition(call: Call, dtype: torch.dtype | None) -> Results:
    own = call.x["q"].dtype if "q" in call.x else next(iter(call.x.values())).dtype
    work = own if dtype is None else dtype
    leaves = {n: t.detach().cpu().to(work).requires_grad_() for n, t in call.leaves().items()}
    x = {n: leaves[n] for n in call.x}
    o, S = reference(call.op, x, dtype=None, initial_state=leaves["S0"], cu_seqlens=None if call.cu is None else call.cu.cpu())
    gen = torch.Generator().manual_seed(1)
    state = torch.promote_types(own, torch.float32)
    weights = [torch.randn(t.shape, generator=gen, dtype=torch.float64).to(d).to(t.dtype) for t, d in ((o, own), (S, state))]
    d = torch.autograd.grad([o, S], list(leaves.values()), weights, allow_unused=True)
    zero = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), d)}
    made = Results({"o": o.detach(), "final state": S.detach(), **{f"d{n}": g for n, g in zero.items()}})
    gates = [n for n, arg in call.op.args.items() if arg.draw.__name__ == "log_decay"]
    terms = [(leaves[n].detach() * g).abs().max().item() for n, g in zero.items() if n not in gates and g.numel()]
    made.summed = {f"d{n}": max(terms, default=0.0) for n in gates}
    if "q" in x and o.ndim == 4 and o.shape[1] == x["q"].shape[1]:
        q = x["q"].detach()  # [B, T, H, K]
        met = (o.detach() * weights[0]).sum(-1).abs().unflatten(2, (q.shape[2], -1)).sum(-1, keepdim=True)  # [B, T, H, 1]
        size = q.square().sum(-1, keepdim=True)
        made.along = {"dq": q * (met / (size + (size == 0)))}
    return made


def honest(call: Call, truth: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The definition in the inputs' own dtype. Float64 is the truth's own dtype: its error is float32's, scaled by the two roundings."""
    own = next(iter(call.x.values())).dtype
    if own != torch.float64:
        return definition(call, None)
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    single = definition(call, torch.float32)
    return {n: t + (single[n].double() - t) * ratio for n, t in truth.items()}


def same(got: Mapping[str, Tensor], want: Mapping[str, Tensor], form: str = "chunk") -> None:
    """Two float64 computations of one thing, apart by the order of their operations: `want` rounded once is its honest error."""
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    check(got, want, {n: t + (t.float().double() - t) * ratio for n, t in want.items()}, form)


def _norm(x: Tensor, heads: bool) -> Tensor:
    """L2 norm, of everything or of every head (axis 2 of streams, axis 1 of states)."""
    x = x.double()
    return x.norm() if not heads or x.ndim < 3 else x.movedim(2, 0).flatten(1).norm(dim=1)


def check(got: Mapping[str, Tensor], truth: Mapping[str, Tensor], honest: Mapping[str, Tensor] | None = None, form: str = "chunk") -> None:
    """Every result within its factor of the honest error, over all and in the worst head."""
    coarsest = max(torch.finfo(t.dtype).eps for t in got.values())  # kernels multiply in the inputs' dtype, whatever the result's is
    for name, t in truth.items():
        g, t = got[name].cpu(), t.cpu()
        if g.shape != t.shape:
            raise AssertionError(f"{name}: shape {list(g.shape)}, wanted {list(t.shape)}")
        if not g.isfinite().all():
            raise AssertionError(f"{name}: not finite")
        if t.numel() == 0:
            continue
        factor = GRADIENT if name.startswith("d") or form == "parallel" else OUTPUT
        eps = coarsest if DEVICE.type == "cuda" else torch.finfo(g.dtype).eps
        least = torch.finfo(torch.float32).tiny if DEVICE.type == "cuda" else 0  # kernels may make 0 of what is smaller
        if DEVICE.type == "cuda" and isinstance(truth, Results):  # kernels sum x dx in fp32; the definition's S dS has no terms that cancel
            least += torch.finfo(torch.float32).eps * truth.summed.get(name, 0.0)
        for heads in (False, True):
            wrong = _norm(g.double() - t, heads)
            allowed = (eps * t.abs().max().double() + least) * (t.numel() / wrong.numel()) ** 0.5
            if honest is not None:  # a head may err, for its size, as much as all do: its own honest error is one draw of few numbers
                error, size = honest[name].cpu().double() - t, t.double()
                share = _norm(error, False) / _norm(size, False).clamp(min=torch.finfo(torch.float64).tiny)
                allowed = allowed + torch.maximum(_norm(error, heads), share * _norm(size, heads))
            if isinstance(truth, Results) and name in truth.along:
                allowed = allowed + eps * _norm(truth.along[name], heads)
            if not allowed.isfinite().all():
                raise AssertionError(f"{name}: the definition itself is not finite in this dtype: nothing to compare with")
            if (wrong > factor * allowed).any():
                worst = (wrong / (factor * allowed)).max().item()
                raise AssertionError(
                    f"{name}: error {wrong.max().item():.3e} is {worst:.2f} times what is allowed{' in the worst head' if heads else ''}"
                )


def operator_checks(inputs, gate: str, rule: str, plan: str):
    """torch's own checks of the two operators, forward and backward, on q, k, v, g, beta, a, b, e, u, S0 and cu_seqlens."""
    still = [None if t is None else t.detach() for t in inputs]
    args = (*still, None, gate, rule, plan, 16, 0.5, "ieee", "ieee")
    torch.library.opcheck(torch.ops.chunkwise.forward.default, (*args, True, True))
    o, S, saved = torch.ops.chunkwise.forward(*args, True, True)
    torch.library.opcheck(torch.ops.chunkwise.backward.default, (*args, saved, torch.randn_like(o), torch.randn_like(S)))
