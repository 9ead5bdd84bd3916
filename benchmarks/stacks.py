"""What the adapters cost: one transformer block, with dash called by its stacks and by itself.

    python -m benchmarks.stacks                 # Llama-3-8B, batch 1, 8k: half a minute on an H200
    python -m benchmarks.stacks --seqlen 2048 --seconds 0.3

Each route is timed beside the same forward kernel and the operator called directly, all in turns.
Exit code 1 where a route takes over 2% longer.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
)

import dash
from dash.bench.block_models import BLOCK_MODELS
from dash.bench.blocks import BlockAttention, block_step, torch_attention
from dash.bench.measure import Call, Meter, seconds_of_a_call, sustained_window, window_orders
from dash.compat import flash_attn_3, transformers
from dash.compat import torch_attention as registry

ALLOWED = 0.02
# Route: what it is measured against, which has the same forward.
BESIDE = {"transformers": "operator", "flash_attn_3": "operator", "registry": "operator, flash"}


class Layer(torch.nn.Module):
    """What transformers' attention layers show to an attention function."""

    is_causal = True


def attentions() -> dict[str, BlockAttention]:
    """By route: causal attention of ``(batch, seqlen, heads, head_dim)``."""
    layer, version = Layer(), dash.__version__

    def by_transformers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return transformers.attention(layer, *heads_first, None, scaling=q.shape[-1] ** -0.5)[0]

    def operator(forward: str) -> BlockAttention:
        return BlockAttention(
            lambda q, k, v: dash.attention(q, k, v, causal=True, forward=forward), version
        )

    return {
        "operator": operator("auto"),
        "transformers": BlockAttention(by_transformers, version),
        "flash_attn_3": BlockAttention(
            lambda q, k, v: flash_attn_3.flash_attn_func(q, k, v, causal=True), version
        ),
        "operator, flash": operator("flash"),
        "registry": BlockAttention(torch_attention(SDPBackend.FLASH_ATTENTION, True), version),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b", choices=BLOCK_MODELS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a window")
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    shape = BLOCK_MODELS[wanted.model], wanted.batch, wanted.seqlen
    steps = {
        name: block_step(shape[0], attention, *shape[1:])
        for name, attention in attentions().items()
    }
    registry.register()
    activate_flash_attention_impl(registry.NAME)  # the other routes do not notice
    try:
        times = timed(steps, wanted.seconds, wanted.rounds)
    finally:
        restore_flash_attention_impl()
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    slow = []
    for name, ms in medians.items():
        over = ms / medians[BESIDE.get(name, name)] - 1
        print(f"{name:16} {ms:9.3f} ms a block" + (f"  {over:+.1%}" if name in BESIDE else ""))
        slow += [name] if over > ALLOWED else []
    sys.exit(f"over {ALLOWED:.0%}: {', '.join(slow)}" if slow else 0)


def timed(steps: dict[str, Call], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step in each round, in turns."""
    meter, names = Meter(), list(steps)
    lengths = {name: seconds_of_a_call(step, 2) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    for order in window_orders(len(names), rounds):
        for name in (names[place] for place in order):
            times[name].append(sustained_window(steps[name], seconds, lengths[name], meter).ms)
    return times


if __name__ == "__main__":
    main()
