"""What is measured: one member, form, shape, dtype and kind of gates; and its inputs, the same tensors for every side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..draw import log_decay, offsets
from ..engine.dispatch import RECURRENT_BELOW
from ..engine.prologue import all_raw
from ..spec import Gate, Op, Rule, all_ops

SIZES = ("B", "T", "H", "HV", "K", "V")
SHAPES = {
    "S1": dict(B=8, T=4096, H=16, HV=16, K=128, V=128),  # a training batch
    "S2": dict(B=1, T=32768, H=32, HV=32, K=128, V=128),  # one long sequence: few recurrences, many chunks
    "S3": dict(B=1, T=8192, H=8, HV=8, K=128, V=128),  # few heads: bound by launches and latency
}
GRID: dict[str, dict[str, Any]] = {  # what else a member meets: docs/speed.md
    "64 channels": dict(B=4, T=4096, H=16, HV=16, K=64, V=64),
    "256 channels": dict(B=2, T=4096, H=16, HV=16, K=256, V=256),
    "256, 512 channels": dict(B=1, T=4096, H=16, HV=16, K=256, V=512),
    "64 tokens": dict(B=8, T=64, H=16, HV=16, K=128, V=128),
    "512 tokens": dict(B=4, T=512, H=16, HV=16, K=128, V=128),
    "131,072 tokens": dict(B=1, T=131072, H=16, HV=16, K=128, V=128),
    "one head": dict(B=1, T=8192, H=1, HV=1, K=128, V=128),
    "one head, 131,072 tokens": dict(B=1, T=131072, H=1, HV=1, K=128, V=128),
    "512 heads": dict(B=32, T=1024, H=16, HV=16, K=128, V=128),  # of all samples
    "64 documents": dict(B=1, T=32768, H=16, HV=16, K=128, V=128, N=64),  # packed, of random lengths
    "float16": dict(B=4, T=4096, H=16, HV=16, K=128, V=128, dtype="float16"),
    "float32": dict(B=2, T=2048, H=16, HV=16, K=128, V=128, dtype="float32"),
}
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
GATES = ("slow", "fast", "raw")
HALF = torch.bfloat16
POOLS = {"float32": (torch.float32, False), "bfloat16": (HALF, False), "float32-vk": (torch.float32, True), "bfloat16-vk": (HALF, True)}


@dataclass(frozen=True)
class Case:
    """B batch, T tokens, H heads, HV value heads, K key, V value, N packed sequences (0: not packed)."""

    op: str
    form: str
    shape: str  # the name it was asked by
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    dtype: str
    gates: str  # slow: logsigmoid(normal) / 16, a quarter of the heads never forget; fast: logsigmoid(normal); raw: see `_raw`
    pool: str = ""  # a step of chunkwise.decode in a pool of such states, -vk: values first

    @property
    def member(self) -> Op:
        return all_ops()[self.op]

    @property
    def sizes(self) -> dict[str, int]:
        return {n: getattr(self, n) for n in SIZES}

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def decode(self) -> bool:
        """So few tokens that the state is what moves: it goes in and comes out, and there is no backward."""
        return self.T <= RECURRENT_BELOW

    @property
    def record(self) -> dict[str, Any]:
        return asdict(self)


def case(op: str, form: str = "auto", shape: str = "S1", dtype: str = "bfloat16", gates: str = "slow", pool: str = "") -> Case:
    """Check a request. Raises ValueError naming what was wanted and what was given."""
    if op not in all_ops():
        raise ValueError(f"no member {op!r}; there are {', '.join(all_ops())}")
    forms = ("auto", *all_ops()[op].forms)
    if form not in forms:
        raise ValueError(f"{op} has no {form!r} form; it has {', '.join(forms)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if gates not in GATES:
        raise ValueError(f"gates must be slow, fast or raw, got {gates!r}")
    if gates == "raw" and not all_raw(all_ops()[op]):
        raise ValueError(f"gates cannot be raw: {op} prepares nothing itself")
    N = 0
    if shape in SHAPES:
        sizes = SHAPES[shape]
    elif shape in GRID:
        sizes = {n: GRID[shape][n] for n in SIZES}
        N, dtype = GRID[shape].get("N", 0), GRID[shape].get("dtype", dtype)
    else:
        if not re.fullmatch(r"\d+(,\d+){5,6}", shape):
            named = "; ".join(("grid", *SHAPES, *GRID))
            raise ValueError(f"shape must be one of {named}; or B,T,H,HV,K,V[,N], got {shape!r}")
        *given, N = [int(x) for x in shape.split(",")][:7] + [0] * (6 - shape.count(","))
        sizes = dict(zip(SIZES, given))
    for n, size in sizes.items():
        if size < 1:
            raise ValueError(f"shape must have {n} >= 1, got {shape!r}")
    if sizes["HV"] % sizes["H"]:
        raise ValueError(f"shape must have HV a multiple of H={sizes['H']}, got HV={sizes['HV']}")
    if N and sizes["B"] != 1:
        raise ValueError(f"shape packs N={N} sequences into one row: B must be 1, got B={sizes['B']}")
    c = Case(op=op, form=form, shape=shape, **sizes, N=N, dtype=dtype, gates=gates, pool=pool)
    if pool and (pool not in POOLS or dtype == "float64"):
        raise ValueError(f"pool must be one of {', '.join(POOLS)}, for dtypes other than float64, got {pool!r} for {dtype}")
    if pool and (not c.decode or N or form != "auto"):
        raise ValueError(f"a pool needs form auto and {RECURRENT_BELOW} tokens or fewer, not packed; got {form}, {shape!r}")
    return c


def shapes(asked: Sequence[str]) -> list[str]:
    """Shapes by name, where "grid" asks for all of GRID."""
    return [name for one in asked for name in (GRID if one == "grid" else (one,))]


class Inputs(NamedTuple):
    """Tensors every side gets."""

    x: dict[str, Tensor]  # by the member's argument names
    do: Tensor  # [B, T, HV, V], the incoming gradient
    S0: Tensor | None  # the state [N, HV, K, V], when decoding
    cu: Tensor | None  # cu_seqlens [N + 1]
    options: Mapping[str, Any] = MappingProxyType({})  # of the member's function: what is raw


def draw(c: Case, device: torch.device, seed: int = 0) -> Inputs:
    """The member's own statistics. Scalar gates are float32; gates per channel and write strengths have q's dtype, as layers make them."""
    op, wide = c.member, torch.promote_types(c.torch_dtype, torch.float32)
    x = op.draw(c.sizes, seed=seed, coupled=False, dtype=wide, device=device)
    for n, arg in op.args.items():
        axes = arg.axes.split()
        if arg.draw is log_decay and c.gates == "slow":
            x[n] /= 16
            heads = axes.index("HV" if "HV" in axes else "H")
            x[n].movedim(heads, 0)[3::4] = 0
    x = op.couple(x)
    options = _raw(c, x) if c.gates == "raw" else {}
    for n, arg in op.args.items():
        scalar = arg.axes.split()[-1] in ("H", "HV") and arg.draw is log_decay
        x[n] = x[n].to(wide if scalar else c.torch_dtype)
    do = torch.randn(c.B, c.T, c.HV, c.V, dtype=wide, device=device).to(c.torch_dtype)
    S0 = op.draw_state(c.sizes, c.N or c.B, dtype=wide, device=device) if c.decode else None
    S0 = S0.to(POOLS[c.pool][0]) if S0 is not None and c.pool else S0
    cu = packed(c, seed)
    return Inputs(x, do, S0, None if cu is None else cu.to(device), options)


def _raw(c: Case, x: dict[str, Tensor]) -> dict[str, Any]:
    """Options that leave all they can to the function, and x as a layer's projections make it: keys of length sqrt(K), write strengths and
    gates of both signs, these with a time scale A of 1 to 16 and a bias of steps of 0.001 to 0.1, as Mamba-2 begins with."""
    options = all_raw(c.member)
    for n in ("q", "k"):
        x[n] = x[n] * c.K**0.5
    if "use_beta_sigmoid_in_kernel" in options:
        x["beta"] = torch.logit(x["beta"].clamp(0.01, 0.99))
    if "use_gate_in_kernel" not in options:
        return options
    x["g"] = -(-x["g"]).expm1().log()  # what it is the logsigmoid of
    spread = torch.linspace(0, 1, c.HV, device=x["g"].device)
    step = torch.linspace(-6.9, -2.3, x["g"].shape[2:].numel(), device=x["g"].device).exp()
    return {**options, "A_log": (1 + 15 * spread).log(), "dt_bias": step.expm1().log()}


def packed(c: Case, seed: int = 0) -> Tensor | None:
    """Where a case's packed sequences begin and end, on the CPU."""
    return offsets(c.T, c.N, torch.Generator().manual_seed(seed)) if c.N else None


def plain(op: Op) -> bool:
    """Does the member take q, k, v, the gate of its kind and the strength of its rule, and nothing else? Then another library's
    function of the same gate and rule is the same function."""
    wanted = {"q": "B T H K", "k": "B T H K", "v": "B T HV V"}
    if op.gate not in (Gate.NONE, Gate.HEAD):
        wanted["g"] = {Gate.SCALAR: "B T HV", Gate.KEY: "B T HV K", Gate.VALUE: "B T HV V"}[op.gate]
    if op.rule is Rule.DELTA:
        wanted["beta"] = "B T HV"
    return {n: a.axes for n, a in op.args.items()} == wanted and op.passes is None and not op.settings and op.rule is not Rule.DPLR
