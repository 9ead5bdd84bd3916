"""A simulated run as a chart: one line per SM, one box per step (matplotlib, an optional extra)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dash.schedule.simulate import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LABELLED_STEPS = 600  # beyond, boxes are too small to read


def draw(run: Run, axes: Axes) -> None:
    """Draws a run that was simulated with ``record=True``.

    A box is a step's compute, coloured by KV tile and labelled with its q tile; a hatched box is
    the time that a staged tile waits for its turn; a darker one is the add, where it has a time of
    its own (``writers=0``: the paper's model).
    """
    if not run.steps:
        raise ValueError("the run has no steps to draw: simulate(..., record=True)")
    import matplotlib

    colours = matplotlib.colormaps["viridis"].resampled(max(run.play.problem.kv_tiles, 2))
    unit = run.machine.compute
    labelled = len(run.steps) <= MAX_LABELLED_STEPS
    for timed in run.steps:
        colour = colours(timed.step.chain.kv_tile)
        dark = tuple(0.6 * c for c in colour[:3])
        left, width = timed.compute_start / unit, (timed.compute_end - timed.compute_start) / unit
        axes.barh(timed.sm, width, left=left, height=0.8, color=colour, edgecolor="white", lw=0.4)
        inline = run.machine.writers == 0
        wait = timed.add_start - timed.compute_end if inline else timed.staged - timed.compute_end
        if wait > 0:
            left = timed.compute_end / unit
            axes.barh(
                timed.sm,
                wait / unit,
                left=left,
                height=0.8,
                color="none",
                hatch="////",
                edgecolor="0.6",
                lw=0,
            )
        if inline and run.machine.copy:
            left = timed.add_start / unit
            axes.barh(timed.sm, run.machine.copy / unit, left=left, height=0.8, color=dark, lw=0)
        if labelled:
            bright = sum(colour[:3]) > 1.6
            middle = (timed.compute_start + timed.compute_end) / 2 / unit
            axes.text(
                middle,
                timed.sm,
                str(timed.step.dq_tile[2]),
                ha="center",
                va="center",
                fontsize=6,
                color="black" if bright else "white",
            )
    axes.set(xlabel="time in steps", ylabel="SM")
    axes.set_ylim(run.machine.sms - 0.5, -0.5)
    axes.set_xlim(0, run.time / unit)
    axes.set_yticks(range(0, run.machine.sms, max(1, run.machine.sms // 8)))


def write(run: Run, path: str | Path, *, title: str | None = None) -> None:
    """Writes a chart; the file's suffix decides the format."""
    from matplotlib.figure import Figure

    height = min(10.0, 1.2 + 0.22 * run.machine.sms)
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.add_subplot()
    draw(run, axes)
    axes.set_title(title or run.play.name)
    figure.savefig(path, dpi=120)
