"""A gated linear unit's product, act(a) b, and its gradients: nothing but a, b and the incoming gradient is read."""

import triton
import triton.language as tl

from .norm import gated


@triton.jit
def glu_kernel(a, b, y, n, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """y = act(a) b, all [n]."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    b_act, _ = gated(tl.load(a + o, mask=m, other=0.0).to(tl.float32), GATE)
    tl.store(y + o, (b_act * tl.load(b + o, mask=m, other=0.0).to(tl.float32)).to(y.dtype.element_ty), mask=m)


@triton.jit
def glu_grad_kernel(a, b, dy, da, db, n, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """da, db from dy, all [n]."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    b_act, b_slope = gated(tl.load(a + o, mask=m, other=0.0).to(tl.float32), GATE)
    b_b = tl.load(b + o, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + o, mask=m, other=0.0).to(tl.float32)
    tl.store(da + o, (b_dy * b_b * b_slope).to(da.dtype.element_ty), mask=m)
    tl.store(db + o, (b_dy * b_act).to(db.dtype.element_ty), mask=m)
