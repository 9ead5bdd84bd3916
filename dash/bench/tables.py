"""Markdown tables of rows as a CSV file has them: throughputs, and who wins by how much."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping

from dash.bench.rows import places
from dash.bench.shapes import Shape, from_columns

Rows = Iterable[Mapping[str, str]]
Times = dict[Shape, dict[str, float]]  # ms by provider

TITLES = {
    "dash": "dash",
    "fa3_nondet": "FA3",
    "fa3_det": "FA3 det",
    "fa4_nondet": "FA4",
    "fa4_det": "FA4 det",
    "cudnn_nondet": "cuDNN",
    "fa2_nondet": "FA2",
    "fa2_det": "FA2 det",
}
RIVALS = ("fa3_nondet", "fa3_det", "fa2_det", "cudnn_nondet")  # ratios are given over these


def title_of(name: str) -> str:
    return TITLES.get(name, name.removeprefix("dash:"))


def times_of(rows: Rows) -> Times:
    """The median over the rows of the same problem and provider."""
    every: dict[Shape, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        every[from_columns(row)][row["provider"]].append(float(row["ms"]))
    return {
        shape: {name: statistics.median(ms) for name, ms in by_name.items()}
        for shape, by_name in every.items()
    }


def providers_in(times: Times) -> list[str]:
    """In ``TITLES``' order; dash's strategies last."""
    found = {name for by_name in times.values() for name in by_name}
    known = [name for name in TITLES if name in found]
    return known + sorted(found - set(known))


def markdown(rows: Rows) -> str:
    """A problem a line, TFLOPS a provider, dash's ratio over its rivals; then the places.

    The fastest of a line is bold, and so is a ratio under 1, where dash loses.
    """
    rows = list(rows)
    times = times_of(rows)
    names = providers_in(times)
    rivals = [name for name in RIVALS if name in names and "dash" in names]
    head = ["problem", *map(title_of, names), *(f"dash / {title_of(name)}" for name in rivals)]
    lines = [line(head), line(["---", *["---:"] * (len(head) - 1)])]
    for shape, by_name in times.items():
        cells = [tflops(shape, by_name, name) for name in names]
        cells += [ratio(by_name, name) for name in rivals]
        lines.append(line([str(shape), *cells]))
    lines += ["", *(f"TFLOPS of the whole backward; {place}" for place in places(rows))]
    return "\n".join(lines)


def ratios_markdown(rows: Rows) -> str:
    """Geometric means (worst) of dash over each rival, by group of problems."""
    times = times_of(rows)
    names = [name for name in providers_in(times) if not name.startswith("dash")]
    lines = [line(["group", *(f"over {title_of(n)}" for n in names)])]
    lines.append(line(["---", *["---:"] * len(names)]))
    for group in dict.fromkeys(shape.group for shape in times):
        cells = [mean_and_worst(times, group, name) for name in names]
        lines.append(line([group, *cells]))
    return "\n".join(lines)


def mean_and_worst(times: Times, group: str, name: str) -> str:
    found = [
        by_name[name] / by_name["dash"]
        for shape, by_name in times.items()
        if shape.group == group and name in by_name and "dash" in by_name
    ]
    if not found:
        return ""
    return f"{statistics.geometric_mean(found):.3f} ({min(found):.3f})"


def tflops(shape: Shape, by_name: dict[str, float], name: str) -> str:
    if name not in by_name:
        return ""
    text = f"{shape.flops / by_name[name] / 1e9:.0f}"
    return f"**{text}**" if by_name[name] == min(by_name.values()) else text


def ratio(by_name: dict[str, float], name: str) -> str:
    if name not in by_name or "dash" not in by_name:
        return ""
    over = by_name[name] / by_name["dash"]
    return f"**{over:.2f}**" if round(over, 2) < 1 else f"{over:.2f}"


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
