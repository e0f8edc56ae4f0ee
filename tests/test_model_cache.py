"""What the model remembers: caches, continuation, generation."""

import copy
import itertools

import pytest
import torch
from model_case import KINDS, build, cache_of, config, flat, gradients, ids, kinds, recurrent_kinds, wide
from nn_agreement import agree
from torch.nn import functional as F
from transformers import DynamicCache

from chunkwise.models import MixerCacheLayer
from chunkwise.models.cache import CACHE_FIELD


@kinds
def test_cached_pieces_are_one_pass(kind):
    """Prefill 37, then 5 at once, then 70 at once, then single tokens."""
    model, x = build(**kind), ids(2, 114)
    with torch.no_grad():
        truth, honest = wide(model)(x).logits, model(x).logits
        cache, pieces = DynamicCache(), []
        for a, b in itertools.pairwise([0, 37, 42, 112, 113, 114]):
            output = model(x[:, a:b], **{CACHE_FIELD: cache})
            cache = cache_of(output)
            assert cache.get_seq_length() == b
            pieces.append(output.logits)
    agree(flat(torch.cat(pieces, 1)), flat(truth), flat(honest))


@recurrent_kinds
def test_cache_does_not_grow_and_owns_its_memory(kind):
    model = build(**kind)
    with torch.no_grad():
        cache = cache_of(model(ids(2, 300), use_cache=True))
        sizes = []
        for _ in range(2):
            state = cache.layers[0].state
            tensors = [t for t in state if t is not None]
            assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in tensors)
            sizes.append(sum(t.numel() for t in tensors))
            cache = cache_of(model(ids(2, 50), **{CACHE_FIELD: cache}))
    assert sizes[0] == sizes[1]


@kinds
def test_continuing_a_padded_batch_is_continuing_alone(kind):
    model, x, more = build(**kind), ids(3, 64), ids(3, 9, seed=1)
    lengths = (3, 17, 64)
    mask = torch.stack([F.pad(torch.ones(n, dtype=torch.int64), (64 - n, 0)) for n in lengths])

    def alone(model):
        rows = []
        for i, n in enumerate(lengths):
            row = torch.cat([x[i : i + 1, 64 - n :], more[i : i + 1]], 1)
            rows.append(model(row).logits[:, n:])
        return torch.cat(rows)

    with torch.no_grad():
        cache = cache_of(model(x, attention_mask=mask, use_cache=True))
        both = F.pad(mask, (0, 9), value=1)
        pieces = []
        for a, b in ((0, 5), (5, 6), (6, 9)):
            output = model(more[:, a:b], attention_mask=both[:, : 64 + b], **{CACHE_FIELD: cache})
            pieces.append(output.logits)
        agree(flat(torch.cat(pieces, 1)), flat(alone(wide(model))), flat(alone(model)))


def test_continuing_without_a_mask_keeps_each_rows_positions():
    model, x, more = build(mixer="retention"), ids(2, 20), ids(2, 4, seed=1)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :7] = 0
    with torch.no_grad():
        cache = cache_of(model(x, attention_mask=mask, use_cache=True))
        a = model(more, **{CACHE_FIELD: copy.deepcopy(cache)}).logits
        b = model(more, attention_mask=F.pad(mask, (0, 4), value=1), **{CACHE_FIELD: cache}).logits
    assert torch.equal(a, b)


def test_both_names_of_the_cache_argument_work_and_not_together():
    model, x = build(), ids(1, 8)
    with torch.no_grad():
        a = model(x[:, 4:], cache=cache_of(model(x[:, :4], use_cache=True))).logits
        b = model(x[:, 4:], past_key_values=cache_of(model(x[:, :4], use_cache=True))).logits
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="older name of cache"):
        model(x, cache=DynamicCache(), past_key_values=DynamicCache())


@pytest.mark.parametrize("kind", ["rwkv7 in its own blocks", "hybrid"])
def test_compiled_generation_is_generation(kind):
    """The prompt is one graph and all steps are another (attention's caches grow, so theirs are two), padding and positions included."""
    torch._dynamo.reset()
    model, x = wide(build(**KINDS[kind])), ids(2, 11)
    options = dict(attention_mask=torch.ones_like(x).index_put((torch.tensor(0), torch.arange(4)), torch.tensor(0)), max_new_tokens=5)
    options |= dict(do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    eager, graphs = model.generate(x, **options), []

    def counted(graph, example):
        graphs.append(graph)
        return graph

    model.forward = torch.compile(model.forward, fullgraph=True, backend=counted)
    compiled = model.generate(x, **options)
    assert torch.equal(compiled.sequences, eager.sequences) and len(graphs) <= 3
    agree({"logits": torch.cat(compiled.logits)}, {"logits": torch.cat(eager.logits)}, {"logits": torch.cat(eager.logits).float()})


def test_a_compiled_prompt_whose_positions_begin_anew_is_refused_beside_a_cache():
    torch._dynamo.reset()
    model, x = build(num_hidden_layers=1), ids(1, 8)
    prompt = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(prompt(x, use_cache=True, position_ids=torch.arange(8)[None]).logits, model(x).logits)
        with pytest.raises(RuntimeError, match="position_ids begin anew while a cache is kept"):
            prompt(x, use_cache=True, position_ids=torch.arange(8)[None] % 5)


def test_cropping_is_refused_clearly_and_a_copy_returns():
    model, x = build(), ids(1, 8)
    with torch.no_grad():
        cache = cache_of(model(x, use_cache=True))
        kept = copy.deepcopy(cache)
        after = model(x, **{CACHE_FIELD: cache}).logits
        with pytest.raises(ValueError, match="cannot be cropped"):
            cache.crop(-1)
        assert not cache.is_croppable and torch.equal(model(x, **{CACHE_FIELD: kept}).logits, after)
        with pytest.raises(ValueError, match="assist"):
            model.generate(x, assistant_model=build(), max_new_tokens=4, do_sample=False)


def test_a_cache_cropped_before_the_refusal_is_refused_itself():
    """transformers crops layer by layer: attention layers below a recurrent one have lost tokens when that one refuses."""
    model, x = build(layer_types=["full_attention", "gla"]), ids(1, 12)
    with torch.no_grad():
        cache = cache_of(model(x[:, :9], use_cache=True))
        kept = copy.deepcopy(cache)
        with pytest.raises(ValueError, match="cannot be cropped"):
            cache.crop(-4)
        with pytest.raises(ValueError, match=r"its layers hold \[5, 9\] tokens.*a copy"):
            model(x[:, 9:], **{CACHE_FIELD: cache})
        agree(flat(model(x[:, 9:], **{CACHE_FIELD: kept}).logits), flat(wide(model)(x).logits[:, 9:]), flat(model(x).logits[:, 9:]))


def test_a_recurrent_layers_cache_takes_what_is_offered_to_all_layers():
    """StaticCache offers its length; transformers before 5.24 offers the window of sliding attention, in a model that has such layers."""
    assert MixerCacheLayer(max_cache_len=64, sliding_window=8).get_seq_length() == 0


def test_cache_of_another_model_is_refused():
    model, x = build(), ids(1, 8)
    foreign = DynamicCache(config=config(mixer="full_attention"))
    with pytest.raises(ValueError, match="not made for this model"):
        model(x, **{CACHE_FIELD: foreign})
    with pytest.raises(TypeError, match="must be a transformers Cache"):
        model(x, **{CACHE_FIELD: [None, None]})
    with pytest.raises(ValueError, match="holds N = 1 sequences, the call has 3"):
        model(ids(3, 1), **{CACHE_FIELD: cache_of(model(x, use_cache=True))})


def test_reset_cache_begins_afresh():
    model, x = build(), ids(1, 8)
    with torch.no_grad():
        cache = cache_of(model(x, use_cache=True))
        cache.reset()
        assert cache.get_seq_length() == 0 and torch.equal(model(x, **{CACHE_FIELD: cache}).logits, model(x).logits)


def test_cache_batches_repeat_and_select():
    model, x, more = build(), ids(2, 12), ids(4, 1, seed=1)

    def repeated(model):
        return flat(model(more, **{CACHE_FIELD: cache_of(model(x.repeat_interleave(2, 0), use_cache=True))}).logits)

    with torch.no_grad():
        cache = cache_of(model(x, use_cache=True))
        cache.batch_repeat_interleave(2)
        agree(flat(model(more, **{CACHE_FIELD: cache}).logits), repeated(wide(model)), repeated(model))
        cache.batch_select_indices(torch.tensor([3]))
        assert cache.layers[0].state.seen.tolist() == [13] and isinstance(cache.layers[0], MixerCacheLayer)


@kinds
def test_gradient_flows_through_the_cache(kind):
    model, x = build(**kind).train(), ids(1, 30)

    def chained(model, cuts):
        model.zero_grad()
        cache, logits = DynamicCache(), []
        for a, b in itertools.pairwise(cuts):
            output = model(x[:, a:b], use_cache=True, **{CACHE_FIELD: cache})
            logits.append(output.logits)
        torch.cat(logits, 1).log_softmax(-1)[..., 0].sum().backward()
        return gradients(model)

    agree(chained(model, [0, 11, 12, 30]), chained(wide(model), [0, 30]), chained(model, [0, 30]))


def test_hybrid_cache_counts_the_same_in_every_layer():
    model, x = build(layer_types=["none", "gla", "full_attention", "kda"], num_hidden_layers=4), ids(1, 12)
    with torch.no_grad():
        output = model(x[:, :9], use_cache=True)
        for t in range(9, 12):
            assert [cache_of(output).get_seq_length(i) for i in range(4)] == [t] * 4
            output = model(x[:, t : t + 1], **{CACHE_FIELD: cache_of(output)})
        agree(flat(output.logits), flat(wide(model)(x).logits[:, -1:]), flat(model(x).logits[:, -1:]))


def by_hand(model, x, tokens):
    """Greedy continuation by a whole pass a token."""
    for _ in range(tokens):
        x = torch.cat([x, model(x, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return x


@kinds
def test_greedy_generation_is_a_whole_pass_a_token(kind):
    model, x = wide(build(**kind)), ids(2, 11)
    with torch.no_grad():
        want = by_hand(model, x, 20)
        assert torch.equal(model.generate(x, max_new_tokens=20, do_sample=False), want)
        assert torch.equal(model.generate(x, max_new_tokens=20, do_sample=False, use_cache=False), want)
        assert torch.equal(model.generate(x, max_new_tokens=20, do_sample=False, **{CACHE_FIELD: DynamicCache()}), want)


@kinds
def test_left_padded_generation_is_generation_alone(kind):
    model, x = wide(build(**kind)), ids(3, 64)
    mask = torch.ones_like(x)
    for row, n in enumerate((3, 17, 64)):
        mask[row, : 64 - n] = 0
    x = x * mask
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    together = model.generate(x, attention_mask=mask, **options)
    for row, n in enumerate((3, 17, 64)):
        assert torch.equal(together[row, 64:], model.generate(x[row : row + 1, 64 - n :], **options)[0, n:])


@pytest.mark.parametrize("kind", [dict(mixer="gated_delta_rule"), dict(mixer="full_attention")], ids=["recurrent", "attention"])
def test_right_padded_generation_is_generation_alone_and_returns_the_prompts(kind):
    model, x = wide(build(**kind)), ids(3, 20)
    mask = torch.ones_like(x)
    mask[0, 3:], mask[1, 17:] = 0, 0
    x = x * mask
    options = dict(max_new_tokens=10, do_sample=False, pad_token_id=0)
    together = model.generate(x, attention_mask=mask, **options)
    assert torch.equal(together[:, :20], x)
    for row, n in enumerate((3, 17, 20)):
        assert torch.equal(together[row, 20:], model.generate(x[row : row + 1, :n], **options)[0, n:])
    beams = dict(options, num_beams=2, num_return_sequences=2, return_dict_in_generate=True)
    found = model.generate(input_ids=x, attention_mask=mask, **beams).sequences
    assert torch.equal(found[:, :20], x.repeat_interleave(2, 0))
    assert torch.equal(found[:2, 20:], model.generate(x[:1, :3], **beams).sequences[:, 3:])


@kinds
def test_beams_with_a_cache_are_beams_without(kind):
    model, x = wide(build(**kind)), ids(2, 9)
    options = dict(max_new_tokens=12, num_beams=3, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(x, **options), model.generate(x, **options, use_cache=False))


def test_sampling_follows_its_seed_and_generation_goes_on_from_a_cache():
    model, x = wide(build()), ids(1, 9)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(model.generate(x, max_new_tokens=30, do_sample=True, temperature=1.5, top_p=0.95, top_k=0))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    first = model.generate(x, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    second = model.generate(first.sequences, max_new_tokens=6, do_sample=False, **{CACHE_FIELD: cache_of(first)})
    assert torch.equal(second, model.generate(x, max_new_tokens=12, do_sample=False))


def test_static_caches_serve_recurrent_layers_and_are_refused_beside_attention():
    model, x = wide(build()), ids(1, 9)
    options = dict(max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(x, **options, cache_implementation="static"), model.generate(x, **options))
    with pytest.raises(ValueError, match="static cache cannot serve full_attention"):
        build(mixer="full_attention").generate(x, **options, cache_implementation="static")
