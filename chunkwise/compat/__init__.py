"""Code written for flash-linear-attention, causal_conv1d and transformers, run by chunkwise. Importing this changes nothing."""

from __future__ import annotations

from typing import Any

_ELSEWHERE = {"install_as_fla": "install", "Installation": "install", "patch_transformers": "patch", "Patch": "patch"}
__all__ = list(_ELSEWHERE)


def __getattr__(name: str) -> Any:
    import importlib

    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ELSEWHERE})
