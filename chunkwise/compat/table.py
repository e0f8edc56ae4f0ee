"""The tables of docs/compat.md, which nobody types: `python -m chunkwise.compat.table docs/compat.md` brings them up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from ..models.layout_fla import LAYOUTS
from ..nn import mixer_class
from .fla_layer import LAYERS
from .fla_op import OPS, SHORT
from .install import surface

BEGIN, END = "<!-- surface: made by `python -m chunkwise.compat.table`; do not edit -->", "<!-- surface: end -->"


def markdown() -> str:
    """What the drop-in covers: operators and layers with what is behind each, then the other names by module."""
    short = {full: name for name, full in SHORT.items()}
    lines = ["| fla | chunkwise | different |", "|---|---|---|"]
    for a in OPS:
        names = ", ".join(f"`{n}`" for n in (a.name, short.get(a.name)) if n)
        lines.append(f"| `fla.ops.{a.folder}`: {names} | `{a.target}` | {a.note} |")
    for layer in LAYERS:
        lines.append(f"| `fla.layers`: `{layer.name}` | `nn.{mixer_class(layer.op).__name__}` | {layer.note} |")
    for layout in LAYOUTS:
        base = layout.architecture.removesuffix("ForCausalLM")
        names = ", ".join(f"`{base}{kind}`" for kind in ("Config", "Model", "ForCausalLM"))
        lines.append(f"| `fla.models`: {names} | the chunkwise model, mixer `{layout.mixer}` | {layout.note} |")
    other: dict[str, list[str]] = {}
    for path, thing in surface():
        where, _, name = path.rpartition(".")
        if not getattr(thing, "__module__", "").startswith("fla."):
            other.setdefault(name, []).append(f"`fla.{where}`")
    lines += ["", "| name | in |", "|---|---|"]
    lines += [f"| `{name}` | {', '.join(places)} |" for name, places in other.items()]
    return "\n".join([*lines, "| `causal_conv1d_fn`, `causal_conv1d_update` | `causal_conv1d`, `causal_conv1d.causal_conv1d_interface` |"])


def update(text: str) -> str:
    """A text with what stands between the markers made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(update(Path(name).read_text()))
