"""Training with transformers' Trainer: which parameters decay."""

import pytest
from model_case import build
from transformers import TrainingArguments

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
