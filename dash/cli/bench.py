"""``python -m dash bench``: time of one problem, beside PyTorch's kernels, in one run."""

from __future__ import annotations

from typing import Annotated

import typer

from dash.cli import problem
from dash.cli.problem import make_inputs, plans_asked, shape_from_options
from dash.cli.providers import providers
from dash.cli.report import console, print_plan, progress, timing_table
from dash.cli.timing import time_in_turns
from dash.device import default_device

Rounds = Annotated[int, typer.Option(help="Bursts of each kernel; the median counts.", min=1)]
BurstMs = Annotated[float, typer.Option(help="Length of a burst in milliseconds.", min=1)]


def bench(
    batch: problem.Batch = 2,
    seqlen: problem.Seqlen = 4096,
    seqlen_k: problem.SeqlenK = None,
    heads: problem.Heads = 16,
    kv_heads: problem.KvHeads = None,
    head_dim: problem.HeadDim = 128,
    dtype: problem.DType = "bfloat16",
    causal: problem.Causal = False,
    strategy: problem.Strategy = "auto",
    seed: problem.Seed = 0,
    rounds: Rounds = 10,
    burst_ms: BurstMs = 100.0,
) -> None:
    """Times the backward pass beside FA2-deterministic and cuDNN, in turns. Needs a Hopper GPU."""
    if default_device().type != "cuda":
        console.print(
            "bench needs a Hopper GPU; [bold]python -m dash doctor[/bold] says what is here"
        )
        raise typer.Exit(1)
    shape = shape_from_options(batch, seqlen, seqlen_k, heads, kv_heads, head_dim, dtype, causal)
    plans = plans_asked(shape, strategy)
    print_plan(plans[0])
    inputs = make_inputs(shape, seed)
    rivals = list(providers(inputs, [plan.strategy for plan in plans]))
    results = time_in_turns(rivals, rounds, burst_ms, progress("timing"))
    console.print(timing_table(results, shape))
    if not all(timed.finite for timed in results):
        raise typer.Exit(1)
