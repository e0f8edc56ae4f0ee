"""The evaluation harness on these models: its likelihoods are the model's own."""

import json
import sys

import pytest
import torch
from model_case import build

from chunkwise.data.tokenizer import byte_tokenizer, encode

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

CHOICES = [("The sky is", [" blue", " made of cheese"], 0), ("Two and two are", [" five", " four"], 1)]
CHOOSE = """
task: choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
READ = """
task: read
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


def saved(folder):
    """A model in a folder, with the byte tokenizer, which has no token to pad with."""
    tokenizer = byte_tokenizer()
    model = build(mixer="gated_delta_rule", vocab_size=len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.filterwarnings("ignore")
def test_harness_generates_in_batches_what_the_model_does_alone(tmp_path):
    from lm_eval.api.instance import Instance

    from chunkwise.models import harness

    model, tokenizer = saved(tmp_path)
    prompts = [q for q, _, _ in CHOICES]
    assert len({len(p) for p in prompts}) == len(prompts)  # so rows are padded
    asked = [Instance("generate_until", {}, (p, {"until": [], "max_gen_toks": 9}), i) for i, p in enumerate(prompts)]
    got = harness.ChunkwiseLM(pretrained=str(tmp_path), device="cpu", dtype="float32", batch_size=2).generate_until(asked)
    for prompt, text in zip(prompts, got, strict=True):
        ids = torch.tensor([encode(tokenizer, prompt)])
        alone = model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
        assert text == tokenizer.decode(alone).split("\n")[0]


@pytest.mark.filterwarnings("ignore")
def test_harness_scores_are_the_models_likelihoods(tmp_path, monkeypatch):
    from chunkwise.models import harness

    model, tokenizer = saved(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": q, "choices": c, "label": i}) + "\n" for q, c, i in CHOICES))
    (tmp_path / "tasks").mkdir()
    for name, text in ("choose", CHOOSE), ("read", READ):
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text.format(data=data))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    arguments = f"run --model chunkwise --model_args pretrained={tmp_path / 'model'},dtype=float32 --tasks choose,read --device cpu"
    options = f"--include_path {tmp_path / 'tasks'} --output_path {tmp_path / 'out'} --log_samples --batch_size 1"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments.split(), *options.split()])
    harness.cli_evaluate()
    samples = {n: [json.loads(line) for line in next((tmp_path / "out").rglob(f"samples_{n}*.jsonl")).open()] for n in ("choose", "read")}

    def likelihood(context, text):
        ids = torch.tensor([encode(tokenizer, context + text)])
        with torch.no_grad():
            scores = model.double()(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        return scores[len(encode(tokenizer, context)) - 1 :].sum().item()

    honest = 64 * torch.finfo(torch.float32).eps
    for sample, (question, choices, _) in zip(samples["choose"], CHOICES, strict=True):
        for got, choice in zip(sample["filtered_resps"], choices, strict=True):
            want = likelihood(question, choice)
            assert abs(float(got[0]) - want) <= honest * abs(want)
    for sample, (question, _, _) in zip(samples["read"], CHOICES, strict=True):
        want = likelihood("\n", question)  # the byte tokenizer has no token that begins a text
        assert abs(float(sample["filtered_resps"][0]) - want) <= honest * abs(want)
