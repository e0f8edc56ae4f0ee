"""The tests' one tolerance rule, for layers and models: two ways to compute the same thing may differ by rounding alone."""

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

OUTPUT, GRADIENT = 2, 8


def agree(got: Mapping[str, Tensor], truth: Mapping[str, Tensor], honest: Mapping[str, Tensor] | None = None) -> None:
    """Each error against the float64 truth, in L2, is at most a factor times the honest error and one rounding of the largest value.

    honest: the same by the plainer way, in got's own dtype; None where got is right to one rounding. Names that begin with d are gradients.
    The honest error is one draw: the norm of n errors is their size, off by one part in sqrt(2 n) of it as a rule. So much of what results
    err in the middle, as a share of them, is every gradient allowed besides: much where it is a few numbers, nothing where it is many.
    """
    assert got.keys() == truth.keys()
    shares = [] if honest is None else [((honest[n].double() - t).norm() / t.norm()).item() for n, t in truth.items() if t.any()]
    middle = statistics.median(shares) if shares else 0.0
    for name, want in truth.items():
        x = got[name]
        assert x.shape == want.shape and x.isfinite().all(), name
        allowed = torch.finfo(x.dtype).eps * want.abs().max() * want.numel() ** 0.5 if want.numel() else torch.tensor(0.0)
        if honest is not None:
            allowed = allowed + (honest[name].double() - want).norm()
            if name.startswith("d") and want.numel():
                allowed = allowed + middle * want.norm() / (2 * want.numel()) ** 0.5
        wrong, factor = (x.double() - want).norm(), GRADIENT if name.startswith("d") else OUTPUT
        assert wrong <= factor * allowed, f"{name}: error {wrong:.3e} is {wrong / (factor * allowed):.2f} times what is allowed"
