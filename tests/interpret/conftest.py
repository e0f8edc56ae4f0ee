"""Kernels run in Triton's interpreter here, so no GPU is needed. They must not be imported before: run this folder by itself."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def bfloat16_dots():
    """Triton 3.6.0's interpreter multiplies the bits of bfloat16 as integers; here they are widened first."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def widened(self, a, b, *rest):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    InterpreterBuilder.create_dot = widened
    yield
    InterpreterBuilder.create_dot = dot
