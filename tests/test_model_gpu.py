"""The models on a GPU: the same function, gradients, packing, caches and tokens as in float64 on the CPU."""

import copy
import itertools

import pytest
import torch
from model_case import KINDS, build, cache_of, flat, gradients, ids, kinds
from nn_agreement import agree

from chunkwise.models.cache import CACHE_FIELD

pytestmark = pytest.mark.gpu
SIZES = dict(hidden_size=64, intermediate_size=64)


def on_gpu(result):
    return {n: t.detach().cpu() for n, t in result.items()}


def run(model, x, **given):
    model.zero_grad()
    output = model(x, labels=x, output_logits=True, **given)
    output.loss.backward()
    return on_gpu(flat(output.logits) | gradients(model))


@kinds
def test_logits_and_gradients_are_those_of_float64(kind):
    model, x = build(**SIZES, **kind).train(), ids(2, 150)
    truth, honest = run(copy.deepcopy(model).double(), x), run(model, x)
    agree(run(model.cuda(), x.cuda()), truth, honest)


@kinds
def test_bfloat16_errs_as_on_the_cpu(kind):
    model, x = build(**SIZES, **kind).to(torch.bfloat16).train(), ids(2, 150)
    truth, honest = copy.deepcopy(model).double()(x).logits, model(x).logits
    agree(on_gpu(flat(model.cuda()(x.cuda()).logits)), on_gpu(flat(truth)), on_gpu(flat(honest)))


@kinds
def test_packed_documents_are_separate_documents(kind):
    model, x, cu = build(**SIZES, **kind).train(), ids(1, 150), torch.tensor([0, 70, 71, 150])
    rows = [x[:, a:b] for a, b in itertools.pairwise(cu.tolist())]
    with torch.no_grad():
        truth = torch.cat([copy.deepcopy(model).double()(r).logits for r in rows], 1)
        honest = torch.cat([model(r).logits for r in rows], 1)
        model = model.cuda()
        packed = model(x.cuda(), cu_seqlens=cu.cuda()).logits
        changed = x.clone()
        changed[:, :70] = ids(1, 70, seed=3)
        assert torch.equal(model(changed.cuda(), cu_seqlens=cu.cuda()).logits[:, 70:], packed[:, 70:])
    agree(on_gpu(flat(packed)), flat(truth), flat(honest))


@kinds
def test_cached_pieces_are_one_pass_and_generation_is_greedy(kind):
    model, x = build(**SIZES, **kind), ids(2, 114)
    with torch.no_grad():
        truth, honest = copy.deepcopy(model).double()(x).logits, model(x).logits
        model, cache, pieces = model.cuda(), None, []
        for a, b in itertools.pairwise([0, 37, 42, 112, 113, 114]):
            output = model(x[:, a:b].cuda(), use_cache=True, **({} if cache is None else {CACHE_FIELD: cache}))
            cache = cache_of(output)
            pieces.append(output.logits)
        agree(on_gpu(flat(torch.cat(pieces, 1))), flat(truth), flat(honest))
        together = model.generate(x.cuda(), max_new_tokens=8, do_sample=False)
        for t in range(114, 122):  # every token is the likeliest, or within rounding of it
            logits = model(together[:, :t]).logits[:, -1]
            best, taken = logits.max(-1).values, logits.gather(1, together[:, t : t + 1])[:, 0]
            assert (best - taken <= 64 * torch.finfo(logits.dtype).eps * logits.abs().max()).all()


@pytest.mark.parametrize("kind", ["gated_delta_rule", "kda", "sliding_attention"])
def test_a_compiled_model_is_one_graph_for_training_and_for_inference(kind):
    """By the compiler that users have: it asks every gradient whether it lies as was promised. Trained on documents told by positions."""
    model, x = build(**SIZES, **KINDS[kind], num_hidden_layers=1).train(), ids(2, 150)
    documents = dict(position_ids=torch.stack([torch.cat([torch.arange(70), torch.arange(80)]), torch.arange(150)]), use_cache=False)
    truth, honest = run(copy.deepcopy(model).double(), x, **documents), run(model, x, **documents)
    with torch.no_grad():
        dense = [flat(m(x).logits) for m in (copy.deepcopy(model).double(), model)]
    model = model.cuda()
    model.zero_grad()
    torch._dynamo.reset()
    whole = torch.compile(model, fullgraph=True)
    given = {n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in documents.items()}
    output = whole(x.cuda(), labels=x.cuda(), output_logits=True, **given)
    output.loss.backward()
    agree(on_gpu(flat(output.logits) | gradients(model)), truth, honest)
    with torch.no_grad():
        agree(on_gpu(flat(whole(x.cuda(), use_cache=False).logits)), *dense)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_flex_attention_trains_as_sdpa(kind):
    """Of 4 query and 2 key heads: padded rows, and packed documents; gradients too, which FlexAttention has on a GPU alone."""
    model, x = build(**{**SIZES, **KINDS[kind]}, num_heads=4, num_kv_heads=2, num_hidden_layers=1).train(), ids(2, 150)
    mask, cu = torch.ones_like(x).index_fill(1, torch.arange(31), 0), torch.tensor([0, 70, 71, 300])
    for tokens, given in ((x, dict(attention_mask=mask)), (x.view(1, -1), dict(cu_seqlens=cu))):
        truth, honest = run(copy.deepcopy(model).double(), tokens, **given), run(model, tokens, **given)
        card = copy.deepcopy(model).cuda()
        card.set_attn_implementation("flex_attention")
        got = run(card, tokens.cuda(), **{n: t.cuda() for n, t in given.items()})
        agree(got, truth, honest)
    torch._dynamo.reset()
