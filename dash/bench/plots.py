"""Plots of benchmark rows: throughput by length, the price of determinism, dash's strategies.

Needs matplotlib (``pip install dash-attention[plot]``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dash.bench.rows import places
from dash.bench.shapes import Shape
from dash.bench.tables import Times, providers_in, times_of, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Iterable[Mapping[str, str]]

# Okabe and Ito's colours, which the colour-blind tell apart; not deterministic: dashed.
COLOURS = {
    "dash": "#d55e00",
    "fa3": "#0072b2",
    "fa4": "#cc79a7",
    "cudnn": "#009e73",
    "fa2": "#56b4e9",
}
COLUMNS = 3
PANEL = (4.2, 3.0)  # inches
SLOWEST_SHOWN = 1.6  # of strategies, over the best: an unfit order takes up to 26 times as long


def plot_all(rows: Rows, folder: Path, metadata: Mapping[str, str] | None = None) -> list[Path]:
    """Draws what the rows have something for; returns the files, PNG with this metadata."""
    import matplotlib

    matplotlib.use("Agg")
    rows = list(rows)
    times, place = times_of(rows), "; ".join(places(rows))
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in (
        ("throughput", throughput),
        ("price_of_determinism", price_of_determinism),
        ("strategies", strategies),
    ):
        if (figure := draw(times)) is None:
            continue
        figure.supxlabel(place, fontsize=6, color="#666666")
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=110, metadata=dict(metadata or {}))
        written.append(path)
    return written


def throughput(times: Times) -> Figure | None:
    """TFLOPS by sequence length, a panel a group, a line a provider."""
    names = [name for name in providers_in(times) if not name.startswith("dash:")]
    if not names:
        return None

    def value(shape: Shape, name: str) -> float | None:
        ms = times[shape].get(name)
        return None if ms is None else shape.flops / ms / 1e9

    return panels(times, names, value, "TFLOPS of the backward")


def price_of_determinism(times: Times) -> Figure | None:
    """Time over FlashAttention-3's without determinism: under 1 is faster."""
    base = "fa3_nondet"
    names = [n for n in ("dash", "fa3_det", "fa4_det", "fa2_det") if n in providers_in(times)]
    if not names or base not in providers_in(times):
        return None

    def value(shape: Shape, name: str) -> float | None:
        by_name = times[shape]
        return by_name[name] / by_name[base] if {name, base} <= by_name.keys() else None

    figure = panels(times, names, value, "time / FA3's, not deterministic")
    for axes in figure.axes:
        axes.axhline(1.0, color="#888888", linewidth=0.8)
    return figure


def strategies(times: Times) -> Figure | None:
    """Each strategy's time over the best one's."""
    names = [name for name in providers_in(times) if name.startswith("dash:")]
    if len(names) < 2:
        return None

    def value(shape: Shape, name: str) -> float | None:
        ours = {n: ms for n, ms in times[shape].items() if n.startswith("dash:")}
        return ours[name] / min(ours.values()) if name in ours else None

    figure = panels(times, names, value, "time / the best strategy's")
    for axes in figure.axes:
        axes.set_ylim(0.98, min(axes.get_ylim()[1], SLOWEST_SHOWN))
    return figure


def panels(times: Times, names: list[str], value: object, label: str) -> Figure:
    """A panel for each group of problems; lengths, or packings by name, to the right."""
    from matplotlib.figure import Figure

    groups: dict[str, list[Shape]] = {}
    for shape in times:
        groups.setdefault(shape.group, []).append(shape)
    columns = min(COLUMNS, len(groups))
    lines = -(-len(groups) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * lines + 0.5), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, (group, shapes) in zip(grid.flat, groups.items(), strict=False):
        draw_panel(axes, shapes, names, value)
        axes.set_title(group, fontsize=9)
    for axes in grid.flat[len(groups) :]:
        axes.remove()
    for row in grid:
        row[0].set_ylabel(label, fontsize=8)
    found = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    lines_drawn = {title: found[title] for title in map(title_of, names) if title in found}
    figure.legend(
        lines_drawn.values(), lines_drawn, loc="outside upper center", ncols=6, fontsize=8
    )
    return figure


def draw_panel(axes: Axes, shapes: list[Shape], names: list[str], value: object) -> None:
    shapes = sorted(shapes, key=lambda shape: shape.seqlen)
    ticks = [tick_of(shape) for shape in shapes]
    for index, name in enumerate(names):
        points = [(place, value(shape, name)) for place, shape in enumerate(shapes)]
        points = [(x, y) for x, y in points if y is not None]
        if not points:
            continue
        style = "--" if name.endswith("nondet") else "-"
        colour = COLOURS.get(name.partition("_")[0], f"C{index}")
        x, y = zip(*points, strict=True)
        axes.plot(x, y, style, marker="o", markersize=3, color=colour, label=title_of(name))
    slanted = any(shape.packed for shape in shapes)
    axes.set_xticks(range(len(shapes)), ticks, fontsize=7, rotation=20 if slanted else 0)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(alpha=0.3)


def tick_of(shape: Shape) -> str:
    if shape.packed:
        return str(shape).removeprefix(f"{shape.group} ")
    return f"{shape.seqlen // 1024}k" if shape.seqlen % 1024 == 0 else str(shape.seqlen)
