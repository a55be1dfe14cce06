"""What a run has found out: a table, a file, a plot, and how it differs from another run."""

import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.figures import Figure, shorten

TOLERANCE = 0.2
"""How much worse a figure may be than in another run, as a share."""

PACKAGES = ("trio-vllm", "trio", "pyzmq", "ormsgpack", "numpy", "attrs")
HEADINGS = ("", "ours", "from - to", "yardstick", "", "ratio", "target", "")


# The table --------------------------------------------------------------------------------------


def table(figures: Iterable[Figure]) -> str:
    """One line a figure, in columns."""
    rows = [HEADINGS, *map(row, figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    ]
    return "\n".join(lines)


def row(figure: Figure) -> tuple[str, ...]:
    """The cells of a figure."""
    low, high = min(figure.samples), max(figure.samples)
    compared = figure.yardstick_value is not None and figure.ratio is not None
    return (
        figure.name,
        f"{shorten(figure.value)} {figure.unit}",
        f"{shorten(low)} - {shorten(high)}" if len(figure.samples) > 1 else figure.note,
        f"{shorten(figure.yardstick_value or 0.0)}" if compared else "-",
        figure.yardstick if compared else "",
        f"{shorten(figure.ratio or 0.0)} x" if compared else "",
        figure.target.describe(figure.better) if figure.target else "",
        {True: "met", False: "MISSED", None: "NOT CHECKED" if figure.target else ""}[figure.met],
    )


# The table of the docs --------------------------------------------------------------------------


def markdown(figures: Iterable[Figure], command: str) -> str:
    """What ``docs/explanation/speed.md`` shows: where and how it was measured, and a row for each figure."""
    here = machine()
    when = datetime.datetime.now(datetime.UTC).date()
    lines = [
        f"Measured on {when} at commit {commit()} with `{command}`, on {here['cores']} cores,"
        f" {here['python']}.",
        "",
        "| | ours | next to |",
        "| --- | --- | --- |",
    ]
    for figure in figures:
        next_to = "" if figure.ratio is None else f"{shorten(figure.ratio)} x {figure.yardstick}"
        lines.append(f"| {figure.name} | {shorten(figure.value)} {figure.unit} | {next_to} |")
    return "\n".join(lines) + "\n"


def commit() -> str:
    """The commit of this checkout, and whether there are changes besides."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head = _output_of([*git, "rev-parse", "--short", "HEAD"]) or "unknown"
    changed = _output_of([*git, "status", "--porcelain", "--untracked-files=no"])
    return f"{head} (with changes)" if changed else head


def _output_of(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        return ""


# The file ---------------------------------------------------------------------------------------


def write_json(path: Path, figures: Sequence[Figure], *, quick: bool) -> None:
    """Everything, for another program or a later run."""
    content = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": machine(),
        "figures": [figure.as_dict() for figure in figures],
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Where this runs."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


# Another run ------------------------------------------------------------------------------------


def regressions(figures: Iterable[Figure], earlier: Path) -> list[str]:
    """What has become worse than in the file of another run by more than `TOLERANCE`, in words."""
    content = json.loads(earlier.read_text(encoding="utf-8"))
    past = {figure["name"]: figure for figure in content["figures"]}
    found = []
    for figure in figures:
        if figure.name not in past:
            continue
        before = past[figure.name]["compared"]
        worsening = figure.worsening(before)
        if worsening > TOLERANCE:
            unit = figure.unit if figure.ratio is None else f"x {figure.yardstick}"
            change = f"from {shorten(before)} to {shorten(figure.compared)} {unit}"
            doubt = overlap(figure.compared_range, past[figure.name]["compared_range"])
            found.append(f"WORSE by {worsening:.0%}: {figure.name}, {change}{doubt}")
    return found


def overlap(now: tuple[float, float], before: Sequence[float]) -> str:
    """A word of doubt, if the samples of two runs have values in common."""
    apart = now[0] > before[1] or now[1] < before[0]
    return "" if apart else " (samples overlap: repeat it)"


# The plot ---------------------------------------------------------------------------------------


def plot(path: Path, figures: Iterable[Figure]) -> None:
    """Draw the ratios, with their ranges; needs matplotlib."""
    shown = [figure for figure in figures if figure.ratios][::-1]
    canvas = importlib.import_module("matplotlib.figure").Figure(
        figsize=(9, 0.4 * len(shown) + 1), layout="constrained"
    )
    axes = canvas.subplots()
    for place, figure in enumerate(shown):
        assert figure.ratio is not None
        colour = {True: "tab:green", False: "tab:red", None: "tab:blue"}[figure.met]
        axes.plot([min(figure.ratios), max(figure.ratios)], [place, place], color=colour, alpha=0.4)
        axes.plot(figure.ratio, place, "o", color=colour)
        if figure.target is not None and figure.target.of == "ratio":
            axes.plot(figure.target.limit, place, "|", color="black", markersize=14)
    axes.axvline(1, color="grey", linewidth=0.5)
    axes.set_xscale("log")
    axes.set_xlabel("ours / yardstick (bar: target)")
    labels = [
        f"{figure.name} / {figure.yardstick} ({'↑' if figure.better == 'more' else '↓'})"
        for figure in shown
    ]
    axes.set_yticks(range(len(shown)), labels)
    canvas.savefig(path, dpi=120)
