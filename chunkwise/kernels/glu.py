"""A gated linear unit's product, act(a) b, and its gradients: nothing but a, b and the incoming gradient is read."""

import triton
import triton.language as tl

from .norm import gated


@triton.jit
def places(BLOCK: tl.constexpr, D: tl.constexpr):
    """A program's numbers, and where they stand in rows of 2 D that hold a and b side by side (D a multiple of BLOCK; 0: apart)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK
    o = tl.arange(0, BLOCK)
    if D == 0:
        return i + o, i + o
    return i + o, i + i // D * D + o


@triton.jit
def glu_kernel(a, b, y, n, GATE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    """y = act(a) b, all [n]."""
    o, o_h = places(BLOCK, D)
    m = o < n
    b_act, _ = gated(tl.load(a + o_h, mask=m, other=0.0).to(tl.float32), GATE)
    tl.store(y + o, (b_act * tl.load(b + o_h, mask=m, other=0.0).to(tl.float32)).to(y.dtype.element_ty), mask=m)


@triton.jit
def glu_grad_kernel(a, b, dy, da, db, n, GATE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    """da, db from dy, all [n]."""
    o, o_h = places(BLOCK, D)
    m = o < n
    b_act, b_slope = gated(tl.load(a + o_h, mask=m, other=0.0).to(tl.float32), GATE)
    b_b = tl.load(b + o_h, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + o, mask=m, other=0.0).to(tl.float32)
    tl.store(da + o_h, (b_dy * b_b * b_slope).to(da.dtype.element_ty), mask=m)
    tl.store(db + o_h, (b_dy * b_act).to(db.dtype.element_ty), mask=m)
