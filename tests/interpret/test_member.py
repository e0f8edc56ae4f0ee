"""Every member and form whose passes have kernels, whole, in Triton's interpreter: outputs, states and gradients against its definition."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracle import OP_FORMS, Case, check, definition, honest, ids, make, with_gradients  # noqa: E402

from chunkwise.engine.dispatch import DIGITS, Cell, Choice, choose, run  # noqa: E402
from chunkwise.engine.explain import passes  # noqa: E402
from chunkwise.spec import Form, Gate, Rule  # noqa: E402


def on_kernels(op, cell: Cell, **call) -> Choice:
    """What a call would run on a GPU."""
    return choose(op, cell, **{**call, "device": "cuda", "backend": "triton"})


FORMS = [(op, form) for op, form in OP_FORMS if form is not Form.RECURRENT]  # that one: test_recurrent.py
SERVED = [(op, form) for op, form in FORMS if {c.backend for _, c in passes(op, T=64, device="cuda", form=form)} == {"triton"}]
CASES = {
    "packed, three value heads a head, odd sizes": Case(T=22, n=3, K=5, V=7, N=3),
    "strong gates": Case(T=20, K=8, V=6, strength=20.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("op", "form"), SERVED, ids=ids)
def test_matches_definition(op, form, case):
    call = make(op, case, torch.float32)
    truth = definition(call)
    options = {**op.defaults, "output_final_state": True, "chunk_size": case.chunk, "form": form, **call.options}
    o, S = run(op, call.x, op.check(call.x), options, on_kernels)
    check(with_gradients(o, S, call.leaves()), truth, honest(call, truth), form)


INVERTING = {  # one of each kernel that makes inverses
    (op.rule, op.rule is Rule.DELTA and op.gate is Gate.KEY): op
    for op, _ in SERVED
    if "inverse_precision" in op.defaults and op.passes is None
}  # fmt: skip


@pytest.mark.parametrize("op", INVERTING.values(), ids=ids)
def test_the_inverse_s_precision_reaches_every_kernel_that_makes_one(op):
    """Outputs keep the digits that were asked for; where nothing is asked float32 keeps all."""
    call, made = make(op, Case(T=32, K=8, V=8, chunk=32, correlated=True), torch.float32), {}
    with torch.no_grad():
        for way in ("auto", "ieee", "tf32x3", "bf16"):
            options = {**op.defaults, **call.options, "chunk_size": 32, "inverse_precision": way}
            made[way], _ = run(op, call.x, op.check(call.x), options, on_kernels)
    away = {way: float((o - made["ieee"]).norm() / o.norm()) for way, o in made.items()}
    assert away["auto"] == 0 < away["tf32x3"] < 2.0 ** -DIGITS["tf32x3"] < 2.0 ** -DIGITS["bf16x3"] < away["bf16"] < 2.0 ** -DIGITS["bf16"]
