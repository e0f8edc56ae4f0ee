"""Models on a meta device, sharded by FSDP before they have any memory."""

import pytest
import torch
import torch.distributed as dist
from model_case import build, config, ids, kinds
from torch.nn.functional import softplus

from chunkwise.models import ChunkwiseForCausalLM


@pytest.fixture(scope="module")
def mesh():
    """One process is a mesh too: parameters become DTensors and shards are gathered, as on many."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@kinds
@pytest.mark.filterwarnings("ignore:DTensor random operators", "ignore:FSDP2-wrapped module")
def test_sharded_model_initialises_and_trains_like_any_other(kind, mesh):
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = ChunkwiseForCausalLM(config(**kind))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    model.init_weights()
    plain, x = build(**kind).train(), ids(1, 20)
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        value = p.full_tensor()
        assert value.isfinite().all() and value.dtype == q.dtype, n
        if n.endswith("A_log"):
            assert (value.exp() >= 1).all() and (value.exp() <= 16.001).all()
        if n.endswith("dt_bias"):
            assert (softplus(value) >= 0.00099).all() and (softplus(value) <= 0.1001).all()
        q.data.copy_(value)
    losses = [m(x, labels=x).loss for m in (model.train(), plain)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert all(torch.equal(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
