"""``python -m dash verify``: accuracy and bitwise repeats of one problem on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from dash.cli import problem
from dash.cli.accuracy import judge
from dash.cli.problem import make_inputs, plans_asked, shape_from_options
from dash.cli.repeats import repeat
from dash.cli.report import accuracy_table, console, progress, repeats_line
from dash.device import default_device

Count = Annotated[int, typer.Option(help="Calls that are compared with the first.", min=1)]


def verify(
    batch: problem.Batch = 1,
    seqlen: problem.Seqlen = 512,
    seqlen_k: problem.SeqlenK = None,
    heads: problem.Heads = 4,
    kv_heads: problem.KvHeads = None,
    head_dim: problem.HeadDim = 64,
    dtype: problem.DType = "bfloat16",
    causal: problem.Causal = False,
    strategy: problem.Strategy = "auto",
    seed: problem.Seed = 0,
    repeats: Count = 100,
) -> None:
    """Checks the gradients of a problem: exact enough, and the same bits on every call."""
    shape = shape_from_options(batch, seqlen, seqlen_k, heads, kv_heads, head_dim, dtype, causal)
    plans = plans_asked(shape, strategy)
    console.print(f"{shape}; on {default_device()}")
    inputs = make_inputs(shape, seed)
    good = True
    for plan in plans:
        name = plan.strategy
        console.rule(f"{name}, fingerprint {plan.fingerprint}", align="left")
        result = repeat(
            lambda name=name: inputs.backward(name), repeats, plan.workspace_bytes, progress(name)
        )
        verdicts = judge(inputs, inputs.backward(name))
        console.print(accuracy_table(verdicts))
        console.print(repeats_line(result))
        good &= result.different == 0 and all(v.passed for v in verdicts)
    if not good:
        raise typer.Exit(1)
