"""transformers' own models with and without the drop-in: the same tokens, losses and gradients; packed documents are separate documents."""

import importlib.util
import itertools
import sys
from types import ModuleType

import pytest
import torch
from nn_agreement import agree

pytest.importorskip("transformers", reason="transformers is not installed")
if importlib.util.find_spec("fla") is not None:
    pytest.skip("fla is installed: transformers would bind it, and its fallback could not be compared with", allow_module_level=True)

from compat_case import APART, CU, HERE, cross_entropy, drop_in, gradients, ids, models, results, tiny, wide  # noqa: E402
from transformers import StaticCache  # noqa: E402

from chunkwise.models.cache import CACHE_FIELD as CACHE  # noqa: E402


@models
def test_model_computes_what_its_fallback_does(name):
    model, x = tiny(name), ids(2, 70)
    fallback = results(model, x)
    with torch.no_grad():
        greedy = model.generate(x[:, :9], max_new_tokens=12, do_sample=False)
    with drop_in() as patch:
        assert any("chunk_" in line for line in patch.replaced)
        got, truth = results(model, x), results(wide(model), x)
        with torch.no_grad():
            assert torch.equal(model.generate(x[:, :9], max_new_tokens=12, do_sample=False), greedy)
    agree(got, truth, fallback)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens_q", "collator"])
def test_packed_documents_are_separate_documents(name, by):
    model, x, cu = tiny(name), ids(1, CU[-1]), torch.tensor(CU, dtype=torch.int32)
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(CU)])[None]
    document = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(itertools.pairwise(CU))])[None].int()
    given = {
        "position_ids": dict(position_ids=positions),
        "cu_seq_lens_q": dict(cu_seq_lens_q=cu),
        "collator": dict(position_ids=positions, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=33, max_length_k=33, seq_idx=document),
    }[by]

    def together(model):
        model.zero_grad()
        logits = model(x, **given).logits
        total = sum(cross_entropy(logits[:, a:b], x[:, a:b]) for a, b in itertools.pairwise(CU))
        total.backward()
        return {"logits": logits.detach()[0]} | gradients(model)

    def apart(model):
        model.zero_grad()
        rows = [model(x[:, a:b], use_cache=False).logits for a, b in itertools.pairwise(CU)]
        sum(cross_entropy(r, x[:, a:b]) for r, (a, b) in zip(rows, itertools.pairwise(CU))).backward()
        return {"logits": torch.cat(rows, 1).detach()[0]} | gradients(model)

    with drop_in():
        agree(together(model), apart(wide(model)), apart(model))


def test_a_mask_of_ones_and_positions_of_images_pack_as_well():
    model, x, cu = tiny("qwen3_5"), ids(1, CU[-1]), torch.tensor(CU, dtype=torch.int32)
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(CU)])[None]
    ones, rising = torch.ones_like(x), torch.arange(0, 2 * CU[-1], 2)[None]
    with drop_in(), torch.no_grad():
        want = model(x, position_ids=positions, use_cache=False).logits
        for given in (
            dict(position_ids=positions, attention_mask=ones),
            dict(cu_seq_lens_q=cu, attention_mask=ones),
            dict(position_ids=positions.expand(3, 1, -1)),
            dict(position_ids=positions.expand(4, 1, -1), attention_mask=ones),
            dict(position_ids=positions.expand(3, 1, -1), cu_seq_lens_q=cu),
        ):
            assert torch.equal(model(x, **given).logits, want), given.keys()
        with pytest.raises(ValueError, match="attention_mask beside cu_seq_lens_q"):
            model(x, cu_seq_lens_q=cu, attention_mask=ones.index_fill(1, torch.tensor([3]), 0))
        whole = model(x, position_ids=rising, attention_mask=ones, use_cache=False).logits
        assert torch.equal(model(x, position_ids=rising.expand(3, 1, -1), use_cache=False).logits, whole)  # rises: one document
        image = torch.tensor([[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]])[:, None]
        one = dict(cu_seq_lens_q=cu.new_tensor([0, 8]))
        assert torch.equal(*(model(x[:, :8], position_ids=image, **more).logits for more in (one, {})))


@models
def test_without_the_drop_in_packed_documents_leak_or_are_refused(name):
    """Both end with it: nothing of the first document reaches the others. The layer alone, called as the model calls it."""
    model, x, cu = tiny(name), ids(1, CU[-1]), torch.tensor(CU, dtype=torch.int32)
    changed = x.clone()
    changed[:, : CU[1]] = ids(1, CU[1], seed=7)
    layer = getattr(model.model.layers[0], "linear_attn", None) or model.model.layers[0].self_attn

    def moved():
        a, b = (layer(model.model.embed_tokens(t), cu_seq_lens_q=cu)[:, CU[1] :] for t in (x, changed))
        return (a - b).abs().max()

    with torch.no_grad():
        try:
            assert moved() > 0
        except ValueError as refused:
            assert "packed" in str(refused)
        with drop_in():
            assert moved() == 0


told = pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens_q"])


def moved_by_the_first(name, by):
    """By how much another first document, told by nothing but `by`, moves the others' logits; what the patch said of the model."""
    model, x = tiny(name), ids(1, CU[-1])
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(CU)])[None]
    changed, told = x.clone(), positions if by == "position_ids" else torch.tensor(CU, dtype=torch.int32)
    changed[:, : CU[1]] = ids(1, CU[1], seed=7)
    with drop_in() as patch, torch.no_grad():
        a, b = (model(t, **{by: told}, use_cache=False).logits[:, CU[1] :] for t in (x, changed))
        lines = [line for line in str(patch).splitlines() if f".{type(model).__name__}: packed" in line]
    return (a - b).abs().max(), lines


@told
@pytest.mark.parametrize("name", APART)
def test_models_said_to_keep_documents_apart_do(name, by):
    moved, lines = moved_by_the_first(name, by)
    assert moved == 0 and [line.partition(": ")[2] for line in lines] == ["packed documents kept apart"]


@told
def test_a_model_whose_scan_is_not_ours_is_not_said_to_keep_documents_apart(by):
    from transformers.models.bamba import modeling_bamba as m

    forward = m.BambaForCausalLM.forward
    moved, lines = moved_by_the_first("bamba", by)
    assert moved > 0 and len(lines) == 1 and ": packed documents NOT kept apart, its scan is not ours (mamba_ssm." in lines[0]
    with drop_in() as patch:
        assert m.BambaForCausalLM.forward is forward and lines[0] in patch.not_apart
        assert not any("Bamba" in line and "documents" in line for line in patch.replaced)


def test_position_ids_that_begin_anew_in_several_rows_are_refused():
    model, x = tiny("qwen3_5"), ids(2, 10)
    with drop_in(), pytest.raises(ValueError, match="one row.*\\[2, 10\\]"):
        model(x, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6]] * 2))


def test_positions_of_padded_rows_are_no_documents():
    model, x = tiny("qwen3_next"), ids(2, 10)
    mask = torch.tensor([[0] * 3 + [1] * 7, [1] * 10])
    places = mask.cumsum(1) - 1
    with drop_in(), torch.no_grad():
        alone = model(x[:1, 3:]).logits[0]
        for positions in (places.clamp(min=0), places.masked_fill(mask == 0, 1), None):
            out = model(x, attention_mask=mask, position_ids=positions).logits[0, 3:]
            agree({"logits": out}, {"logits": alone.double()}, {"logits": alone})


@models
def test_padded_and_cached_calls_equal_whole_ones(name):
    """Prefill 8, then 1 + 7 tokens at once; left padding changes nothing."""
    model, x = tiny(name), ids(1, 16)
    with drop_in(), torch.no_grad():
        truth, whole = wide(model)(x).logits[0], model(x).logits[0]
        out = model(x[:, :8], use_cache=True)
        parts = [out.logits]
        for a, b in ((8, 9), (9, 16)):
            out = model(x[:, a:b], use_cache=True, **{CACHE: out[CACHE]})
            parts.append(out.logits)
        agree({"logits": torch.cat(parts, 1)[0]}, {"logits": truth}, {"logits": whole})
        padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), x], 1)
        out = model(padded, attention_mask=(padded > 0).long())
        agree({"logits": out.logits[0, 5:]}, {"logits": truth}, {"logits": whole})


@models
def test_padding_between_turns_changes_no_token(name):
    """The second turn of a conversation, padded on its left while the cache holds the first: one call with all of it and its mask."""
    model, x = tiny(name), ids(2, 16)
    mask = torch.ones_like(x)
    mask[1, 9:12] = 0

    def turns(model):
        first = model(x[:, :9], attention_mask=mask[:, :9], use_cache=True)
        second = model(x[:, 9:], attention_mask=mask, use_cache=True, **{CACHE: first[CACHE]})
        return {"logits": torch.cat([first.logits, second.logits], 1)[mask.bool()]}

    with drop_in(), torch.no_grad():
        whole = {"logits": model(x, attention_mask=mask).logits[mask.bool()]}
        agree(turns(model), turns(wide(model)), whole)


@models
def test_attention_beside_the_layers_may_be_computed_either_way(name):
    model, x = tiny(name), ids(2, 16)
    mask = torch.ones_like(x)
    mask[1, :5] = 0

    def logits(model, how):
        model.set_attn_implementation(how)
        return {"logits": model(x, attention_mask=mask).logits[mask.bool()]}

    with drop_in(), torch.no_grad():
        agree(logits(model, "eager"), logits(wide(model), "sdpa"), logits(model, "sdpa"))


@models
def test_a_compiled_step_generates_the_same_tokens_without_a_graph_break(name):
    model, x = tiny(name, experts_implementation="batched_mm"), ids(2, 9)  # how transformers' experts compile
    with drop_in(), torch.no_grad():
        want = model.generate(x, max_new_tokens=5, do_sample=False)
        torch._dynamo.reset()
        step = torch.compile(model.forward, fullgraph=True, backend="eager")
        out = model(x, use_cache=True, **{CACHE: StaticCache(config=model.config, max_cache_len=16)})
        cache, tokens = out[CACHE], [x]
        for place in range(9, 14):
            tokens.append(out.logits[:, -1:].argmax(-1))
            out = step(tokens[-1], position_ids=torch.full((2, 1), place), use_cache=True, **{CACHE: cache})
        assert torch.equal(torch.cat(tokens, 1), want)
        layer, kda = cache.layers[0], name == "kimi_linear"
        assert layer.conv_states[0].shape == (2, 48 if kda else 96, 4)  # [B, 2 H K + HV V, W]
        assert layer.recurrent_states[0].shape == ((2, 2, 8, 8) if kda else (2, 4, 8, 16))  # [B, HV, K, V]


def test_patch_says_what_it_replaced_and_can_be_undone():
    from transformers.models.qwen3_5 import modeling_qwen3_5 as m

    before = dict(vars(m)), m.Qwen3_5TextModel.forward
    norm = m.Qwen3_5RMSNormGated.forward
    patch = drop_in()
    assert f"{m.__name__}.Qwen3_5RMSNormGated -> chunkwise.nn.rms_norm" in patch.replaced
    assert m.Qwen3_5RMSNormGated.forward is not norm
    assert f"{m.__name__}.torch_chunk_gated_delta_rule -> fla.chunk_gated_delta_rule" in str(patch)
    assert m.torch_chunk_gated_delta_rule is not before[0]["torch_chunk_gated_delta_rule"]
    again = drop_in()
    assert not again.replaced and "nothing to replace" in str(again)
    again.undo()
    patch.undo()
    assert dict(vars(m)) == before[0] and m.Qwen3_5TextModel.forward is before[1]
    assert m.Qwen3_5RMSNormGated.forward is norm


def test_a_model_imported_under_the_patch_is_its_own_when_the_patch_is_undone(monkeypatch):
    """transformers binds functions at import: such a model holds ours, and nothing that the patch changed."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback as bound

    module = ModuleType("transformers.models.made.modeling_made")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    x, w = torch.randn(1, 4, 9), torch.randn(4, 3)
    with drop_in():
        module.causal_conv1d_fn = bound("causal_conv1d_fn", "causal_conv1d")(lambda x, weight: "their own")
        assert module.causal_conv1d_fn(x, w).shape == x.shape
        with drop_in() as again:
            assert again.replaced
    assert module.causal_conv1d_fn(x, w) == "their own"


def test_norms_of_another_kind_stay():
    from transformers.models.falcon_h1 import modeling_falcon_h1 as falcon
    from transformers.models.mamba2 import modeling_mamba2 as mamba

    from chunkwise.compat.patch import _norms

    assert [*_norms(falcon)] == [*_norms(mamba)] == []  # the first may gate before it norms, the second does

    class Norm(torch.nn.Module):
        def __init__(self, hidden_size, eps=1e-6, activation="silu"):
            super().__init__()
            self.weight, self.eps, self.activation = torch.nn.Parameter(torch.ones(hidden_size)), eps, activation

        def forward(self, hidden_states, gate=None):
            return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps) * gate.sigmoid()

    module = ModuleType(__name__)
    module.Norm = Norm
    assert [*_norms(module)] == []  # its eps has another name


def test_a_compiled_layer_is_ours_whatever_dynamo_says_of_export(monkeypatch):
    """Dynamo of torch before 2.13 says that somebody exports whenever it compiles, and transformers' decorator believes it."""
    monkeypatch.setattr("transformers.integrations.hub_kernels.is_torchdynamo_exporting", lambda: True)
    layer, graphs = tiny("qwen3_5").model.layers[0].linear_attn, []

    def backend(graph, example):
        graphs.append(str(graph.graph))
        return graph

    def products():
        graphs.clear()
        torch._dynamo.reset()
        torch.compile(layer, fullgraph=True, backend=backend)(torch.randn(1, 70, layer.hidden_size))
        return graphs[0].count("matmul")

    assert products() > 0
    with drop_in():
        assert products() == 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_trains_without_a_graph_break(packed):
    """Dense rows, and documents told by positions alone."""
    model, x = tiny("qwen3_5").train(), ids(1 if packed else 2, CU[-1])
    given = dict(position_ids=torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(CU)])[None]) if packed else {}
    with drop_in():
        both = []
        torch._dynamo.reset()
        for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            model.zero_grad()
            output = call(input_ids=x, labels=x, use_cache=False, **given)
            output.loss.backward()
            both.append({"logits": output.logits.detach(), **gradients(model)})
        torch._dynamo.reset()
    assert all(torch.equal(t, both[1][n]) for n, t in both[0].items())
