"""chunkwise: one chunkwise pipeline for linear attention and its relatives.

Every operator is a name of this module (``chunkwise.gla``, ``chunkwise.chunk_gla``, ...), found on its page in
``chunkwise.ops`` at first use: importing the package needs torch alone.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_ELSEWHERE = {
    "all_ops": "spec", "Gate": "spec", "Rule": "spec",
    "explain": "engine.explain", "decode": "engine.decode", "prefill": "engine.prefill",
    "examine": "examination", "snapshots": "engine.snapshot",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib.util

    if name in _ELSEWHERE:
        globals()[name] = getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE[name]}"), name)
        return globals()[name]
    if not name.startswith("_"):
        from .spec import public_functions

        found = public_functions()
        if name in found:
            globals()[name] = found[name]
            return found[name]
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:  # chunkwise.nn after `import chunkwise`, say
            return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from .spec import public_functions

    return sorted({*globals(), *_ELSEWHERE, *public_functions()})
