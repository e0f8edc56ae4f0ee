"""A peer says what it has no function for, before anything is drawn or timed."""

import pytest

from chunkwise.bench.case import case
from chunkwise.bench.peer import peers

SMALL = "1,64,2,2,16,16"
ASKED = {
    "flash-qla, another rule": ("flash-qla", ("kda", "auto", SMALL), "has the gated delta rule only, not kda"),
    "flash-qla, wide": ("flash-qla", ("gated_delta_rule", "auto", SMALL, "float32"), "takes bfloat16 and float16, not float32"),
    "flash-qla, token by token": ("flash-qla", ("gated_delta_rule", "recurrent", SMALL), "has the chunk form only"),
    "flash-qla": ("flash-qla", ("gated_delta_rule", "auto", SMALL), ""),
    "nvidia, another rule": ("nvidia", ("gla", "auto", SMALL), "has gates per key with the delta rule only, not gla"),
    "nvidia": ("nvidia", ("kda", "chunk", SMALL), ""),
    "JAX, another rule": ("jax-linear-attention", ("rwkv7", "auto", SMALL), "has no kind for rwkv7"),
    "JAX, packed": ("jax-linear-attention", ("gla", "auto", SMALL + ",3"), "timed for whole, unpacked sequences in chunk form only"),
    "JAX": ("jax-linear-attention", ("gla", "auto", SMALL), ""),
    "transformers, packed": ("transformers", ("gated_delta_rule", "auto", SMALL + ",3"), "its fallbacks take no packed sequences"),
    "transformers, wide": ("transformers", ("gated_delta_rule", "auto", SMALL, "float64"), "its fallbacks compute in float32"),
    "transformers, another member": ("transformers", ("gla", "auto", SMALL), "has no fallback for gla"),
    "attention of other inputs": ("sdpa", ("gated_delta_product", "auto", SMALL), "gated_delta_product has no q, k, v of one token each"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_peer_says_what_it_lacks(asked):
    name, request, why = ASKED[asked]
    assert peers()[name].supports(case(*request)) == why


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (dict(pool="int8"), "pool must be one of .*, for dtypes other than float64, got 'int8'"),
        (dict(pool="float32", shape="4,64,2,2,16,16"), "a pool needs form auto and 4 tokens or fewer"),
    ],
)
def test_a_pool_that_cannot_be_timed_is_refused(request_, says):
    with pytest.raises(ValueError, match=says):
        case("gla", **request_)
