"""`python -m dash bench` over a grid of problems whose axes are options.

    python -m benchmarks.backward out.csv                               the whole grid
    python -m benchmarks.backward out.csv --masks causal --head-dims 128 --seqlens 4096,8192
    python -m benchmarks.backward out.csv --providers dash,dash:all     every strategy

Time needed: problems × providers × rounds × seconds × 1.4. PERFORMANCE.md §5 has the rules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dash.bench.run import ALL_PROVIDERS, Bench
from dash.bench.shapes import SEQLENS, parse_shape, select_shapes
from dash.cli.runs import play


def parts(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def main(
    out: Annotated[Path, typer.Argument(help="CSV file; rows are appended.")],
    masks: Annotated[str, typer.Option(help="full,causal or one of them.")] = "full,causal",
    head_dims: Annotated[str, typer.Option(help="64,128 or one of them.")] = "64,128",
    seqlens: Annotated[str, typer.Option()] = ",".join(map(str, SEQLENS)),
    gqa: Annotated[bool, typer.Option(help="Also causal D128 with 32/8 and 28/4 heads.")] = True,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="batch,seqlen,heads,kv_heads,head_dim,causal instead of the grid."),
    ] = None,
    providers: Annotated[
        str, typer.Option(help="Of benchmarks/README.md's table, by commas.")
    ] = ",".join(ALL_PROVIDERS),
    seconds: Annotated[float, typer.Option(help="Length of a window.", min=0.001)] = 1.0,
    rounds: Annotated[int, typer.Option(help="Windows of each provider.", min=1)] = 3,
) -> None:
    """Times the backward passes of the grid and appends a CSV row for each."""
    head_dim_list = tuple(int(d) for d in parts(head_dims))
    shapes = [parse_shape(text) for text in shape or ()] or select_shapes(
        parts(masks), head_dim_list, tuple(int(s) for s in parts(seqlens)), gqa
    )
    play(Bench(list(parts(providers)), seconds, rounds), shapes, out)


if __name__ == "__main__":
    typer.run(main)
