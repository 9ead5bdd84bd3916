"""Host time of a call, into an empty queue, SDPA's beside it in the same run.

    python -m benchmarks.host_time

A call's host time is how long it keeps Python, from an idle GPU on; what the GPU does meanwhile is
not counted. Medians, all calls in turns. ``with switch`` is GPU time of the operator while
``torch.use_deterministic_algorithms`` is on, over that while it is off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
import typer

import dash

# (batch, seqlen, heads, head_dim): so short that the host is the whole time, and a common step.
SHAPES = ((1, 128, 4, 128), (32, 512, 16, 128))


def main(
    rounds: Annotated[int, typer.Option(help="Calls of each kind and shape.", min=10)] = 300,
) -> None:
    """Prints a row a shape and call: median and quartiles in microseconds."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {rounds} rounds, causal")
    print(f"{'shape':22} {'call':28} {'median µs':>10} {'quartiles µs':>18}")
    for shape in SHAPES:
        calls = calls_of(shape)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(host_time(call))
        for name, found in times.items():
            low, median, high = statistics.quantiles(found[rounds // 10 :], n=4)
            quartiles = f"{low * 1e6:.1f} to {high * 1e6:.1f}"
            print(f"{shape!s:22} {name:28} {median * 1e6:10.1f} {quartiles:>18}")
    off, on = switch_times(calls_of(SHAPES[-1])["dash operator"])
    print(f"{SHAPES[-1]!s:22} with switch {on:.1f} µs, without {off:.1f} µs: {on / off:.4f}")


def calls_of(shape: tuple[int, int, int, int]) -> dict[str, Callable[[], object]]:
    q, k, v, dout = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=i < 3)
        for i in range(4)
    )
    with torch.no_grad():
        out, lse = dash.attention(q, k, v, causal=True, return_lse=True)
    tensors = tuple(t.detach() for t in (dout, q, k, v, out, lse))

    def attention() -> object:
        return torch.autograd.grad(dash.attention(q, k, v, causal=True), (q, k, v), dout)

    def sdpa() -> object:
        query, key, value = (t.transpose(1, 2) for t in (q, k, v))
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(found.transpose(1, 2), (q, k, v), dout)

    return {
        "dash operator": lambda: torch.ops.dash.attention_bwd(*tensors, None, True),
        "dash.attention, both passes": attention,
        "SDPA, both passes": sdpa,
    }


def host_time(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    took = time.perf_counter() - start
    del result
    return took


def switch_times(call: Callable[[], object]) -> tuple[float, float]:
    """GPU microseconds of a call without and with the determinism switch, in turns."""
    times: dict[bool, list[float]] = {False: [], True: []}
    try:
        for switch in (False, True) * 10:
            torch.use_deterministic_algorithms(switch)
            times[switch].append(gpu_time(call))
    finally:
        torch.use_deterministic_algorithms(False)
    return statistics.median(times[False][1:]), statistics.median(times[True][1:])


def gpu_time(call: Callable[[], object], calls: int = 100) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls * 1e3


if __name__ == "__main__":
    typer.run(main)
