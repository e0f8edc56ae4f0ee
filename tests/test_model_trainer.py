"""Training with transformers' Trainer: which parameters decay, and documents flattened into one row by transformers' collator."""

import copy

import pytest
import torch
from model_case import KINDS, build, ids, wide
from nn_agreement import agree
from transformers import DataCollatorWithFlattening, TrainingArguments

from chunkwise.models.trainer import Trainer
from chunkwise.nn import all_mixers, parameters_without_decay


@pytest.mark.parametrize("name", all_mixers())
def test_trainer_lets_matrices_decay_and_spares_gates_norms_and_biases(name, tmp_path):
    model = build(mixer=name, num_hidden_layers=2)
    trainer = Trainer(model=model, args=TrainingArguments(str(tmp_path), weight_decay=0.1, report_to=[], use_cpu=True))
    groups = {g["weight_decay"]: {id(p) for p in g["params"]} for g in trainer.create_optimizer().param_groups}
    named = dict(model.named_parameters())
    assert groups[0.0] == {id(named[n]) for n in parameters_without_decay(model)} and len(groups[0.0]) + len(groups[0.1]) == len(named)
    spared = {n for n, p in named.items() if id(p) in groups[0.0]}
    assert all(n in spared for n in named if n.endswith(("A_log", "dt_bias", "norm.weight", "bonus", ".D", "lower_bounds", "x_mix")))
    assert not any(n.endswith(("proj.weight", "conv1d.weight")) for n in spared)


@pytest.mark.filterwarnings("ignore:Padding-free training")
@pytest.mark.parametrize("by", ["positions", "offsets"])
@pytest.mark.parametrize("kind", ["gated_delta_rule", "rwkv7", "hybrid"])
def test_trainer_learns_from_flattened_documents_what_they_teach_apart(kind, by, tmp_path):
    """Two steps of gradient descent: the same losses, and the same parameters after them."""
    model = build(**KINDS[kind]).train()
    documents, rate = [ids(n, seed=n) for n in (20, 7, 33)], 0.1

    def apart(model):
        losses = []
        for _ in range(2):
            model.zero_grad()
            loss = sum(model(d[None], labels=d[None]).loss * (len(d) - 1) for d in documents) / sum(len(d) - 1 for d in documents)
            loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():
                for p in model.parameters():
                    p -= rate * p.grad
        return {"losses": torch.stack(losses), **{n: p.detach().flatten() for n, p in model.named_parameters()}}

    truth, honest = apart(wide(model)), apart(copy.deepcopy(model))
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=3, max_steps=2, max_grad_norm=0.0, logging_steps=1, report_to=[], use_cpu=True,
        lr_scheduler_type="constant", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    collator = DataCollatorWithFlattening(return_position_ids=by == "positions", return_flash_attn_kwargs=by == "offsets")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=[{"input_ids": d.tolist()} for d in documents], data_collator=collator,
        optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train()
    losses = torch.tensor([h["loss"] for h in trainer.state.log_history if "loss" in h])
    got = {"losses": losses, **{n: p.detach().flatten() for n, p in model.named_parameters()}}
    agree(got, truth, honest)
