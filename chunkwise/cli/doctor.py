"""`chunkwise doctor`: what is installed, and what each member would run on this machine."""

from __future__ import annotations

import importlib.metadata
import platform

from .refusal import refusing

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "accelerate", "numpy")
CASES = (("training", 2048, True), ("prefill", 2048, False), ("decoding", 1, False))  # what, tokens, with gradients


def doctor() -> None:
    """Say which backend each member would use on this machine and why, and which versions are installed."""
    import torch

    import chunkwise
    from chunkwise.engine.measured import cards, load
    from chunkwise.spec import all_ops

    print(f"chunkwise     {chunkwise.__version__}")
    print(f"python        {platform.python_version()}, {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        print(f"{package:13} {_version(package)}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    print(f"cpu           {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    print(f"gpu           {', '.join(names) or 'PyTorch sees none: everything runs on the CPU'}")
    with refusing(ValueError):  # a broken file, which calls refuse too
        measured = ", ".join(f"{card}: {len(load(card))} configs" for card in cards())
    print(f"measured      {measured or 'no card: kernels run by rules'}")
    for device, dtype in (("cpu", torch.float32), *([("cuda", torch.bfloat16)] if count else [])):
        for name, T, grad in CASES:
            print(f"\n{name} on {device}, {str(dtype).removeprefix('torch.')}, {T} {'tokens' if T > 1 else 'token'}")
            for op in all_ops():
                print(f"  {chunkwise.explain(op, T=T, device=device, dtype=dtype, grad=grad)}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
