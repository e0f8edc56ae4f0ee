"""The modules' kernels build for every card we serve, fit its shared memory and keep their registers."""

from functools import partial

import pytest

pytest.importorskip("triton")

from test_triton_compile import SERVED, check, enough, jobs  # noqa: E402

from chunkwise.engine.precompile import build  # noqa: E402
from chunkwise.nn.launch.sample import launches  # noqa: E402

KERNELS = {
    "conv_kernel", "conv_state_kernel", "conv_state_grad_kernel", "conv_update_kernel", "norm_kernel", "place_kernel",
    "norm_grad_kernel", "gate_kernel", "gate_grad_kernel", "rotary_kernel", "glu_kernel", "glu_grad_kernel", "loss_kernel",
}  # fmt: skip


def made_for(arch, *calls):
    made = build(arch, launches, calls, jobs(), choose=partial(enough, arch))
    assert {b.kernel for b in made} == KERNELS
    return made


def test_modules_build_for_hopper():
    check(made_for("sm_90", ("bfloat16", 2048, 128, 32000)))


@pytest.mark.compile
@pytest.mark.parametrize("arch", SERVED)
def test_modules_build_for_every_card(arch):
    sizes = (2048, 128, 32000), (1000, 100, 50257), (8192, 256, 151936)
    check(made_for(arch, *((dtype, *size) for dtype in ("bfloat16", "float16", "float32") for size in sizes)))
