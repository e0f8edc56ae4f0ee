"""fla's norm, convolution and loss modules, as classes: parameters, results and refusals."""

import pytest
import torch
from nn_agreement import agree

from chunkwise.compat import fla_module as module


def rms(x, weight=None, eps=1e-5):
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def right(got, compute, *inputs):
    agree({"y": got}, {"y": compute(*(t.double() for t in inputs))}, {"y": compute(*inputs)})


def test_a_length_is_one_in_the_dtype_that_is_asked_for():
    x = torch.randn(3, 8).bfloat16()
    y = module.L2Norm(output_dtype=torch.float32)(x)
    assert y.dtype == torch.float32 and module.L2Norm()(x).dtype == torch.bfloat16
    right(y, lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), x.float())


def test_a_norm_adds_the_residual_and_returns_the_sum_before_it():
    x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    norm = module.RMSNorm(8, bias=True)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
        norm.bias.uniform_(-1.0, 1.0)
    y, total = norm(x, residual, prenorm=True)
    assert torch.equal(total, x + residual)
    right(y.detach(), lambda z, w, b: rms(z, w) + b, total, norm.weight.detach(), norm.bias.detach())
    assert norm(x.bfloat16(), residual.bfloat16(), prenorm=True, residual_in_fp32=True)[1].dtype == torch.float32
    norm.reset_parameters()
    assert bool((norm.weight == 1).all()) and not norm.bias.any() and repr(norm) == "RMSNorm(8, eps=1e-05)"
    plain = module.RMSNorm(8, elementwise_affine=False)
    plain.reset_parameters()
    assert not list(plain.parameters())
    right(plain(x), rms, x)


def test_a_gated_norm_multiplies_by_swish():
    x, g = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    for norm in (module.FusedRMSNormSwishGate(8), module.FusedRMSNormGated(8, elementwise_affine=False, activation="silu")):
        right(norm(x, g).detach(), lambda x, g: rms(x) * torch.nn.functional.silu(g), x, g)
    with pytest.raises(ValueError, match="FusedRMSNormGated: activation must be .*, got 'tanh'"):
        module.FusedRMSNormGated(8, activation="tanh")


def test_a_convolution_skips_padding_and_knows_its_state():
    conv, x = module.ShortConvolution(4, 3), torch.randn(2, 6, 4)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    y = conv(x, mask=mask)[0]
    torch.testing.assert_close(y[:1, 2:], conv(x[:1, 2:])[0])
    assert conv.state_size == 12
    with pytest.raises(ValueError, match="mask and cu_seqlens both say"):
        conv(x[:1], mask=mask[:1], cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="causal_conv1d_update: weight must be"):
        module.causal_conv1d_update(x[:, :1], torch.zeros(2, 4, 3))
