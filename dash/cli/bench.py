"""``python -m dash bench``: times of one problem or a preset's, beside what is installed here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from dash.bench.block_models import BLOCK_MODELS
from dash.bench.block_tables import block_markdown
from dash.bench.blocks import BLOCK_PROVIDERS, BlockBench
from dash.bench.presets import PRESETS
from dash.bench.run import ALL_PROVIDERS, Bench
from dash.bench.shapes import Shape, read_lengths
from dash.bench.tables import markdown
from dash.cli import problem
from dash.cli.problem import bench_shape, shape_from_options
from dash.cli.report import timing_table
from dash.cli.runs import console, play, play_blocks
from dash.device import default_device

QUICK_SECONDS = 30.0  # of all windows together; problems and processes take as long to prepare
QUICK_PROVIDERS = ("dash", "cudnn_nondet", "fa2_det")

PresetName = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help=f"{', '.join(PRESETS)}; 'list' explains them.",
        autocompletion=lambda: [*PRESETS, "list"],
    ),
]
Providers = Annotated[
    str | None,
    typer.Option(help=f"By commas, of {', '.join(ALL_PROVIDERS)}, fa2_nondet, dash:STRATEGY."),
]
Rounds = Annotated[int, typer.Option(help="Windows of each provider; the median counts.", min=1)]
Seconds = Annotated[float, typer.Option(help="Length of a window.", min=0.001)]
Quick = Annotated[bool, typer.Option(help="Under a minute: few problems, short windows.")]
BlockFlag = Annotated[
    bool,
    typer.Option("--block", help="Whole transformer blocks of a model's preset; of all without."),
]
Lengths = Annotated[
    str, typer.Option(help="Packed sequences, as '8192 64x128', instead of batch and seqlen.")
]
Out = Annotated[Path | None, typer.Option(help="CSV file that the rows are appended to.")]
Plot = Annotated[Path | None, typer.Option(help="Folder for plots of the run (PNG).")]


def bench(
    preset: PresetName = None,
    block: BlockFlag = False,
    quick: Quick = False,
    providers: Providers = None,
    csv: Out = None,
    plot: Plot = None,
    rounds: Rounds = 3,
    seconds: Seconds = 0.3,
    batch: problem.Batch = 2,
    seqlen: problem.Seqlen = 4096,
    seqlen_k: problem.SeqlenK = None,
    heads: problem.Heads = 16,
    kv_heads: problem.KvHeads = None,
    head_dim: problem.HeadDim = 128,
    head_dim_v: problem.HeadDimV = None,
    dtype: problem.DType = "bfloat16",
    causal: problem.Causal = False,
    window_left: problem.WindowLeft = None,
    window_right: problem.WindowRight = None,
    lengths: Lengths = "",
    strategy: problem.Strategy = "auto",
) -> None:
    """Times the backward pass beside FA3, FA4, cuDNN and FA2, in turns. Needs a Hopper GPU."""
    if preset == "list":
        for name, known in PRESETS.items():
            console.print(f"{name:13} {known.about}; {len(known.shapes)} problems", markup=False)
        return
    if block:
        bench_blocks(preset, providers, csv, rounds, seconds)
        return
    if preset is None:
        asked = shape_from_options(
            batch, seqlen, seqlen_k, heads, kv_heads, head_dim, dtype, causal,
            window_left, window_right, head_dim_v,
        )  # fmt: skip
        shapes = [packed(bench_shape(asked), lengths)]
    else:
        shapes = list(preset_shapes(preset, quick))
    require_hopper()
    names = provider_names(providers, strategy, quick)
    if quick:
        rounds, seconds = 1, QUICK_SECONDS / (1.25 * len(shapes) * len(names))
    run = Bench(names, seconds, rounds, preset or "")
    rows = play(run, shapes, csv)
    if len(shapes) == 1 and rows:
        console.print(timing_table(rows, str(shapes[0])))
    written = [{k: str(v) for k, v in row.items()} for row in rows]
    if len(shapes) > 1:
        console.print(markdown(written), markup=False, soft_wrap=True)
    if plot is not None:
        from dash.bench.plots import plot_all

        for path in plot_all(written, plot):
            console.print(f"wrote {path}", markup=False)
    if run.absent.wrong:
        raise typer.Exit(1)


def packed(shape: Shape, lengths: str) -> Shape:
    """The problem with the sequences of ``--lengths``, if any, in the place of its batch."""
    if not lengths:
        return shape
    try:
        found = read_lengths(lengths)
    except ValueError as error:
        raise typer.BadParameter(f"{lengths!r}: {error}", param_hint="--lengths") from error
    longest = max(found)
    return dataclasses.replace(
        shape, batch=len(found), seqlen=longest, seqlen_k=longest, lengths=found
    )


def bench_blocks(
    preset: str | None, providers: str | None, out: Path | None, rounds: int, seconds: float
) -> None:
    """Forward and backward of whole blocks."""
    if preset is not None and preset not in BLOCK_MODELS:
        known = ", ".join(BLOCK_MODELS)
        raise typer.BadParameter(f"{preset!r} has no block; there are {known}")
    require_hopper()
    names = list(BLOCK_PROVIDERS) if providers is None else parts(providers)
    models = [BLOCK_MODELS[preset]] if preset else list(BLOCK_MODELS.values())
    rows = play_blocks(BlockBench(names, seconds, rounds), models, out)
    written = [{k: str(v) for k, v in row.items()} for row in rows]
    console.print(block_markdown(written), markup=False, soft_wrap=True)


def require_hopper() -> None:
    if default_device().type != "cuda":
        console.print(
            "bench needs a Hopper GPU; [bold]python -m dash doctor[/bold] says what is here"
        )
        raise typer.Exit(1)


def parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def preset_shapes(name: str, quick: bool) -> tuple[Shape, ...]:
    if name not in PRESETS:
        raise typer.BadParameter(f"{name!r}; there are {', '.join(PRESETS)}", param_hint="--preset")
    preset = PRESETS[name]
    return preset.quick() if quick else preset.shapes


def provider_names(asked: str | None, strategy: str, quick: bool) -> list[str]:
    """The providers of ``--providers``, with dash's ``--strategy`` in the place of auto."""
    names = list(QUICK_PROVIDERS if quick else ALL_PROVIDERS)
    if asked is not None:
        names = parts(asked)
    if strategy == "all":
        names.insert(1, "dash:all")
    elif strategy != "auto":
        names = [f"dash:{strategy}" if name == "dash" else name for name in names]
    return names
