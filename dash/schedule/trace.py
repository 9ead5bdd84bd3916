"""A simulated run in the Chrome trace format, for chrome://tracing and https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from dash.schedule.simulate import Run, Timed

CYCLES_PER_MICROSECOND = 1980.0  # an H200's listed clock; traces count microseconds


def events(run: Run) -> Iterator[dict]:
    """Trace events: one process per SM, one thread for the MMA role and one per dQ writer."""
    writers = max(run.machine.writers, 1)
    for sm in range(run.machine.sms):
        yield _name("process_name", sm, 0, f"SM {sm}")
        yield _name("thread_name", sm, 0, "compute")
        for writer in range(writers):
            yield _name("thread_name", sm, 1 + writer, f"dQ writer {writer}")
    position = [0] * run.machine.sms
    for timed in run.steps:
        writer = 1 + position[timed.sm] % writers
        position[timed.sm] += 1
        arguments = _arguments(timed)
        tile = f"KV {timed.step.chain.kv_tile}, q {timed.step.dq_tile[2]}"
        yield _span(timed, 0, tile, timed.compute_start, timed.compute_end, arguments)
        if timed.add_start > timed.staged:
            turn = f"wait for turn {timed.step.turn}"
            yield _span(timed, writer, turn, timed.staged, timed.add_start, arguments)
        yield _span(timed, writer, f"add {tile}", timed.add_start, timed.passed, arguments)


def write(run: Run, path: str | Path) -> None:
    """Writes the trace of a run that was simulated with ``record=True``."""
    if not run.steps:
        raise ValueError("the run has no steps to draw: simulate(..., record=True)")
    text = json.dumps({"traceEvents": list(events(run)), "displayTimeUnit": "ns"})
    Path(path).write_text(text, encoding="utf-8")


def _arguments(timed: Timed) -> dict:
    batch, head, q_tile = timed.step.dq_tile
    return {
        "ticket": timed.ticket,
        "batch": batch,
        "head": head,
        "kv_tile": timed.step.chain.kv_tile,
        "q_tile": q_tile,
        "turn": timed.step.turn,
    }


def _span(timed: Timed, thread: int, name: str, start: float, end: float, arguments: dict) -> dict:
    return {
        "ph": "X",
        "pid": timed.sm,
        "tid": thread,
        "name": name,
        "ts": start / CYCLES_PER_MICROSECOND,
        "dur": (end - start) / CYCLES_PER_MICROSECOND,
        "args": arguments,
    }


def _name(kind: str, process: int, thread: int, name: str) -> dict:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
