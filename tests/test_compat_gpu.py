"""The drop-in on a GPU: transformers' tiny models there compute what they compute in float64 on a CPU; packed documents stay apart."""

import copy
import itertools

import pytest
import torch
from nn_agreement import agree

pytest.importorskip("transformers", reason="transformers is not installed")

from test_compat_transformers import CU, cross_entropy, gradients, ids, models, results, tiny, wide  # noqa: E402

from chunkwise.compat import patch_transformers  # noqa: E402

pytestmark = pytest.mark.gpu


def cpu(x):
    return {n: t.cpu() for n, t in x.items()}


@models
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_computes_on_a_gpu_what_it_does_in_float64(name, dtype):
    model, x = tiny(name).to(dtype), ids(2, 70)
    with patch_transformers():
        truth, honest = results(wide(model), x), results(model, x)
        agree(cpu(results(copy.deepcopy(model).cuda(), x.cuda())), truth, honest)


@models
def test_packed_documents_are_separate_documents_on_a_gpu(name):
    model, x, cu = tiny(name), ids(1, CU[-1]), torch.tensor(CU, dtype=torch.int32)

    def results(model, together, where):
        model.zero_grad()
        row = x.to(where)
        if together:
            logits = model(row, cu_seq_lens_q=cu.to(where)).logits
        else:
            logits = torch.cat([model(row[:, a:b], use_cache=False).logits for a, b in itertools.pairwise(CU)], 1)
        sum(cross_entropy(logits[:, a:b], row[:, a:b]) for a, b in itertools.pairwise(CU)).backward()
        return cpu({"logits": logits.detach()[0]} | gradients(model))

    with patch_transformers():
        on_card = copy.deepcopy(model).cuda()
        agree(results(on_card, True, "cuda"), results(wide(model), False, "cpu"), results(on_card, False, "cuda"))


@models
def test_generation_on_a_gpu_is_the_fallback_s(name):
    model, x = tiny(name).cuda(), ids(2, 9).cuda()
    with torch.no_grad():
        greedy = model.generate(x, max_new_tokens=12, do_sample=False)
        with patch_transformers():
            assert torch.equal(model.generate(x, max_new_tokens=12, do_sample=False), greedy)
