"""The drop-in on a GPU: transformers' tiny models there compute what they compute in float64 on a CPU; packed documents stay apart."""

import copy
import itertools

import pytest
import torch
from nn_agreement import agree

pytest.importorskip("transformers", reason="transformers is not installed")

from compat_case import CU, cross_entropy, drop_in, gradients, ids, models, results, tiny, wide  # noqa: E402

pytestmark = pytest.mark.gpu


def cpu(x):
    return {n: t.cpu() for n, t in x.items()}


def loss_of(result, x, dtype):
    """Of the next tokens, by the logits of a result."""
    logits = result["logits"].to(dtype).view(*x.shape, -1)[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())[None]


@models
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_computes_on_a_gpu_what_it_does_in_float64(name, dtype):
    model, x = tiny(name).to(dtype), ids(2, 70)
    with drop_in():
        truth, honest = results(wide(model), x), results(model, x)
        got = cpu(results(copy.deepcopy(model).cuda(), x.cuda()))
    if dtype != torch.float32:  # a mean over tokens may be right by luck: the loss is that of the logits that are held against the truth
        agree({"loss": got["loss"]}, {"loss": loss_of(got, x, torch.float64)}, {"loss": loss_of(got, x, torch.float32)})
        got, truth, honest = ({n: t for n, t in r.items() if n != "loss"} for r in (got, truth, honest))
    agree(got, truth, honest)


@models
def test_packed_documents_are_separate_documents_on_a_gpu(name):
    model, x, cu = tiny(name), ids(1, CU[-1]), torch.tensor(CU, dtype=torch.int32)

    def run(model, together, where):
        model.zero_grad()
        row = x.to(where)
        if together:
            logits = model(row, cu_seq_lens_q=cu.to(where)).logits
        else:
            logits = torch.cat([model(row[:, a:b], use_cache=False).logits for a, b in itertools.pairwise(CU)], 1)
        sum(cross_entropy(logits[:, a:b], row[:, a:b]) for a, b in itertools.pairwise(CU)).backward()
        return cpu({"logits": logits.detach()[0]} | gradients(model))

    with drop_in():
        on_card = copy.deepcopy(model).cuda()
        agree(run(on_card, True, "cuda"), run(wide(model), False, "cpu"), run(on_card, False, "cuda"))


@models
def test_generation_on_a_gpu_is_that_on_a_cpu(name):
    model, x = tiny(name), ids(2, 9)
    with torch.no_grad(), drop_in():
        greedy = model.generate(x, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.cuda().generate(x.cuda(), max_new_tokens=12, do_sample=False).cpu(), greedy)


def test_a_compiled_training_step_is_one_graph_and_the_step():
    """By the compiler that users have: it asks every gradient whether it lies as was promised."""
    model, x = tiny("qwen3_5"), ids(2, 70)
    with drop_in():
        truth, honest = results(wide(model), x), results(model, x)
        model.cuda()
        torch._dynamo.reset()
        got = results(model, x.cuda(), call=torch.compile(model, fullgraph=True))
        torch._dynamo.reset()
    agree(cpu(got), truth, honest)
