"""What value heads that share a key head have made, summed: in fp32, in the order of the heads, rounded as it is written."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R"])
def head_kernel(
    x, o,  # [R, GROUP, D] -> [R, D]
    R,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program ROWS rows, all their channels: BD >= D."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, BD)
    m = (row + o_r < R)[:, None] & (o_d < D)[None, :]  # [ROWS, BD]
    p_x = x + row * (GROUP * D) + o_r[:, None] * (GROUP * D) + o_d[None, :]
    b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    for i in tl.static_range(1, GROUP):
        b_x += tl.load(p_x + i * D, mask=m, other=0.0).to(tl.float32)
    tl.store(o + row * D + o_r[:, None] * D + o_d[None, :], b_x.to(o.dtype.element_ty), mask=m)
