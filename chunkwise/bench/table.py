"""Rows as people read them: lines on a terminal, and the tables in README.md and docs, which nobody types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .case import GRID, SHAPES, SIZES
from .measure import OURS, PASSES, TookTooLong

BEGIN = "<!-- {}: made by `chunkwise bench --table` from bench/results; do not edit -->"
END = "<!-- {}: end -->"
NOTHING = "No results yet: `chunkwise bench --out bench/results` makes them.\n"

HEADINGS = ("op", "shape", "pass", "who", "ran", "ms", "p20-p80", "eager", "TB/s", "TFLOP/s", "floor", "MiB", "ours is", "largest error")


def worst(row: Mapping[str, Any]) -> tuple[str, float]:
    """The result with the largest error."""
    return max(((n, e["error"]) for n, e in row["errors"].items()), key=lambda x: x[1], default=("", 0.0))


def line(row: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> list[str]:
    """Cells of a row; own: our row of the same case, for the ratio. A wrong row has no speed."""
    name, error = worst(row)
    ran = ", ".join(f"{r['backend']}: {r['plan']} {r['chunk']}" for r in row["ran"]) or row["version"]
    head = [row["case"]["op"], row["case"]["shape"], row["pass"], row["who"], ran]
    if row["wrong"]:
        return [*head, "WRONG", *[""] * (len(HEADINGS) - len(head) - 2), row["why"]]
    ms, eager = row["ms"], row["eager_ms"]
    memory = "" if row.get("peak_extra_bytes") is None else f"{row['peak_extra_bytes'] / 2**20:.0f}"
    ratio = "" if own is None or own is row or own["wrong"] else f"{ms['p50'] / own['ms']['p50']:.2f}x"
    rates = [f"{row['tb_s']:.3g}", f"{row['tflop_s']:.3g}", f"{row['to_floor']:.1f}x"] if "floor_ms" in row else ["", "", ""]
    return [
        *head, f"{ms['p50']:.4g}", f"{ms['p20']:.4g}-{ms['p80']:.4g}", f"{eager['p50']:.4g}", *rates, memory, ratio, f"{error:.1e} {name}",
    ]  # fmt: skip


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows; the ratio is other / ours: how many times faster ours is."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEADINGS, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        own = next((r for r in rows if r["who"] == OURS and (r["case"], r["pass"]) == (row["case"], row["pass"])), None)
        table.add_row(*line(row, own), style="bold red" if row["wrong"] else None)
    console = Console(highlight=False)
    console.print(table) if console.is_terminal else Console(width=200, highlight=False).print(table)


def latest(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The newest run of every case: ours and the peers of that run, never times of different runs side by side."""
    runs: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row["pass"] not in PASSES:
            continue
        key = (row["device"], row["threads"], *row["case"].values(), row["pass"])
        if row["who"] == OURS:
            runs[key] = {}
        runs.setdefault(key, {})[row["who"]] = row
    return [row for run in runs.values() if OURS in run for row in run.values()]


def _days(rows: Sequence[Mapping[str, Any]]) -> str:
    days = sorted({r["date"][:10] for r in rows})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _time(row: Mapping[str, Any] | None, units: float = 1) -> str:
    """In so many units a millisecond."""
    if row is None:
        return ""
    if row["wrong"]:
        return "wrong"
    eager = "" if row["method"] == "wall" else f" / {units * row['eager_ms']['p50']:.3g}"
    return f"{units * row['ms']['p50']:.3g}{eager}"


def _error(row: Mapping[str, Any] | None) -> str:
    return "-" if row is None or not row["errors"] else f"{worst(row)[1]:.1e}"


def _ratio(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """The fastest other over ours, of the device's time and of the eager call's."""
    right = [r for r in others if not r["wrong"] and "floor_ms" in r]
    if own["wrong"] or not right:
        return ""
    kinds = ["ms"] if own["method"] == "wall" else ["ms", "eager_ms"]
    return " / ".join(f"{min(r[k]['p50'] for r in right) / own[k]['p50']:.2f}" for k in kinds)


def _runs(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[dict[str, Mapping[str, Any]]]]:
    """Who else there is; of every case and pass the rows by whose they are."""
    cases: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for r in rows:
        cases.setdefault((*r["case"].values(), r["pass"]), {})[r["who"]] = r
    return sorted({r["who"] for r in rows} - {OURS}), list(cases.values())


def _device(name: str, threads: int | None, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    others, cases = _runs(rows)
    where, unit = (f"{name}, {threads} threads", "milliseconds") if threads else (name, "milliseconds of the device / of an eager call")
    whose = [OURS, *others]
    heads = ["op", "shape", "dtype, gates", "pass", *whose, "fastest other / ours", f"error: {', '.join(whose)}"]
    text = [f"**{where}** ({_days(rows)}), {unit}:", "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    order = [*SHAPES, *GRID]
    for run in sorted(cases, key=lambda run: _order(run[OURS], order)):
        own = run[OURS]
        c, ratio = own["case"], _ratio(own, [r for n, r in run.items() if n != OURS])
        backend = " (torch)" if threads is None and any(r["backend"] == "torch" for r in own["ran"]) else ""
        text.append(
            f"| {c['op']} | {c['shape']} | {c['dtype']}, {c['gates']} | {own['pass']} | {_time(own)}{backend} | "
            + "".join(f"{_time(run.get(n))} | " for n in others)
            + f"{ratio} | {', '.join(_error(run.get(n)) for n in whose)} |"
        )
    return [*text, ""]


def _order(row: Mapping[str, Any], shapes: Sequence[str]) -> tuple[Any, ...]:
    c = row["case"]
    shape = shapes.index(c["shape"]) if c["shape"] in shapes else len(shapes)
    return (c["op"], shape, c["shape"], c["dtype"], c["gates"], c["form"], row["pass"])


def _steps(name: str, threads: int | None, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Steps of chunkwise.decode, in microseconds."""
    others, cases = _runs(rows)
    where, unit = (f"{name}, {threads} threads", "") if threads else (name, " of the device / of an eager call")
    heads = ["op", ", ".join(SIZES), "states", OURS, *others, "ours / floor", "fastest other / ours", "error of ours"]
    text = [
        f"**{where}** ({_days(rows)}), microseconds{unit}:",
        "",
        f"| {' | '.join(heads)} |",
        "|" + "---|" * (7 + len(others)),
    ]
    for run in sorted(cases, key=lambda run: (run[OURS]["case"]["op"], *(run[OURS]["case"][n] for n in (*SIZES, "pool")))):
        own = run[OURS]
        c, floor = own["case"], "" if own["wrong"] else f"{own['to_floor']:.2f}"
        dtype, _, turned = c["pool"].partition("-")
        text.append(
            f"| {c['op']} | {', '.join(str(c[n]) for n in SIZES)} | {dtype}, {'values' if turned else 'keys'} first | "
            + "".join(f"{_time(run.get(n), 1e3)} | " for n in (OURS, *others))
            + f"{floor} | {_ratio(own, [r for n, r in run.items() if n != OURS])} | {worst(own)[1]:.0e} |"
        )
    return [*text, ""]


def _modules(name: str, threads: int | None, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Modules of chunkwise.nn, a table for every dtype."""
    by: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by.setdefault(row["case"]["dtype"], []).append(row)
    return [x for dtype, some in by.items() for x in _modules_of(dtype, name, threads, some)]


def _modules_of(dtype: str, name: str, threads: int | None, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Milliseconds, and the share of the floor; the most memory beyond inputs."""
    others, cases = _runs(rows)
    unit = "milliseconds" if threads else "milliseconds of the device / of an eager call, MiB beyond the inputs"
    heads = ["module", "pass", "floor", OURS, *others, "floor / ours", "fastest other / ours", "error of ours"]
    text = [
        f"**{name}{f', {threads} threads' if threads else ''}** ({_days(rows)}), {dtype}, {unit}:",
        "",
        f"| {' | '.join(heads)} |",
        "|" + "---|" * len(heads),
    ]
    for run in cases:
        own = run[OURS]
        floor, share = ("", "") if own["wrong"] else (f"{own['floor_ms']:.3g}", f"{100 / own['to_floor']:.0f} %")
        cells = [_time(r) + _memory(r) for r in (run.get(n) for n in (OURS, *others))]
        text.append(
            f"| {own['case']['op']}, {own['case']['shape']} | {own['pass']} | {floor} | {' | '.join(cells)} | {share} | "
            f"{_ratio(own, [r for n, r in run.items() if n != OURS])} | {worst(own)[1]:.0e} |"
        )
    mine = [run[OURS] for run in cases]
    absent = {f"{who}, {r['case']['op']}, {r['case']['shape']}": why for r in mine for who, why in r["absent"].items()}
    return [*text, "", *(f"- {who}: {why}" for who, why in absent.items()), ""]


def _memory(row: Mapping[str, Any] | None) -> str:
    return "" if row is None or row.get("peak_extra_bytes") is None else f", {row['peak_extra_bytes'] / 2**20:.0f}"


def _grid(name: str, threads: int | None, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many times the fastest other's time ours is under, a line for a shape and a column for a member; then every time."""
    _, cases = _runs(rows)
    runs = {(run[OURS]["case"]["shape"], run[OURS]["case"]["op"], run[OURS]["pass"]): run for run in cases}
    ops = sorted({op for _, op, _ in runs})
    text = []
    for key, unit in (("ms", "the device's time"), ("eager_ms", "the time of an eager call")):
        text += [
            f"**{name}** ({_days(rows)}), the fastest other's time over ours, forward / forward and backward, by {unit}:",
            "",
            f"| | {' | '.join(ops)} |",
            "|" + "---|" * (1 + len(ops)),
        ]
        for shape in GRID:
            cells = [" / ".join(_times_faster(runs.get((shape, op, p)), key) for p in PASSES) for op in ops]
            text.append(f"| {shape} | {' | '.join(cells)} |")
        text.append("")
    reasons: dict[str, list[str]] = {}
    for (shape, op, p), run in sorted(runs.items()):
        for who, why in {**run[OURS]["absent"], **{who: r["why"] for who, r in run.items() if r["wrong"]}}.items():
            reasons.setdefault(f"{who}: {why}", []).append(f"{op}, {shape}, {p}")
    text += [f"- {why} ({'; '.join(where)})" for why, where in sorted(reasons.items())]
    return [*text, "", *_commits(run[OURS] for run in cases), "", *_device(name, threads, rows)]


def _commits(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Whose rows are of which commit, the oldest first."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for r in sorted(rows, key=lambda r: (r["date"], list(GRID).index(r["case"]["shape"]), r["case"]["op"])):
        found.setdefault(r["commit"], {}).setdefault(r["case"]["shape"], {})[r["case"]["op"]] = None
    told = {commit: "; ".join(f"{shape} ({', '.join(sorted(ops))})" for shape, ops in shapes.items()) for commit, shapes in found.items()}
    return [f"- at commit {commit or 'unknown'}: {what}" for commit, what in told.items()]


def _times_faster(run: Mapping[str, Mapping[str, Any]] | None, key: str) -> str:
    """refused: by others, whose words stand below the table; -: ours alone has such a time; ?: not measured. A time of queued calls holds
    launches too: it is no time of the device."""
    if run is None or run[OURS]["wrong"]:
        return "?" if run is None else "wrong"
    if set(run) == {OURS} and run[OURS]["absent"]:
        return "?" if any(why.startswith(TookTooLong.SAYS) for why in run[OURS]["absent"].values()) else "refused"
    queued = {who for who, r in run.items() if key == "ms" and r.get("method") == "queued" != run[OURS]["method"]}
    others = [r[key]["p50"] for who, r in run.items() if who not in (OURS, *queued) and not r["wrong"] and "floor_ms" in r]
    return f"{min(others) / run[OURS][key]['p50']:.2f}" if others else "-"


def markdown(rows: Iterable[Mapping[str, Any]], kind: str = "calls") -> str:
    """What stands between two markers: calls, those of the grid, or steps in pools."""
    groups: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
    for row in latest(row for row in rows if _kind(row["case"]) == kind):
        groups.setdefault((row["device"], row["threads"]), []).append(row)
    one = {"calls": _device, "grid": _grid, "steps": _steps, "modules": _modules}[kind]
    text = [x for (name, threads), group in sorted(groups.items(), key=str) for x in one(name, threads, group)]
    return "\n".join(text) if text else NOTHING


def _kind(c: Mapping[str, Any]) -> str:
    return "modules" if "module" in c else "steps" if c.get("pool") else "grid" if c["shape"] in GRID else "calls"


TABLES: Mapping[str, Callable[[Iterable[Mapping[str, Any]]], str]] = {
    "speed": markdown, "speed of steps": partial(markdown, kind="steps"), "speed of modules": partial(markdown, kind="modules"),
    "speed of the grid": partial(markdown, kind="grid"),
}  # fmt: skip


def fill(files: Iterable[Path], rows: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """The texts of files with the tables between the markers they have; nothing is written. Raises ValueError naming a file that is absent,
    that has no markers, or not both of a pair."""
    return {file: _filled(file, rows) for file in files}


def _filled(file: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    if not file.is_file():
        raise ValueError(f"bench: there is no {file} here; run it in a clone, or name files by --into")
    text, places = file.read_text(), 0
    for name, made in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin not in text and end not in text:
            continue
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(f"bench: {file} has no place for the table: it needs the lines {begin!r} and {end!r}")
        text = f"{text[: text.index(begin) + len(begin)]}\n\n{made(rows)}\n{text[text.index(end) :]}"
        places += 1
    if not places:
        pairs = " or ".join(f"{BEGIN.format(name)!r} and {END.format(name)!r}" for name in TABLES)
        raise ValueError(f"bench: {file} has no place for a table: it needs the lines {pairs}")
    return text
