"""What `chunkwise bench` of given shapes launches on a card, built before there is one: our kernels, and another library's in Triton with
all candidates of its autotuner, so that a first call there has nothing left to build.

A peer asks PyTorch about the card when it is imported: workers that hear and build its kernels answer as the stand-in driver does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch

from ..engine.precompile import TARGETS, Built, Launch, build, call, hear, possible, stand_in
from . import peer as library
from .autotuner import offer_all
from .case import case, draw, packed
from .measure import reason, select

META = torch.device("meta")


def ahead(
    arch: str, ops: Sequence[str], shapes: Sequence[str], dtypes: Sequence[str], wanted: Sequence[str], jobs: int | None = None,
    card: str = "", heard: Callable[[Built, int], None] = lambda built, of: None, gates: str = "slow",
) -> tuple[list[Built], dict[str, list[Built]], list[str]]:  # fmt: skip
    """Ours, and each peer's by its name, of every member, shape and dtype, without a gradient and with; and why a side has none of a case.
    Peers' may not fit the card: they are candidates. Raises ValueError for what is unknown or `case` refuses, and for peers of a card
    that is not NVIDIA's; RuntimeError without Triton or under its interpreter."""
    possible(arch, ops, dtypes, card)
    cases = [case(op, "auto", shape, dtype, gates) for op, shape, dtype in product(ops, shapes, dtypes)]
    peers = select(wanted)
    if peers and TARGETS[arch].backend != "cuda":
        raise ValueError(f"precompile: other libraries' kernels are built for NVIDIA's cards, got {arch}")
    why: list[str] = []

    def good(found: list[Launch]) -> list[Launch]:
        why.extend(launch.name for launch in found if not launch.module)
        return [launch for launch in found if launch.module]

    other = () if gates == "slow" else (gates,)
    asked = {(c.op, c.shape, c.dtype, *other): None for c in cases}
    made = build(arch, _ours, list(asked), jobs, heard, card, good)
    others: dict[str, list[Built]] = {name: [] for name in peers}
    for name, dtype in product(peers, dict.fromkeys(c.dtype for c in cases)):
        calls = [(name, *one) for one in asked if one[2] == dtype]
        others[name] += build(arch, _theirs, calls, jobs, heard, card, good, _begin, (name, dtype))
    return made, others, why


def _ours(op: str, shape: str, dtype: str, gates: str = "slow") -> list[Launch]:
    """What our side of a case launches under the driver of this process."""
    c = case(op, "auto", shape, dtype, gates)

    def run() -> None:
        x = draw(c, META)
        for grad in (False,) if c.decode else (False, True):
            given = {n: t.detach().requires_grad_(grad) for n, t in x.x.items()}
            call(c.member, given, grad, form=c.form, initial_state=x.S0, output_final_state=x.S0 is not None, cu_seqlens=x.cu, **x.options)

    return hear(run)


def _theirs(name: str, op: str, shape: str, dtype: str, gates: str = "slow") -> list[Launch]:
    """What a peer's does; or, in place of a kernel, why it has none."""
    c, module = case(op, "auto", shape, dtype, gates), library.peers()[name]

    def run() -> None:
        x = draw(c, META)._replace(cu=packed(c))  # its hosts read where sequences begin
        w = library.work(module, c, x)
        w.forward()
        if w.step is not None and not c.decode:
            w.step()

    try:
        why = library.lacking(module, c)
        found = [] if why else hear(run)
    except Exception as error:
        found, why = [], reason(error)
    return found or [Launch("", f"{name}, {op}, {shape}, {dtype}: {why or 'launches no kernel of Triton'}", "")]


def _begin(arch: str, card: str, name: str, dtype: str) -> None:
    """Begin a worker for a peer's kernels."""
    stand_in(arch, card)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda device=None: card or arch
    torch.cuda.get_device_capability = lambda device=None: divmod(int(TARGETS[arch].arch), 10)
    offer_all()
    prepare = getattr(library.peers()[name], "prepare", None)
    if prepare is not None:
        prepare(dtype)
