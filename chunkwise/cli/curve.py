"""What came out, as a picture: the loss over the steps, the accuracy over the difficulty."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_curve(history: Sequence[dict[str, Any]], headline: str, path: Path) -> None:
    """Training loss (bits per token) and the validation figure over steps, from the log entries of a run, to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="bits per token")
    train = [(e["step"], e["loss"] / math.log(2)) for e in history if "loss" in e]
    key = f"eval_{headline}"
    held_out = [(e["step"], e[key]) for e in history if key in e]
    if train:
        axes.plot(*zip(*train), color="tab:blue", linewidth=1, label="training, bits per token")
    if held_out:
        label = headline.replace("_", " ")
        beside = axes if headline == "bits_per_byte" else axes.twinx()
        beside.plot(*zip(*held_out), color="tab:orange", marker="o", label=f"validation, {label}")
        if beside is not axes:
            beside.set_ylabel(label)
            beside.legend(loc="center right")
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)
    _save(figure, path)


def draw_accuracy(found: Mapping[str, Mapping[int, float]], axis: str, chance: float, title: str, path: Path) -> None:
    """{member: {value of the axis: share of answers right}} to a PNG file, with what guessing gets."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel=axis, ylabel="answers right", title=title, ylim=(-0.03, 1.03))
    for name, points in found.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    axes.axhline(chance, color="black", linestyle=":", linewidth=1, label="guessing")
    axes.set_xticks(sorted({value for points in found.values() for value in points}))
    axes.legend()
    axes.grid(alpha=0.3)
    _save(figure, path)


def draw_perplexity(found: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """{model: {tokens seen: perplexity}} to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="tokens seen", ylabel="perplexity", xscale="log")
    for name, points in found.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    axes.legend()
    axes.grid(alpha=0.3)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=120)
    os.replace(part, path)
