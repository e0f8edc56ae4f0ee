"""Kernels run in Triton's interpreter here, so no GPU is needed. They must not be imported before: run this folder by itself."""

import os
import re

os.environ["TRITON_INTERPRET"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

pytest.importorskip("triton")


# The larger half, by test and case: every kernel and switch is met once by what stays. `pytest -m slow tests/interpret` runs these.
SLOW = (
    r"test_turns_and_turns_back\[.*bfloat16-True",
    r"test_dense_with_both_states\[(2-4|5-8)",
    r"test_packed_with_both_states\[(int32-torch.float|int64-torch.bfloat16|int64-torch.float16)",
    r"test_without_states_with_a_residual\[(dense-None|packed-gelu)",
    r"test_gated_norms\[.*(float16|layer_norm-silu|rms_norm-sigmoid-torch.float32)",
    r"test_new_tokens_on_a_pool\[.*(float32-3|bfloat16-4|float32-6)",
    r"test_losses_and_slopes\w+\[.*(37-plain-none|bfloat16-37-every term-mean)",
    r"test_pieces_give_what_the_whole_gives\[.*more pieces",
    r"test_pieces_give_what_the_whole_gives\[3 pieces.*(none|head)",
    r"test_pieces_need_no_states",
    r"test_pieces_do_not_depend_on_the_gates\[nothing.*head",
    r"test_forward_agrees_with_the_torch_plan\[.*(bfloat16|pointers-torch.float16|16 bits wide-torch.float32)",
    r"test_strides_and_what_lies_behind\w+\[(none|head|scalar add)",
    r"test_any_length_is_right\[(one short|a chunk|ragged)",
    r"test_gates_of_any_size_are_exact\[(0.0|-5.0|-10000.0)",
    r"test_scores_under_weak_and_strong_gates\[.*(1.0|8.0)",
    r"test_a_gate_per_key_forward_and_backward\[.*(ragged|bfloat16, strong|forget everything)",
    r"test_gradients_under_weak_and_strong_gates\[.*5.0",
    r"test_rows_meet_all_before_them\[(none|a fixed|scalar, several|bfloat16, packed)",
    r"test_scan_keeps\w+\[.*(none|head)",
    r"test_pieces_in_sixteen_bits_and_odd_sizes\[pointers",
    r"test_gradients_of_a_ragged_sequence",
    r"test_the_form_and_the_step\w+\[(delta_rule|gla|hgrn2|linear_attn|simple_gla|gated_delta_rule)",
    r"test_every_cell_is_the_torch_recurrence\[(none|head|value) (add|delta)\]",
    r"test_forward_and_backward\[(?!(dplr(, (scalar|head))?|early erase)-packed|bonus-bfloat16(\]|, strong, few)|value-bfloat16, strong\])",
    r"test_matches_definition\[\w+-\w+-strong gates",
    r"test_matches_definition\[(?!(comba|gdn2|rwkv\d|precond_kda)-chunk|mamba2-parallel)",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if any(re.match(pattern, item.name) for pattern in SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def bfloat16_arithmetic():
    """Triton 3.6.0's interpreter multiplies and adds the bits of bfloat16 as integers; here they are widened first. It cuts fp32 off where
    cards round to the nearest, and to the even one of two."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    dot, add = InterpreterBuilder.create_dot, InterpreterBuilder.create_fadd

    def wide(self, *xs):
        return (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in xs)

    def widened_dot(self, a, b, *rest):
        return dot(self, *wide(self, a, b), *rest)

    def widened_add(self, a, b):
        made = add(self, *wide(self, a, b))
        return self.cast_impl(made, tl.bfloat16) if a.dtype.scalar == tl.bfloat16 else made

    convert = interpreter._convert_float

    def rounded(x, source, target, mode):
        if (source, target) == (tl.bfloat16, tl.float32):
            return (x.astype(np.uint32) << 16).view(np.float32)
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, mode)
        bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
        near = bits + 0x7FFF + (bits >> 16 & 1)
        return (np.where(np.isnan(x), bits | 0x400000, near) >> 16).astype(np.uint16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", widened_dot)
        patch.setattr(InterpreterBuilder, "create_fadd", widened_add)
        patch.setattr(interpreter, "_convert_float", rounded)
        yield


@pytest.fixture(scope="session", autouse=True)
def hasty_interpreter():
    import haste

    with pytest.MonkeyPatch.context() as patch:
        haste.replace(patch)
        yield
