"""The Hugging Face model: padding, packing, loss, checkpointing, compilation."""

import copy
import itertools

import pytest
import torch
from model_case import build, cache_of, flat, gradients, ids, kinds, wide
from nn_agreement import agree
from torch.nn import functional as F

from chunkwise.models.cache import CACHE_FIELD
from chunkwise.nn import plan_packing


@kinds
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_logits_and_gradients_are_those_alone(kind, side):
    model, x = build(**kind).train(), ids(2, 40)
    mask = torch.ones_like(x)
    mask[0, slice(0, 23) if side == "left" else slice(17, 40)] = 0
    labels = x if side == "left" else x.masked_fill(mask == 0, -100)  # padding is never predicted, whatever its labels

    def alone(model):
        model.zero_grad()
        rows = [model(x[i : i + 1, mask[i].bool()]).logits for i in range(2)]
        total = sum(F.cross_entropy(r[0, :-1], x[i, mask[i].bool()][1:], reduction="sum") for i, r in enumerate(rows))
        (total / (mask.sum() - 2)).backward()
        return flat(torch.cat([r[0] for r in rows])) | gradients(model)

    def padded(model):
        model.zero_grad()
        output = model(x, attention_mask=mask, labels=labels, output_logits=True)
        output.loss.backward()
        return flat(output.logits[mask.bool()]) | gradients(model)

    agree(padded(model), alone(wide(model)), alone(model))


@kinds
@pytest.mark.parametrize("by", ["cu_seqlens", "position_ids", "collator"])
def test_packed_documents_are_separate_documents(kind, by):
    model, x, cu = build(**kind).train(), ids(1, 60), torch.tensor([0, 20, 27, 60])
    positions = torch.cat([torch.arange(n) for n in cu.diff().tolist()])[None]
    given = {
        "cu_seqlens": dict(cu_seqlens=cu, attention_mask=torch.ones_like(x)),
        "position_ids": dict(position_ids=positions),
        "collator": dict(position_ids=positions, cu_seq_lens_q=cu.int(), cu_seq_lens_k=cu.int(), max_length_q=33, max_length_k=33),
    }[by]

    def separate(model):
        model.zero_grad()
        rows = [x[:, a:b] for a, b in itertools.pairwise(cu.tolist())]
        outputs = [model(row, labels=row, output_logits=True) for row in rows]
        (sum(o.loss * (row.shape[1] - 1) for o, row in zip(outputs, rows, strict=True)) / (60 - 3)).backward()
        return flat(torch.cat([o.logits for o in outputs], 1)) | gradients(model)

    model.zero_grad()
    output = model(x, labels=x, output_logits=True, **given)
    output.loss.backward()
    agree(flat(output.logits) | gradients(model), separate(wide(model)), separate(model))
    changed = x.clone()
    changed[:, :20] = ids(1, 20, seed=7)
    assert torch.equal(model(changed, **given).logits[:, 20:], output.logits[:, 20:])


def test_packed_prefill_leaves_a_state_for_each_document():
    model, x, cu, more = build(), ids(1, 60), torch.tensor([0, 20, 27, 60]), ids(3, 1, seed=1)

    def separate(model):
        caches = [cache_of(model(x[:, a:b], use_cache=True)) for a, b in itertools.pairwise(cu.tolist())]
        return flat(torch.cat([model(more[i : i + 1], **{CACHE_FIELD: c}).logits for i, c in enumerate(caches)]))

    with torch.no_grad():
        packed = model(more, **{CACHE_FIELD: cache_of(model(x, cu_seqlens=cu, use_cache=True))}).logits
        agree(flat(packed), separate(wide(model)), separate(model))
    with pytest.raises(ValueError, match="packed documents leave no cache"):
        build(mixer="full_attention")(x, cu_seqlens=cu, use_cache=True)


def test_loss_is_shifted_cross_entropy():
    model, x = wide(build()), ids(2, 12)
    labels = x.clone()
    labels[0, 5:] = -100
    output = model(x, labels=labels)
    logits = output.logits
    want = -torch.cat([logits[i, t].log_softmax(-1)[labels[i, t + 1]][None] for i in range(2) for t in range(11) if labels[i, t + 1] >= 0])
    agree({"loss": output.loss}, {"loss": want.mean()})
    agree({"loss": model(x, labels=labels, num_items_in_batch=7).loss}, {"loss": want.sum() / 7})
    assert model(x, labels=torch.full_like(x, -100)).loss == 0
    with pytest.raises(ValueError, match="labels must be"):
        model(x, labels=x[:, 1:])
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(x, labels=x, logits_to_keep=1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_loss_without_logits_is_that_of_the_logits(packed, padded):
    model, x = build(mixer="retention").train(), ids(1, 60) if packed else ids(2, 30)
    given = dict(cu_seqlens=torch.tensor([0, 20, 21, 60])) if packed else {}
    if padded and not packed:
        given["attention_mask"] = torch.ones_like(x).index_fill(1, torch.arange(7), 0)

    def run(model, logits):
        model.zero_grad()
        output = model(x, labels=x, output_logits=logits, num_items_in_batch=50 if padded else None, **given)
        output.loss.backward()
        assert (output.logits is None) == (not logits)
        return {"loss": output.loss.detach(), **gradients(model)}

    agree(run(model, None), run(wide(model), True), run(model, True))


def test_a_head_that_is_more_than_its_weight_is_called():
    model, x, calls = build(mixer="retention").train(), ids(1, 5), []
    assert model(x, labels=x).logits is None and model.eval()(x, labels=x).logits is not None
    model.train().lm_head.register_forward_hook(lambda *args: calls.append(args))
    assert model(x, labels=x).logits is not None and len(calls) == 1


POSITIONS = torch.stack([torch.cat([torch.arange(13), torch.arange(27)]), torch.arange(40)])
HOLES = torch.ones(2, 40, dtype=torch.int64).index_fill(1, torch.arange(7), 0)  # padding on the left


@pytest.mark.parametrize(
    "given",
    [{}, dict(cu_seqlens=torch.tensor([0, 13, 40])), dict(position_ids=POSITIONS), dict(attention_mask=HOLES)],
    ids=["dense", "offsets", "positions", "padding"],
)
def test_training_compiles_without_a_graph_break(given):
    torch._dynamo.reset()
    model, x = build(mixer="gated_delta_rule", num_hidden_layers=1).train(), ids(1 if "cu_seqlens" in given else 2, 40)

    def run(model, call=None):
        model.zero_grad()
        loss = (model if call is None else call)(x, labels=x, use_cache=False, **given).loss
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    eager, compiled = run(model), run(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    if "attention_mask" in given:  # its padding is computed, so sums are taken in another order
        agree(compiled, run(wide(model)), eager)
    else:
        assert all(torch.equal(g, compiled[n]) for n, g in eager.items())


@kinds
def test_every_model_is_one_graph(kind):
    """No break in the whole model: padding, and documents told by positions that begin anew; the graph serves any number of them."""
    torch._dynamo.reset()  # other models' compilations count against the limit of this one's
    model, x = build(**kind, **({} if "layer_types" in kind else dict(num_hidden_layers=1))), ids(2, 40)
    whole = torch.compile(model, backend="eager", fullgraph=True)

    def run(call, mask, positions):
        output = call(x, labels=x, use_cache=False, attention_mask=mask, position_ids=positions)
        return flat(output.logits) | {"loss": output.loss.detach()}

    for mask, positions in ((HOLES, POSITIONS), (HOLES.flip(1), POSITIONS.flip(0) % 19), (torch.ones_like(HOLES), POSITIONS)):
        agree(run(whole, mask, positions), run(wide(model), mask, positions), run(model, mask, positions))
        torch._dynamo.config.error_on_recompile = True
    torch._dynamo.config.error_on_recompile = False


def test_logits_to_keep_keeps_those():
    model, x = build(), ids(2, 12)
    whole = model(x).logits
    assert torch.equal(model(x, logits_to_keep=3).logits, whole[:, -3:])
    assert torch.equal(model(x, logits_to_keep=torch.tensor([2, 5])).logits, whole[:, [2, 5]])


@kinds
def test_checkpointing_changes_nothing(kind):
    plain, x, cu = build(**kind).train(), ids(1, 50), torch.tensor([0, 13, 50])
    results = []
    for reentrant in (None, False, True):
        model = copy.deepcopy(plain)
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        loss = model(x, labels=x, cu_seqlens=cu).loss
        loss.backward()
        results.append((loss, gradients(model)))
    for loss, grads in results[1:]:
        assert torch.equal(loss, results[0][0]) and all(torch.equal(g, results[0][1][n]) for n, g in grads.items())
    with pytest.raises(ValueError, match="use_cache"):
        model(x, use_cache=True)


def test_who_listens_to_a_block_hears_its_output():
    model, x = build(), ids(1, 6)
    alone = model(x, output_hidden_states=True)
    heard: list = []
    model.model.layers[0].register_forward_hook(lambda block, given, output: heard.append(output[0]))
    assert torch.equal(model(x).logits, alone.logits) and torch.equal(heard[0], alone.hidden_states[1])


def test_hidden_states_and_tuples():
    model, x = build(), ids(1, 6)
    output = model(x, output_hidden_states=True)
    assert len(output.hidden_states) == 3 and torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    assert torch.equal(model(x, return_dict=False)[0], output.logits)
    embedded = model(inputs_embeds=model.get_input_embeddings()(x)).logits
    assert torch.equal(embedded, output.logits)
    for wrong in (dict(), dict(input_ids=x, inputs_embeds=model.get_input_embeddings()(x))):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**wrong)
    with pytest.raises(ValueError, match="output_attentions"):
        model(x, output_attentions=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 8])
def test_flex_attention_sees_what_sdpa_sees(window):
    """Grouped heads, dense, padded, packed, by a cache of fewer columns than there were tokens: as PyTorch computes it uncompiled."""
    kind = dict(mixer="full_attention") if window is None else dict(mixer="sliding_attention", sliding_window=window)
    model, x, mask = build(**kind, hidden_size=32, num_heads=4, num_kv_heads=2), ids(2, 30), torch.ones(2, 33, dtype=torch.int64)
    mask[0, :11] = 0

    def run(model, name):
        model.set_attn_implementation(name)
        packed = model(x[:1], cu_seqlens=torch.tensor([0, 13, 14, 30])).logits
        output = model(x, attention_mask=mask[:, :30], use_cache=True)
        more = model(x[:, :3], attention_mask=mask, **{CACHE_FIELD: cache_of(output)}).logits
        return flat(torch.cat([model(x).logits, output.logits * mask[:, :30, None], packed.expand(2, -1, -1), more], 1))

    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        agree(run(model, "flex_attention"), run(wide(model), "sdpa"), run(model, "sdpa"))


@pytest.mark.parametrize("window", [None, 4])
def test_attention_is_its_definition(window):
    kind = dict(mixer="full_attention") if window is None else dict(mixer="sliding_attention", sliding_window=window)
    model, x = build(**kind, num_heads=4, num_kv_heads=2, head_dim=6, rope_theta=100.0), ids(1, 9)
    layer = wide(model).model.layers[0].attn
    h = torch.randn(9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = (F.linear(h, p.weight).view(9, -1, 6) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    turn = torch.outer(torch.arange(9.0, dtype=torch.float64), 100 ** (-torch.arange(3, dtype=torch.float64) / 3))
    turn = torch.polar(torch.ones_like(turn), turn)[:, None]
    q, k = (torch.complex(t[..., :3], t[..., 3:]) * turn for t in (q, k))
    rows = []
    for t in range(9):
        seen = slice(max(0, t + 1 - (window or 9)), t + 1)
        scores = [(q[t, i] * k[seen, i // 2].conj()).real.sum(-1) / 6**0.5 for i in range(4)]
        rows.append(torch.cat([s.softmax(0) @ v[seen, i // 2] for i, s in enumerate(scores)]))
    truth = F.linear(torch.stack(rows), layer.o_proj.weight)
    single = model.model.layers[0].attn(h.float()[None], plan_packing(1, 9))[0]
    exact = layer(h[None], plan_packing(1, 9))[0]
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    agree({"o": exact.detach()}, {"o": truth}, {"o": truth + (single.double() - truth) * ratio})
    assert model(x).logits.isfinite().all()
