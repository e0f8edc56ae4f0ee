"""What is odd about the inputs of a call: a check for debugging. It reads values on the host, so no operator does it by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from .draw import RANGE
from .engine.pool import member
from .spec import Op


def examine(op: Op | str, **inputs: Tensor | None) -> list[str]:
    """A line for every input of `op` (a member or its name) that is not finite, or leaves the range in which the recurrence is stable.

    Gates above 0 make a state grow, as keys longer than 1 and write strengths outside [0, 2] do under the delta rules: an operator refuses
    none of them, because they may be meant. Inputs have the operator's shapes; raw gates are examined as they are.
    Raises TypeError or ValueError as the operator does, naming the argument whose shape, dtype or device does not fit.

    >>> import torch, chunkwise
    >>> q, k, v = torch.zeros(3, 1, 5, 2, 4).unbind()
    >>> chunkwise.examine("simple_gla", q=q, k=k, v=v, g=torch.tensor([-1.0, 0.5]).expand(1, 5, 2))
    ['simple_gla: g should be at most 0; 5 of 10 are not']
    """
    op = member("examine", op)
    unknown = inputs.keys() - op.args.keys()
    if unknown:
        raise TypeError(f"{op.name}: takes no input {sorted(unknown)[0]!r}; it takes {', '.join(op.args)}")
    op.check({n: inputs.get(n) for n in op.args})
    nothing = {n: torch.zeros(()) for n in op.args}
    free = {n for n, t in op.couple(nothing).items() if t is nothing[n]}  # made of nothing but what their own kind is drawn from
    found = []
    for name, t in inputs.items():
        if t is None:
            continue
        says, fits = "finite", t.detach().isfinite()
        if name in free and op.args[name].draw in RANGE and not t.isnan().any():
            says, within = RANGE[op.args[name].draw]
            fits = within(t.detach().double())
        if not fits.all():
            found.append(f"{op.name}: {name} should be {says}; {int((~fits).sum())} of {fits.numel()} are not")
    return found
