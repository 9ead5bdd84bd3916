"""A benchmark's run on a terminal: time left, rows as they come, what is absent."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dash.bench.block_models import BlockModel
from dash.bench.blocks import BlockBench
from dash.bench.rows import Row, RowFile
from dash.bench.run import Bench
from dash.bench.shapes import Shape

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def play(bench: Bench, shapes: list[Shape], out: Path | None) -> list[Row]:
    """Measures the problems in turn; appends the rows to ``out``, and returns them."""
    file = None if out is None else RowFile(out)
    rows: list[Row] = []
    if bench.meter.why_not:
        console.print(bench.meter.why_not, style="dim")
    try:
        with bar() as progress:
            task = progress.add_task("", total=len(shapes) * bench.rounds)
            for shape in shapes:
                progress.update(task, description=str(shape))
                for row in bench.measure(shape, lambda: progress.advance(task)):
                    rows.append(row)
                    if file is not None:
                        file.write(row)
                    console.print(line_of(shape, row), markup=False)
    finally:
        bench.close()
        if file is not None:
            file.close()
    for line in bench.absent.lines(len(shapes)):
        style = "bold red" if "WRONG" in line else "dim"
        console.print(f"no number: {line}", style=style, markup=False)
    return rows


def play_blocks(bench: BlockBench, models: list[BlockModel], out: Path | None) -> list[Row]:
    """Like ``play``, for whole blocks."""
    file = None if out is None else RowFile(out)
    rows: list[Row] = []
    cases = [(model, *case) for model in models for case in model.cases]
    try:
        with bar() as progress:
            task = progress.add_task("", total=len(cases) * bench.rounds)
            for model, batch, seqlen in cases:
                progress.update(task, description=f"{model.name} {batch} x {seqlen}")
                for row in bench.measure(model, batch, seqlen, lambda: progress.advance(task)):
                    rows.append(row)
                    if file is not None:
                        file.write(row)
                    console.print(block_line(row), markup=False)
    finally:
        bench.close()
        if file is not None:
            file.close()
    for line in bench.absent.lines(len(cases)):
        console.print(f"not measured: {line}", style="dim", markup=False)
    return rows


def block_line(row: Row) -> str:
    derived = ", derived" if row["derived"] else ""
    return (
        f"{row['model']} {row['batch']} x {row['seqlen']}: {row['provider']} {row['ms']} ms, "
        f"attention {row['share']:.0%}{derived}"
    )


def bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def line_of(shape: Shape, row: Row) -> str:
    strategy = f" {row['strategy']}" if row["strategy"] else ""
    return (
        f"{shape}: {row['provider']}{strategy} {row['ms']} ms, {row['tflops']} TFLOPS, "
        f"{row['sm_mhz']:.0f} MHz, {row['joules']} J"
    )
