"""Training steps as CUDA graphs: a captured step is the step, to the bit. On a CPU: which calls record, and whose gradients are whose."""

import pytest
import torch
from model_case import build, ids, kinds
from torch import nn
from transformers import TrainingArguments

from chunkwise.models.capture import MOST, Captured, Graph
from chunkwise.models.trainer import Trainer

SIZES = dict(hidden_size=64, intermediate_size=64)


class Rerun(Captured):
    """What a graph does, done by running the step again into the same memory."""

    devices = ("cpu",)
    recorded = 0

    def aside(self, inputs):
        return self.step(**inputs)

    def watched(self, kind, inputs):
        return self.step(**inputs)

    def record(self, tensors, rest):
        self.recorded += 1
        parameters, places = list(self.model.parameters()), {n: t.clone() for n, t in tensors.items()}
        gradients, loss = [torch.empty_like(p) if p.requires_grad else None for p in parameters], torch.empty(())

        def replay():
            before = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
            loss.copy_(self.step(**places, **rest))
            for p, to, grad in zip(parameters, gradients, before, strict=True):
                if to is not None:
                    to.copy_(p.grad)
                p.grad = grad

        return Graph(places, loss, gradients, replay)


def trained(step, model, batches, accumulate=1):
    """The losses of training on `batches`, the weights afterwards."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for i, x in enumerate(batches):
        losses.append(step(input_ids=x, labels=x))
        if (i + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses, list(model.parameters())


def eager(model):
    return Rerun.run.__get__(type("Plain", (), {"model": model, "dtype": None, "device": next(model.parameters()).device})())


def same(one, other):
    return all(torch.equal(a, b) for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=True))


def test_no_more_graphs_than_room_is_for_whatever_the_order_of_shapes():
    model = build(**SIZES).train()
    captured = Rerun(model)
    for _ in range(3):
        for T in range(2, MOST + 4):
            captured(input_ids=ids(1, T), labels=ids(1, T))
    assert captured.recorded == len(captured.graphs) == MOST and len(captured.refused) == 2


def test_a_change_of_modes_autocast_or_buffers_is_another_step():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.drop = nn.Parameter(torch.eye(3)), nn.Dropout(1.0)
            self.register_buffer("factor", torch.tensor(2.0))

        def forward(self, x):
            return type("Output", (), {"loss": (self.drop(x @ self.weight) * self.factor).float().sum()})

    net, x = Net().train(), torch.full((2, 3), 1 + 2**-12)
    captured = Rerun(net)

    def calls():
        return [captured(x=x).item() for _ in range(4)]

    assert calls() == [0.0] * 4
    net.drop.eval()
    assert calls() == [net(x).loss.item()] * 4 != [0.0] * 4
    net.factor = torch.tensor(3.0)
    assert calls() == [net(x).loss.item()] * 4
    assert calls() != [18.0] * 4
    with torch.autocast("cpu", torch.bfloat16):
        assert calls() == [18.0] * 4


@pytest.mark.parametrize("restless", [0, 6, 12])
def test_a_buffer_that_every_call_assigns_anew_is_named_once(restless, monkeypatch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))
            self.register_buffer("count", torch.tensor(0.0))

        def forward(self, x):
            if self.count >= restless:
                self.count += 1
            else:
                self.count, self.before = self.count + 1, self.count  # whose memory nobody has in the meantime
            return type("Output", (), {"loss": (x @ self.weight).sum() * self.count})

    said = []
    monkeypatch.setattr("chunkwise.models.capture.logger.warning", said.append)
    net, x = Net(), torch.ones(2, 3)
    captured = Rerun(net)
    assert [captured(x=x).item() for _ in range(12)] == [6.0 * n for n in range(1, 13)] and net.count == 12
    assert captured.recorded == (restless < 12) and len(said) == (restless > 0)
    assert not restless or "count lies elsewhere at every call" in said[0]


def test_gradients_of_inputs_are_no_business_of_graphs():
    model = build(**SIZES).train()
    captured, x = Rerun(model), torch.zeros(1, 5, 64, requires_grad=True)
    sums = []
    for _ in range(4):
        captured(inputs_embeds=x, labels=ids(1, 5))
        sums.append(x.grad.clone())
    assert all(torch.allclose(t, n * sums[0]) for n, t in enumerate(sums, 1)) and sums[0].any()
    assert captured.recorded == 0 and "gradients are wanted of inputs_embeds" in next(iter(captured.refused.values()))


def test_inputs_are_moved_to_the_model_from_the_first_call_on():
    class Elsewhere(torch.Tensor):
        def to(self, device):
            return torch.full((2,), float(device.type == "cpu"))

    captured = Rerun(nn.Linear(2, 2).requires_grad_(False), step=lambda x: x.sum())
    assert [captured(x=torch.zeros(2).as_subclass(Elsewhere)).item() for _ in range(4)] == [2.0] * 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_captured_training_is_training(accumulate):
    shapes = [(2, 20), (2, 20), (1, 33), (2, 20), (2, 20), (1, 33), (1, 33), (1, 33), (2, 20), (1, 33)]
    batches = [ids(*s, seed=i) for i, s in enumerate(shapes)]
    model, other = build(**SIZES).train(), build(**SIZES).train()
    captured = Rerun(model)
    assert same(trained(captured, model, batches, accumulate), trained(eager(other), other, batches, accumulate))
    assert captured.recorded == 2 and not captured.refused


def test_frozen_and_moved_parameters_are_recorded_anew():
    model, x = build(**SIZES).train(), ids(2, 20)
    captured = Rerun(model)
    for expected, change in ((1, None), (2, "freeze"), (3, "replace")):
        if change == "freeze":
            model.model.embeddings.weight.requires_grad_(False)
        if change == "replace":
            model.lm_head.weight.data = model.lm_head.weight.data * 2
        for _ in range(4):
            model.zero_grad()
            loss = captured(input_ids=x, labels=x)
        assert captured.recorded == expected and torch.equal(loss, model(x, labels=x).loss.detach())
        assert (model.model.embeddings.weight.grad is None) == (expected > 1)


def test_what_no_graph_holds_goes_step_by_step_and_is_told():
    model, x = build(**SIZES).train(), ids(2, 20)
    captured, calls = Rerun(model), []
    handle = model.model.norm.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(4):
        captured(input_ids=x, labels=x)
    assert captured.recorded == 0 and len(calls) == 4 and "hooks" in next(iter(captured.refused.values()))
    handle.remove()
    for _ in range(4):
        captured(input_ids=x, labels=x)
    model.lm_head.weight.register_hook(calls.append)
    captured(input_ids=x, labels=x)
    assert captured.recorded == 1 and len(calls) == 5
    model = build(**SIZES).train()
    captured = Rerun(model)
    for T in range(2, MOST + 4):
        for _ in range(3):
            captured(input_ids=ids(1, T), labels=ids(1, T))
    assert captured.recorded == MOST and len(captured.refused) == 2


def test_a_step_that_cannot_be_recorded_goes_on_as_it_is(monkeypatch):
    model, x = build(**SIZES).train(), ids(2, 20)
    captured = Rerun(model)

    def record(tensors, rest):
        raise RuntimeError("no random numbers here\nmore")

    monkeypatch.setattr(captured, "record", record)
    losses = [captured(input_ids=x, labels=x) for _ in range(5)]
    assert all(torch.equal(loss, losses[0]) for loss in losses) and list(captured.refused.values()) == ["no random numbers here"]


def test_capture_refuses_by_name():
    model = build(**SIZES)
    with pytest.raises(ValueError, match="Captured: only work on a GPU can be a CUDA graph; model is on cpu"):
        Captured(model)
    with pytest.raises(ValueError, match="Captured: model must be on one device, got cpu, meta"):
        Captured(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    with pytest.raises(TypeError, match="Captured: model must be a torch.nn.Module, got list"):
        Captured([model])
    with pytest.raises(TypeError, match="Captured: inputs must be tensors or hashable, got {'extra': 'list'}"):
        Rerun(model)(input_ids=ids(1, 4), extra=[1])


def losses(folder, capture, cpu):
    class Text(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, i):
            x = ids(1, 20 if i < 20 else 9, seed=i)[0]
            return dict(input_ids=x, labels=x.where(x > i, torch.full_like(x, -100)))  # each step predicts another number of tokens

    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=3, logging_steps=1, report_to=[],
        use_cpu=cpu, bf16=not cpu, save_strategy="no", disable_tqdm=True, learning_rate=1e-2, data_seed=0,
    )  # fmt: skip
    trainer = Trainer(model=build(**SIZES), args=arguments, train_dataset=Text(), capture=capture)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    history = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]
    return trainer, history, list(trainer.model.parameters())


def test_trainer_counts_tokens_and_accumulates_as_it_does_without_graphs(tmp_path, monkeypatch):
    monkeypatch.setattr("chunkwise.models.trainer.Captured", Rerun)
    (trainer, *captured), (_, *plain) = losses(tmp_path, True, True), losses(tmp_path, False, True)
    assert captured[0] == plain[0] and all(map(torch.equal, captured[1], plain[1]))
    assert trainer.captured.recorded == 2 and not trainer.captured.refused


def test_trainer_refuses_to_capture_what_is_on_a_cpu(tmp_path):
    with pytest.raises(ValueError, match="Captured: only work on a GPU"):
        losses(tmp_path, True, True)


def test_trainer_refuses_to_capture_what_is_spread_over_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="Trainer: capture is for one GPU, got 2"):
        losses(tmp_path, True, True)


@pytest.mark.gpu
def test_a_captured_trainer_has_the_bits_of_the_trainer(tmp_path):
    (trainer, *captured), (_, *plain) = losses(tmp_path, True, False), losses(tmp_path, False, False)
    assert captured[0] == plain[0] and all(map(torch.equal, captured[1], plain[1]))
    assert len(trainer.captured.graphs) == 2 and not trainer.captured.refused


@pytest.mark.gpu
@kinds
def test_a_captured_step_has_the_bits_of_the_step(kind):
    shapes = [(2, 150), (2, 150), (1, 70), (2, 150), (2, 150), (1, 70), (1, 70), (1, 70)]
    batches = [ids(*s, seed=i).cuda() for i, s in enumerate(shapes)]
    model, other = build(**SIZES, **kind).cuda().train(), build(**SIZES, **kind).cuda().train()
    captured = Captured(model)
    assert same(trained(captured, model, batches, 2), trained(eager(other), other, batches, 2))
    assert len(captured.graphs) == 2 and not captured.refused


@pytest.mark.gpu
def test_what_is_frozen_is_recorded_anew():
    model, other, x = build(**SIZES).cuda().train(), build(**SIZES).cuda().train(), ids(2, 70).cuda()
    captured, plain = Captured(model), eager(other)
    for frozen in ("lm_head", "model.norm"):
        for m in (model, other):
            m.get_submodule(frozen).requires_grad_(False)
        for _ in range(5):
            model.zero_grad(), other.zero_grad()
            assert torch.equal(captured(input_ids=x, labels=x), plain(input_ids=x, labels=x))
        assert len(captured.graphs) == 1
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)


@pytest.mark.gpu
def test_checkpointed_layers_go_on_as_they_are():
    """Checkpointing asks for the state of the random numbers, which nobody has while a graph is recorded."""
    batches = [ids(2, 70, seed=i).cuda() for i in range(5)]
    model, other = build(**SIZES).cuda().train(), build(**SIZES).cuda().train()
    for m in (model, other):
        m.gradient_checkpointing_enable()
    captured = Captured(model)
    assert same(trained(captured, model, batches), trained(eager(other), other, batches))
    assert len(captured.graphs) + len(captured.refused) == 1


@pytest.mark.gpu
def test_packed_documents_are_captured_and_masks_that_the_host_reads_are_not():
    model, other, x = build(**SIZES).cuda().train(), build(**SIZES).cuda().train(), ids(1, 150).cuda()
    captured = Captured(model, dtype=torch.bfloat16)
    for end in (70, 10, 149, 33):
        given = dict(input_ids=x, labels=x, cu_seqlens=torch.tensor([0, end, 150], device="cuda"))
        with torch.autocast("cuda", torch.bfloat16):
            loss = other(**given).loss
        loss.backward()
        assert torch.equal(captured(**given), loss.detach())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert len(captured.graphs) == 1
    for _ in range(4):
        captured(input_ids=x, labels=x, attention_mask=torch.ones_like(x))
    assert len(captured.graphs) == 1 and "the host reads from the GPU" in next(iter(captured.refused.values()))
