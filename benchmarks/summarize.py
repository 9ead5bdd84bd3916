"""Ratios of a benchmark's CSV: dash over each provider, shape by shape and by issue 4's groups.

    python -m benchmarks.summarize out.csv
    python -m benchmarks.summarize out.csv --anchors shared/data/h200_baselines.csv

With anchors, FA3's missing rows are estimated: its time there × cuDNN's time in this run / cuDNN's
time there. Those columns carry a ~: absolute times move with the card, ratios in one run do not.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dash.bench.rows import read_rows
from dash.bench.shapes import Shape
from dash.bench.tables import Times, times_of

# Issue 4: geometric mean at least, no shape under; against FA3 without and with determinism.
TARGETS = {
    "full D128": ((1.05, 0.98), (1.25, 0.0)),
    "causal D128": ((1.05, 0.98), (1.25, 0.0)),
    "full D64": ((1.05, 0.98), (1.20, 0.0)),
    "causal D64": ((1.05, 0.98), (1.20, 0.0)),
    "causal D128 GQA 32/8": ((1.10, 0.0), (1.35, 0.0)),
    "causal D128 GQA 28/4": ((1.10, 0.0), (1.35, 0.0)),
}
GOAL_OF = {"fa3_nondet": 0, "fa3_det": 1}
ESTIMATED = "~"


def add_estimates(times: Times, anchors: Times) -> None:
    for shape, by_name in times.items():
        there = anchors.get(shape, {})
        if "cudnn_nondet" not in by_name or "cudnn_nondet" not in there:
            continue
        today = by_name["cudnn_nondet"] / there["cudnn_nondet"]
        for name in GOAL_OF:
            if name not in by_name and name in there:
                by_name[name + ESTIMATED] = there[name] * today


def names_in(times: Times) -> list[str]:
    found = {name for by_name in times.values() for name in by_name}
    return sorted(found, key=lambda name: (not name.startswith("dash"), name))


def tflops_table(times: Times) -> Table:
    names = names_in(times)
    table = Table("TFLOPS", *names, title="Whole call", title_justify="left")
    for shape, by_name in times.items():
        best = min(by_name.values())
        cells = []
        for name in names:
            ms = by_name.get(name)
            text = "" if ms is None else f"{shape.flops / ms / 1e9:.0f}"
            cells.append(f"[bold]{text}[/bold]" if ms == best else text)
        table.add_row(str(shape), *cells)
    return table


def strategies_table(times: Times) -> Table | None:
    """Each strategy's time over the best strategy's."""
    names = [name for name in names_in(times) if name.startswith("dash")]
    if len(names) < 2:
        return None
    table = Table("time / best", *names, title="Strategies", title_justify="left")
    for shape, by_name in times.items():
        ours = {name: by_name[name] for name in names if name in by_name}
        if ours:
            best = min(ours.values())
            cells = (f"{ours[name] / best:.3f}" if name in ours else "" for name in names)
            table.add_row(str(shape), *cells)
    return table


def ratios(times: Times, name: str, subject: str) -> dict[str, dict[Shape, float]]:
    """``name``'s time over the subject's by group: above 1 the subject is faster."""
    found: dict[str, dict[Shape, float]] = defaultdict(dict)
    for shape, by_name in times.items():
        if name in by_name and subject in by_name:
            found[shape.group][shape] = by_name[name] / by_name[subject]
    return found


def ratio_table(times: Times, subject: str) -> Table:
    title = f"{subject} over: geometric mean (worst shape), target"
    others = [name for name in names_in(times) if not name.startswith("dash")]
    table = Table("group", *others, title=title, title_justify="left")
    by_other = {name: ratios(times, name, subject) for name in others}
    for group in dict.fromkeys(shape.group for shape in times):
        cells = [cell(group, name, by_other[name].get(group, {})) for name in others]
        table.add_row(group, *cells)
    return table


def cell(group: str, name: str, found: dict[Shape, float]) -> str:
    if not found:
        return ""
    mean = statistics.geometric_mean(found.values())
    worst = min(found, key=found.__getitem__)
    text = f"{mean:.3f} ({found[worst]:.3f} at {worst.seqlen}, {len(found)} shapes)"
    goal = GOAL_OF.get(name.removesuffix(ESTIMATED))
    if goal is None or group not in TARGETS:
        return text
    wanted_mean, wanted_worst = TARGETS[group][goal]
    met = mean >= wanted_mean and found[worst] >= wanted_worst
    floor = f", none under {wanted_worst}" if wanted_worst else ""
    style = "green" if met else "red"
    return f"{text}\n[{style}]{'met' if met else 'missed'}: {wanted_mean}{floor}[/{style}]"


def main(
    files: Annotated[list[Path], typer.Argument(help="CSV files of benchmarks.backward.")],
    anchors: Annotated[Path | None, typer.Option(help="FA3's rows of another day.")] = None,
    subject: Annotated[str, typer.Option(help="dash or dash:STRATEGY.")] = "dash",
) -> None:
    """Prints TFLOPS, strategies and ratios."""
    rows = [row for file in files for row in read_rows(file)]
    console = Console(width=None if sys.stdout.isatty() else 140)
    places = {(r["gpu"], r["driver"], r["torch"], r["commit"]) for r in rows}
    for place in sorted(places):
        console.print("GPU {}, driver {}, torch {}, commit {}".format(*place))
    times = times_of(rows)
    if anchors is not None:
        add_estimates(times, times_of(read_rows(anchors)))
    console.print(tflops_table(times))
    if (strategies := strategies_table(times)) is not None:
        console.print(strategies)
    console.print(ratio_table(times, subject))


if __name__ == "__main__":
    typer.run(main)
