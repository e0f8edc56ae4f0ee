"""Every kernel at small sizes, for NVIDIA's compute-sanitizer to watch: `compute-sanitizer --tool memcheck python tests/sanitize.py`.

Needs a GPU. Options: names of members, "steps", "pieces", "parallel" and "modules"; none: all of it; --few: a case or two of each.
PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives every tensor memory of its own, so that a step over its end is seen. A result that is not finite
stops it: numbers are the other tests' affair.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import oracle
import test_nn_gpu
import torch
from oracle import Case, make, with_gradients

from chunkwise import decode, nn
from chunkwise.engine import stages_triton
from chunkwise.engine.cut import Cut
from chunkwise.spec import Op, Rule, Streams, all_ops

WHOLE = Case(T=130, H=2, K=64, V=64, chunk=64)  # two chunks and a bit
CASES = {
    "whole": WHOLE,
    "wide, ragged": replace(WHOLE, T=70, K=128, V=128),
    "odd": replace(WHOLE, n=2, K=40, V=24),
    "packed": replace(WHOLE, T=200, N=4),
    "strong": replace(WHOLE, T=70, strength=20.0),
}
LONG = Case(T=16 * 64, H=1, K=64, V=64, chunk=64)


def finite(made: Mapping[str, torch.Tensor], what: str) -> None:
    torch.cuda.synchronize()
    for name, t in made.items():
        if not t.isfinite().all():
            sys.exit(f"{what}: {name} is not finite")
    print(what, flush=True)


def call(op: Op, case: Case, dtype: torch.dtype, what: str, form: str = "chunk") -> None:
    drawn = make(op, case, dtype)
    o, S = op(drawn.x, form=form, output_final_state=True, chunk_size=case.chunk, **drawn.options)
    finite(with_gradients(o, S, drawn.leaves()), f"{op.name} {what} {dtype}")


def member(op: Op, few: bool) -> None:
    for what, case in list(CASES.items())[: 2 if few else None]:
        if what != "strong" or any(arg.draw.__name__ == "log_decay" for arg in op.args.values()):
            call(op, case, torch.bfloat16, what)
    if not few:
        call(op, CASES["odd"], torch.float32, "odd")


@contextmanager
def pieces(cut: Cut) -> Iterator[None]:
    """Sequences are scanned in pieces, however short they are."""
    before = stages_triton.split
    stages_triton.split = lambda *sizes, **options: cut
    try:
        yield
    finally:
        stages_triton.split = before


def steps(op: Op) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for v_first in (False, True):
            drawn = make(op, Case(B=3, T=1, H=2, n=2, K=64, V=48), torch.bfloat16)
            x = {n: t.detach() for n, t in drawn.x.items()}
            pool = drawn.S0.detach().to(dtype)
            pool = pool.mT.contiguous() if v_first else pool
            index = torch.tensor([2, -1, 0], dtype=torch.int32, device="cuda")
            o = decode(op, x, pool, index, state_v_first=v_first)
            finite({"o": o, "states": pool}, f"{op.name} step in {dtype}, {'values' if v_first else 'keys'} first")


def modules() -> None:
    for name, (function, shapes) in test_nn_gpu.CASES.items():
        leaves = [test_nn_gpu.draw(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate(shapes)]
        made, _ = test_nn_gpu.with_gradients(function, leaves, "cuda", torch.bfloat16)
        finite({str(i): t for i, t in enumerate(made)}, f"modules: {name}")
    x, w, b, pool = (test_nn_gpu.draw(*shape, dtype=torch.bfloat16).cuda() for shape in [(3, 300), (300, 4), (300,), (4, 300, 4)])
    y = nn.causal_conv1d_update(x, pool, w, b, "silu", torch.tensor([2, -1, 0], device="cuda"))
    finite({"y": y, "states": pool}, "modules: conv step in a pool")


def main(wanted: list[str]) -> None:
    oracle.DEVICE = torch.device("cuda")
    known = [*all_ops(), "steps", "pieces", "parallel", "modules"]
    few = "--few" in wanted
    wanted = [name for name in wanted if name != "--few"]
    if unknown := set(wanted) - set(known):
        sys.exit(f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    some = [op for op in all_ops().values() if not few or op.lower is Streams or op.rule is Rule.DPLR]
    for name in wanted or known:
        if name == "modules":
            modules()
        elif name == "steps":
            for op in some:
                steps(op)
        elif name == "pieces":
            for op in some:
                if op.passes is None:
                    with pieces(Cut((2, 1, 1, 2))):
                        call(op, LONG, torch.bfloat16, "in pieces")
        elif name == "parallel":
            for op in some:
                for what in ("odd", "packed") if op.parallel else ():
                    call(op, CASES[what], torch.bfloat16, f"{what}, as a whole", form="parallel")
        else:
            member(all_ops()[name], few)


if __name__ == "__main__":
    main(sys.argv[1:])
