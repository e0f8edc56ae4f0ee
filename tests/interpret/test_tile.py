"""Sums whose order is written down, in Triton's interpreter."""

import torch
import triton
import triton.language as tl

from chunkwise.kernels.tile import column_sums, row_sums


@triton.jit
def summed(x, rows, columns, R: tl.constexpr, W: tl.constexpr):
    o_r, o_w = tl.arange(0, R), tl.arange(0, W)
    b_x = tl.load(x + o_r[:, None] * W + o_w[None, :])
    tl.store(rows + o_r, row_sums(b_x))
    tl.store(columns + o_w, column_sums(b_x))


def test_sums_along_rows_and_down_columns_have_one_order():
    x = torch.randn(16, 32) * torch.logspace(-6, 6, 32)
    rows, columns = torch.empty(16), torch.empty(32)
    summed[(1,)](x, rows, columns, 16, 32)
    along, down = x, x
    while along.shape[1] > 1:
        along = along[:, ::2] + along[:, 1::2]
    while down.shape[0] > 1:
        down = down[: down.shape[0] // 2] + down[down.shape[0] // 2 :]
    assert torch.equal(rows, along[:, 0]) and torch.equal(columns, down[0])
    assert not torch.equal(rows, x.cumsum(1)[:, -1])
