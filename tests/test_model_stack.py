"""What layers of a model tell each other: lower bounds of forget factors, and the first layer's values."""

import copy

import pytest
import torch
from model_case import build, ids, wide
from nn_agreement import agree

from chunkwise.nn import Depth, mixer_class, parameters_without_decay


def test_lower_bounds_rise_with_the_layers_and_bound_what_is_forgotten():
    model = wide(build(mixer="hgrn2", num_hidden_layers=3))
    with torch.no_grad():
        model.model.lower_bounds.normal_()
        floors = model.model.floors()
        share = torch.stack([torch.exp(row) for row in model.model.lower_bounds])
        share = share / share.sum(0)
    assert floors[0] is None and "model.lower_bounds" in parameters_without_decay(model)
    agree({"1": floors[1], "2": floors[2]}, {"1": share[1], "2": share[1] + share[2]})
    layer, seen = model.model.layers[2].attn, {}
    layer.member = lambda inputs, **options: (seen.update(inputs), inputs["v"])[1:] * 2  # o and a state, neither looked at
    layer(torch.randn(1, 5, 16, dtype=torch.float64), depth=Depth(floor=floors[2]))
    raw = layer.f_proj(torch.zeros(1, 1, 16, dtype=torch.float64))
    assert raw.shape[-1] == floors[2].numel() and (seen["g"].exp().flatten(2) >= floors[2]).all()
    assert not hasattr(build(mixer="hgrn2", use_lower_bound=False).model, "lower_bounds")


def test_every_layer_after_the_first_may_take_the_first_ones_values():
    model = wide(build(mixer="rwkv7", num_hidden_layers=3))
    first, second, third = (block.attn for block in model.model.layers)
    assert not hasattr(first, "v_lora") and hasattr(second, "v_lora") and hasattr(third, "v_lora")
    x = ids(1, 9)
    with torch.no_grad():
        for layer in (second, third):
            layer.v_lora[2].weight.zero_()
            layer.v_lora[2].bias.fill_(1e4)  # take all of the first one's
        mine = model(x).logits
        second.v_proj.weight.normal_()
        third.v_proj.weight.normal_()
        assert torch.equal(model(x).logits, mine)
        first.v_proj.weight.mul_(2)
        assert not torch.equal(model(x).logits, mine)


def test_the_first_layer_of_a_kind_is_first_wherever_it_stands():
    model = build(layer_types=["retention", "rwkv7", "full_attention", "rwkv7"], num_hidden_layers=4)
    assert [b.attn.first for b in model.model.layers if hasattr(b.attn, "first")] == [True, False]
    assert model(ids(1, 5)).logits.isfinite().all()
    lone = mixer_class("rwkv7")(16, 2, layer_idx=1, num_layers=2, first=False)
    with pytest.raises(ValueError, match="rwkv7: a layer that is not the first .* depth.first"):
        lone(torch.randn(1, 5, 16))


def test_deeper_lightning_layers_forget_more_slowly():
    model = build(mixer="lightning_attn", num_hidden_layers=3)
    assert [b.attn.call_options() for b in model.model.layers] == [dict(layer_idx=i, num_layers=3) for i in range(3)]


@pytest.mark.parametrize(("T", "window", "kv"), [(70, 8, None), (64, 16, 1), (33, 2, 2)])
def test_long_windows_are_seen_block_by_block_as_by_a_mask(T, window, kv):
    from chunkwise.models.attention import Attention, Sight
    from chunkwise.nn import plan_packing

    torch.manual_seed(0)
    layer, x = Attention(32, 4, 0, num_kv_heads=kv, window=window), torch.randn(2, T, 32)

    def run(layer, x, mask):
        x = x.detach().requires_grad_()
        packing = plan_packing(2, T)
        y = layer(x, packing, Sight(packing, mask)).flatten(0, 1)
        leaves = {"dx": x, **{f"d{n}": p for n, p in layer.named_parameters()}}
        grads = torch.autograd.grad(y, list(leaves.values()), torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape))
        return {"y": y.detach(), **{n: g.flatten() for n, g in zip(leaves, grads)}}

    mask = torch.ones(2, T)  # says nothing, and takes the other way
    truth = run(copy.deepcopy(layer).double(), x.double(), mask)
    agree(run(layer, x, None), truth, run(layer, x, mask))
