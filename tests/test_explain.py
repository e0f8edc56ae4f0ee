"""What a call would run on a GPU, where there are no kernels and why: decided without a GPU, and said."""

from itertools import product

import pytest
import torch

import chunkwise
from chunkwise.engine.dispatch import Cell, choose
from chunkwise.spec import BY_CHUNKS, Gate, Rule

GDN = chunkwise.all_ops()["gated_delta_rule"]
NO_KERNELS = {
    "float64": ("gla", dict(dtype=torch.float64), "none for torch.float64"),
    "the parallel form of what corrects": ("delta_rule", dict(form="parallel"), "the parallel form has none for rule 'delta'"),
    "wide keys": ("gla", dict(K=512, dtype=torch.float32), "none for K=512 above 256"),
    "wide keys, token by token": ("gla", dict(K=2048, form="recurrent"), "none for K=2048 above 1024"),
}


@pytest.mark.parametrize("case", NO_KERNELS)
def test_a_call_without_kernels_says_why_and_is_refused_where_they_are_asked_for(case):
    op, call, why = NO_KERNELS[case]
    assert "torch backend" in (said := chunkwise.explain(op, T=100, device="cuda", **call)) and why in said
    with pytest.raises(ValueError, match=f"{op}: backend='triton' cannot serve this call: {why}"):
        chunkwise.explain(op, T=100, device="cuda", backend="triton", **call)


def test_the_parallel_form_of_gates_per_channel_goes_by_chunks_and_says_so():
    said = chunkwise.explain("gla", T=100, device="cuda", form="parallel")
    assert "parallel form, triton backend" in said and BY_CHUNKS in said
    pairs = chunkwise.explain("simple_gla", T=100, device="cuda", form="parallel")
    assert "chunks of 64" in said and "triton backend, one chunk" in pairs and BY_CHUNKS not in pairs
    assert BY_CHUNKS in chunkwise.parallel_gla.__doc__


def test_cells_that_no_member_has_are_told_apart():
    cells = {
        "rule 'delta' with gate 'value'": Cell(Gate.VALUE, Rule.DELTA, torch.float32, 64, 64),
        "rule 'add' and a bonus with gate 'value'": Cell(Gate.VALUE, Rule.ADD, torch.float32, 64, 64, bonus=True),
        "an erase key that reads before the token forgets": Cell(Gate.KEY, Rule.DELTA, torch.float32, 64, 64, before=True),
        "none for V=1024 above 512 in torch.bfloat16": Cell(Gate.VALUE, Rule.ADD, torch.bfloat16, 64, 64, V=1024),
    }
    for why, cell in cells.items():
        assert why in choose(GDN, cell, T=100, device="cuda", grad=True).reason
    for gate, rule in product((Gate.NONE, Gate.HEAD, Gate.SCALAR, Gate.KEY), Rule):
        assert choose(GDN, Cell(gate, rule, torch.float32, 64, 64), T=100, device="cuda", grad=True).backend == "triton"
    back = choose(GDN, Cell(Gate.KEY, Rule.ADD, torch.float32, 512, 64), T=9, device="cuda", grad=True, form="recurrent")
    assert back.plan == "triton_recurrent_torch" and "gradient by the torch backend: none for K=512" in back.reason


def test_without_triton_a_gpu_runs_pytorch(monkeypatch):
    monkeypatch.setattr("chunkwise.engine.dispatch.TRITON", False)
    assert "triton is not installed" in chunkwise.explain("gla", T=100, device="cuda")


@pytest.mark.parametrize("final", [False, True])
def test_raw_streams_of_a_few_tokens_are_one_kernel(final):
    raw = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=final)
    said = chunkwise.explain("gated_delta_rule", T=2, device="cuda", **raw)
    assert said == "gated_delta_rule: recurrent form, triton backend, token by token (4 tokens or fewer)"
    cu = torch.tensor([0, 2], dtype=torch.int32)
    assert "chunk form, triton" in chunkwise.explain("gated_delta_rule", T=2, device="cuda", cu_seqlens=cu, **raw)
    assert "chunk form, triton" in chunkwise.explain("gated_delta_rule", T=2, device="cuda", grad=True, **raw)


def test_the_package_lists_its_names():
    assert {"gla", "chunk_gla", "decode", "prefill", "explain", "snapshots"} <= set(dir(chunkwise))
