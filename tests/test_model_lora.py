"""Low-rank adapters of the peft library on these models."""

import pytest
import torch
from model_case import build, ids, kinds

peft = pytest.importorskip("peft", reason="peft is not installed")


@kinds
def test_lora_adapts_what_it_targets_and_nothing_else(kind, tmp_path):
    model, x = build(**kind), ids(2, 20)
    before, plain = {n: p.detach().clone() for n, p in model.named_parameters()}, model(x).logits
    targets = sorted({n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n.endswith("_proj")})
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights="gaussian"))
    assert torch.equal(adapted(x).logits, plain)  # adapters begin as zero
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        adapted.train()(input_ids=x, labels=x).loss.backward()
        optimizer.step()
    trained = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in n for n in trained) and all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
    kept = {n.replace("base_model.model.", "").replace(".base_layer", ""): p for n, p in adapted.named_parameters() if n not in trained}
    assert kept.keys() == before.keys() and all(torch.equal(kept[n], p) for n, p in before.items())
    logits = adapted.eval()(x).logits
    assert not torch.equal(logits, plain)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build(**kind), tmp_path).eval()
    assert torch.equal(again(x).logits, logits)
    assert torch.equal(
        again.generate(input_ids=x, max_new_tokens=4, do_sample=False), adapted.generate(input_ids=x, max_new_tokens=4, do_sample=False)
    )
