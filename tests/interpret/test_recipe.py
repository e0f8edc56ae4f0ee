"""A recorded pass, done again with other tensors, is the pass; its launches run in the interpreter here."""

from dataclasses import replace

import pytest
import torch
from gate_case import draw, posed

from chunkwise.engine import plan_triton
from chunkwise.engine.launch import descriptor
from chunkwise.engine.program import Operator, Program, seen
from chunkwise.engine.record import Described, Launch, Recorder, View
from chunkwise.spec import Gate, Rule, Streams

CASES = {
    "scalar delta, packed, shared keys": (Gate.SCALAR, Rule.DELTA, dict(n=2), torch.tensor([0, 5, 5, 20])),
    "key delta": (Gate.KEY, Rule.DELTA, dict(dtype=torch.bfloat16), None),
    "head add, shared keys": (Gate.HEAD, Rule.ADD, dict(n=2), None),
    "bonus": (Gate.KEY, Rule.ADD, dict(bonus=True), None),
    "value add": (Gate.VALUE, Rule.ADD, {}, None),
}


def given(x, have, block):
    """An argument of a launch, as the kernel gets it."""
    if isinstance(x, Described):
        return descriptor(given(x.view, have, block), x.shape, x.strides, x.block)
    if not isinstance(x, View):
        return x
    if x.base != block:
        return seen(have[x.base], x)
    return have[block][x.offset :].view(x.dtype)[: 1 + sum((n - 1) * s for n, s in zip(x.shape, x.strides))].as_strided(x.shape, x.strides)


def again(program, tensors):
    have = program.allocate(tensors, program.makers(torch.device("cpu")))
    have[program.room] = torch.empty(program.block, dtype=torch.uint8)
    for step in program.steps:
        if isinstance(step, Operator):
            step(have, torch.device("cpu"))
        else:
            step.kernel[step.grid](*(given(x, have, program.room) for x in step.args), **step.switches, **step.config.launch)
    return program.results(have)


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_pass_done_again_is_the_pass(case):
    gate, rule, sizes, cu = CASES[case]

    def forward(*t):
        x, p_ = Streams._make(t[:9]), replace(p, cu_seqlens=t[10])
        return plan_triton.forward(p_, x, t[9], final=True, save=True)

    def backward(*t):
        x, p_ = Streams._make(t[:9]), replace(p, cu_seqlens=t[10])
        d, dS0 = plan_triton.backward(p_, x, t[9], t[11], x.v, t[9])
        return *d, dS0

    programs = {}
    torch.use_deterministic_algorithms(True)  # what nobody has written is NaN
    try:
        for seed in (0, 1):
            x = draw(gate, rule, seed=seed, **dict(B=1, T=20, H=1) | sizes)
            p = posed(x, gate, rule, cu=cu)
            tensors = [*x, torch.randn(p.N, p.HV, p.K, p.V), cu]
            for hosts in (forward, backward):
                if hosts not in programs:
                    with torch.no_grad(), Recorder(tensors) as recorder:
                        made = hosts(*recorder.inputs)
                    assert any(isinstance(step, Launch) for step in recorder.steps) and made[0].is_meta
                    programs[hosts] = Program(recorder, made)
                want, got = hosts(*tensors), again(programs[hosts], tensors)
                for a, b in zip(want, got, strict=True):
                    assert (a is None and b is None) or torch.equal(a, b)
                tensors.append(want[2])
    finally:
        torch.use_deterministic_algorithms(False)
