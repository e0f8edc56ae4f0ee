"""Inputs of the modules' kernels, and the comparison with the modules' form in PyTorch."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ALIGNED = 16  # bytes


class Promised(TorchDispatchMode):
    """Operators of ours return what compilers were told by their forms without numbers: shapes, types, strides, and where memory begins."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.namespace == "chunkwise":
            fake = FakeTensorMode()
            with fake:
                told = func(*tree_map_only(torch.Tensor, fake.from_tensor, args), **(kwargs or {}))
            for t, want in zip(tree_leaves(made), tree_leaves(told), strict=True):
                strides = [(a, b) for n, a, b in zip(t.shape, t.stride(), want.stride(), strict=True) if n > 1 and t.numel()]
                assert t.shape == want.shape and t.dtype == want.dtype and all(a == b for a, b in strides), (func, strides)
                assert t.storage_offset() * t.element_size() % ALIGNED == 0, func
        return made


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, want, own):
    """Within twice what PyTorch's own form in that dtype gets wrong, and a rounding."""
    for g, t, o in zip(got, want, own):
        eps = torch.finfo(g.dtype).eps
        if not t.numel():
            continue
        error, honest = ((a.double() - t).norm() for a in (g, o))
        assert g.isfinite().all() and error <= 2 * (honest + eps * t.abs().max() * t.numel() ** 0.5), (error, honest)


def with_gradients(function, *leaves, dtype=None, twice=True):
    """Outputs and gradients, and gradients of those, on leaves of that dtype; incoming gradients are the outputs' own, drawn and not
    contiguous."""
    leaves = [t.detach() if dtype is None else t.detach().to(dtype) for t in leaves]
    leaves = [t.requires_grad_() for t in leaves]
    made = function(*leaves)
    made = list(made) if isinstance(made, tuple) else [made]
    upstream = [torch.stack([draw(*t.shape, seed=50 + i)] * 2, -1)[..., 0].to(t.dtype) for i, t in enumerate(made)]
    d = torch.autograd.grad(made, leaves, upstream, create_graph=twice)
    second = [t for t in d if t.requires_grad] if twice else []
    drawn = [draw(*t.shape, seed=90 + i).to(t.dtype) for i, t in enumerate(second)]
    dd = torch.autograd.grad(second, leaves, drawn, allow_unused=True, materialize_grads=True) if second else []
    return [*(t.detach() for t in (*made, *d)), *dd]


def check(monkeypatch, modules, function, *leaves, twice=True):
    """The function on kernels, of leaves, against float64 and against its form in PyTorch; scratch memory is filled with NaN."""
    truth = with_gradients(function, *leaves, dtype=torch.float64, twice=twice)
    own = with_gradients(function, *leaves, twice=twice)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        with monkeypatch.context() as m:
            for module in modules:
                m.setattr(module, "uses_kernels", lambda x: x.dtype != torch.float64)
            got = with_gradients(function, *leaves, twice=twice)
            with Promised():
                again = with_gradients(function, *leaves, twice=twice)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) and a.dtype == o.dtype for a, b, o in zip(got, again, own, strict=True))
    close(got, truth, own)
