"""``python -m dash schedule``: simulate the strategies on a problem and show what happens."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from dash.schedule import H200_KERNEL, Machine, Play, simulate, square


class Mask(str, Enum):
    FULL = "full"
    CAUSAL = "causal"


class Format(str, Enum):
    TABLE = "table"
    GANTT = "gantt"
    TRACE = "trace"


def schedule(
    mask: Annotated[Mask, typer.Option(help="Attention mask.")] = Mask.CAUSAL,
    kv_tiles: Annotated[int, typer.Option(min=1, help="KV tiles of a head.")] = 16,
    q: Annotated[
        int, typer.Option("--q", min=1, max=128, help="q tiles per KV tile; divides 128.")
    ] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Query heads, of the whole batch.")] = 128,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="KV heads; as many as heads by default.")
    ] = None,
    strategy: Annotated[
        str, typer.Option(help="A strategy's name, or 'all' (only with --format table).")
    ] = "all",
    sms: Annotated[
        int, typer.Option(min=1, help="SMs, with one resident CTA each.")
    ] = H200_KERNEL.sms,
    step_cycles: Annotated[
        float, typer.Option(min=1, help="Matrix products of a step, in cycles.")
    ] = H200_KERNEL.compute,
    writers: Annotated[
        int, typer.Option(min=0, help="dQ writers that alternate; 0 is the paper's model.")
    ] = H200_KERNEL.writers,
    output_format: Annotated[Format, typer.Option("--format", help="What to make.")] = Format.TABLE,
    out: Annotated[
        Path | None, typer.Option(help="File to write; gantt: .svg, .png or .pdf.")
    ] = None,
) -> None:
    """Simulates strategies tile by tile on a model of the GPU; runs on any machine.

    A table compares them; a Gantt chart (needs matplotlib) or a trace (ui.perfetto.dev) shows one.
    """
    problem = _problem(kv_tiles, q, heads, kv_heads, mask is Mask.CAUSAL)
    machine = H200_KERNEL.with_(sms=sms, compute=step_cycles, writers=writers)
    if writers == 0:
        machine = Machine.paper(sms, step_cycles, step_cycles / 4)
    if output_format is Format.TABLE:
        _print_table(problem, machine, () if strategy == "all" else (strategy,))
        return
    if strategy == "all":
        raise typer.BadParameter(f"{output_format.value} shows one strategy: give --strategy")
    run = simulate(_play(strategy, problem), machine, record=True)
    if run.stuck:
        raise typer.BadParameter(f"{strategy} deadlocks on {sms} SMs: {run.blocked[0]}")
    path = _write(run, output_format, out)
    typer.echo(f"{path}: {strategy}, {run.over_ideal:.3f} times the ideal time")


def _problem(kv_tiles: int, q: int, heads: int, kv_heads: int | None, causal: bool) -> object:
    try:
        return square(kv_tiles, q, heads=heads, kv_heads=kv_heads, causal=causal)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _play(strategy: str, problem: object) -> Play:
    try:
        return Play.of(strategy, problem)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _print_table(problem: object, machine: Machine, strategies: tuple[str, ...]) -> None:
    from rich.console import Console

    from dash.schedule import table

    try:
        lines = table.compare(problem, machine, strategies)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console = Console()
    console.print(table.render(problem, machine, lines))
    for line in lines:
        if line.refusal is not None:
            console.print(f"  {line.refusal}", style="dim", highlight=False)


def _write(run: object, output_format: Format, out: Path | None) -> Path:
    from dash.schedule import gantt, trace

    if output_format is Format.TRACE:
        path = out or Path("schedule.json")
        trace.write(run, path)
        return path
    path = out or Path("schedule.svg")
    try:
        gantt.write(run, path)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(
            f"a chart needs matplotlib ({error}): use --format trace"
        ) from error
    return path
