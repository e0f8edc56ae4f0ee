"""What a call would run, and why: the call itself, made with tensors that have shapes but no contents, while someone listens."""

from __future__ import annotations

from typing import Any

import torch

from ..spec import EXTRA_SIZES, Form, Op, extent
from .dispatch import Cell, Choice, choose, run
from .pool import member


def passes(
    op: Op | str, *, T: int, K: int = 128, device: str = "cpu", dtype: torch.dtype = torch.float32, grad: bool = False, **options: Any
) -> list[tuple[Cell, Choice]]:
    """The passes of a call of `op` (a member or its name) on T tokens, and what each would run; K channels a key and a value. No device
    is needed. Raises ValueError or TypeError as the call would."""
    op = member("explain", op)
    heard: list[tuple[Cell, Choice]] = []

    def listen(op: Op, cell: Cell, **kw: Any) -> Choice:
        heard.append((cell, choose(op, cell, **{**kw, "device": device})))
        return heard[-1][1]

    sizes = {**EXTRA_SIZES, "B": 1, "T": T, "H": 1, "HV": 1, "K": K, "V": K}
    with torch.set_grad_enabled(grad):
        shapes = {n: [extent(a, sizes) for a in arg.axes.split()] for n, arg in op.args.items()}
        x = {n: torch.empty(s, dtype=dtype, device="meta", requires_grad=grad) for n, s in shapes.items()}
        bare = {n: t.to("meta") if isinstance(t, torch.Tensor) and n != "cu_seqlens_cpu" else t for n, t in op.whole(options).items()}
        run(op, x, op.check(x), bare, listen)
    return heard


def choices(op: Op | str, *, T: int, **call: Any) -> list[Choice]:
    """What the passes of a call would run. Keywords: those of `passes`."""
    return [choice for _, choice in passes(op, T=T, **call)]


def explain(op: Op | str, *, T: int, **call: Any) -> str:
    """One line: what a call of `op` (a member or its name) on T tokens would run, and why. Keywords: those of `passes`.

    >>> import chunkwise
    >>> chunkwise.explain("gla", T=2048)
    'gla: chunk form, torch backend, chunks of 64 (the general form)'
    """
    op = member("explain", op)
    lines = dict.fromkeys(_line(c) for c in choices(op, T=T, **call))
    return f"{op.name}: {'; then '.join(lines) or 'an elementwise scan outside the pipeline'}"


def _line(c: Choice) -> str:
    tokens = f"chunks of {c.chunk}"
    if c.plan != "triton":  # which runs any form so
        tokens = {Form.RECURRENT: "token by token", Form.PARALLEL: "one chunk"}.get(c.form, tokens)
    return f"{c.form} form, {c.backend} backend, {tokens} ({c.reason})"
