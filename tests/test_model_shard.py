"""Models on a meta device, sharded by FSDP before they have any memory."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model_case import KINDS, build, config, gradients, ids, kinds, wide
from nn_agreement import agree
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import softplus

from chunkwise.models import ChunkwiseForCausalLM


@pytest.fixture(scope="module")
def mesh():
    """One process is a mesh too: parameters become DTensors and shards are gathered, as on many."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(kind, mesh, device="cpu"):
    """A model in training mode that had no memory before its shards were initialised."""
    with torch.device("meta"):
        model = ChunkwiseForCausalLM(config(**kind))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    model.init_weights()
    return model.train()


@kinds
@pytest.mark.filterwarnings("ignore:DTensor random operators", "ignore:FSDP2-wrapped module")
def test_sharded_model_initialises_and_trains_like_any_other(kind, mesh):
    model = sharded(kind, mesh)
    plain, x = build(**kind).train(), ids(1, 20)
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        value = p.full_tensor()
        assert value.isfinite().all() and value.dtype == q.dtype, n
        if n.endswith("A_log"):
            assert (value.exp() >= 1).all() and (value.exp() <= 16.001).all()
        if n.endswith("dt_bias"):
            assert (softplus(value) >= 0.00099).all() and (softplus(value) <= 0.1001).all()
        q.data.copy_(value)
    losses = [m(x, labels=x).loss for m in (model, plain)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert all(torch.equal(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("kind", ["gated_delta_rule", "mamba2"])
def test_in_half_precision_the_layer_sees_its_gates_in_float32(kind, mesh):
    """The recipe of docs/models.md: the policy on the feed-forward layers, autocast for the rest. On a whole block it rounds gates."""
    half, x = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), ids(1, 20)

    def trained(model, autocast=True):
        seen, block = {}, model.model.layers[1]
        block.attn.register_forward_pre_hook(lambda m, _: seen.update({n: getattr(m, n).dtype for n in m.keep_float32}))
        block.mlp.register_forward_pre_hook(lambda m, _: seen.update(mlp=next(m.parameters()).dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x, labels=x).loss
        loss.backward()
        return loss, seen

    model, careless, plain = (build(**KINDS[kind]).train() for _ in range(3))
    for block in model.model.layers:
        fully_shard(block.mlp, mesh=mesh, mp_policy=half)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss, seen = trained(model)
    assert seen.pop("mlp") is torch.bfloat16 and {"A_log", "dt_bias"} <= seen.keys() and {*seen.values()} == {torch.float32}
    assert torch.equal(loss, trained(plain)[0])
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype is torch.float32 and torch.equal(p.grad.full_tensor(), q.grad), n
    for block in careless.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=half)
    fully_shard(careless, mesh=mesh, mp_policy=half)
    assert trained(careless, autocast=False)[1]["A_log"] is torch.bfloat16


def one_of_two(rank, file, names, device):
    """A process of two: each has half of every parameter and of the batch, both find the gradients of the whole."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh, x = dist.device_mesh.init_device_mesh(device, (2,)), ids(2, 20)
    for name in names:
        model, plain = sharded(KINDS[name], mesh, device), build(**KINDS[name]).train()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            q.data.copy_(p.full_tensor())
            assert q.isfinite().all() and p.to_local().numel() <= -(-p.shape[0] // 2) * (p.numel() // p.shape[0])
        half = x[rank : rank + 1].to(device)
        model(half, labels=half).loss.backward()
        plain(x, labels=x).loss.backward()
        honest = gradients(plain)
        truth = wide(plain)
        truth.zero_grad()
        truth(x, labels=x).loss.backward()
        agree({f"d{n}": p.grad.full_tensor().flatten().cpu() for n, p in model.named_parameters()}, gradients(truth), honest)
    dist.barrier()  # gloo's threads abort a process that leaves while the other still sends, or whose C++ objects die in Python's own order
    dist.destroy_process_group()
    os._exit(0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_processes_find_the_gradients_of_one(device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL joins GPUs, one a process: two are needed, {torch.cuda.device_count()} here")
    mp.spawn(one_of_two, (str(tmp_path / "meet"), ["gated_delta_rule", "rwkv7", "hgrn2"], device), nprocs=2)
