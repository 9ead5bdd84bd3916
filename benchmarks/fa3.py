"""FlashAttention-3 as a provider in a process of its own, through tools/fa3_baseline.py.

Its deterministic mode has been seen to hang, so a worker process owns the call: the benchmark asks
it for a window at its turn of the round, and gives it up when no answer comes. The worker speaks
JSON lines: a problem and seconds in, a window out.

    python -m benchmarks.fa3 path/to/fa3_baseline.py det|nondet      what the benchmark starts
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from benchmarks.measure import WARM_UP, Meter, Window
from benchmarks.shapes import Shape

HEAD_DIM = 128  # all that the wheel's FFI target was built for here
DISPATCHED_AHEAD = 8
START_SECONDS = 60  # imports, XLA's start, one compilation
ANSWER_SECONDS = 25  # one compilation


class Fa3Worker:
    """One mode of FA3. ``window`` raises ``Fa3Error`` where there is no number."""

    def __init__(self, baseline: Path, mode: str) -> None:
        self.name = f"fa3_{mode}"
        self._command = [sys.executable, "-m", "benchmarks.fa3", str(baseline), mode]
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._given_up: set[Shape] = set()

    def can_run(self, shape: Shape) -> bool:
        return shape.head_dim == HEAD_DIM and shape not in self._given_up

    def window(self, shape: Shape, seconds: float) -> Window:
        patience = 2 * seconds + (START_SECONDS if self._process is None else ANSWER_SECONDS)
        if self._process is None:
            self._start()
        try:
            self._process.stdin.write(json.dumps({**asdict(shape), "seconds": seconds}) + "\n")
            answer = json.loads(self._answer(patience))
        except (OSError, ValueError, TimeoutError) as error:
            self._given_up.add(shape)
            self.close()
            raise Fa3Error(f"gave {self.name} up at {shape}: {error}") from error
        return Window(**{k: math.nan if v is None else v for k, v in answer.items()})

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._lines = queue.Queue()
        arguments = (self._process.stdout, self._lines)
        threading.Thread(target=forward_lines, args=arguments, daemon=True).start()

    def _answer(self, seconds: float) -> str:
        """The next line that is JSON; whatever else the libraries print is skipped."""
        until = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no answer in {seconds:.0f} s") from None
            if line is None:
                raise ValueError("the worker ended")
            if line.startswith("{"):
                return line


def forward_lines(stdout: TextIO, lines: queue.Queue[str | None]) -> None:
    """A pipe's lines, then None: select() would miss what the file object has already read."""
    for line in stdout:
        lines.put(line)
    lines.put(None)


class Fa3Error(RuntimeError):
    """FA3 has no number for a problem."""


def serve(baseline: Path, mode: str) -> None:
    """The worker: measures the problems that come in, one after another."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    # With two GPUs in sight JAX leaves another device current than the one of torch's tensors.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    spec = importlib.util.spec_from_file_location("fa3_baseline", baseline)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    meter = Meter()
    shape, play = None, None
    for line in sys.stdin:
        request = json.loads(line)
        seconds = request.pop("seconds")
        if Shape(**request) != shape:
            shape = Shape(**request)
            play = compiled_backward(module, shape, deterministic=mode == "det")
        window = asdict(window_of(play, seconds, meter))
        print(json.dumps({k: None if math.isnan(v) else v for k, v in window.items()}), flush=True)


def compiled_backward(module: object, shape: Shape, *, deterministic: bool) -> object:
    """FA3's backward of this problem without arguments; returns what is still being computed."""
    import functools

    import jax
    import jax.numpy as jnp
    import torch

    from benchmarks.providers import make_tensors

    t = make_tensors(shape)
    torch.cuda.synchronize()
    arrays = [jnp.from_dlpack(x) for x in (t.dout, t.q, t.k, t.v, t.out, t.lse)]
    backward = functools.partial(
        module.fa3_backward, causal=shape.causal, deterministic=deterministic
    )
    program = jax.jit(backward).lower(*arrays).compile()
    for x, wanted in zip(program(*arrays), t.gradients, strict=True):
        difference = (torch.from_dlpack(x).float() - wanted.float()).norm()
        if not difference / wanted.float().norm() < 0.02:
            raise ValueError("FA3's gradients differ from FA2's")
    return lambda: program(*arrays)


def window_of(play: object, seconds: float, meter: Meter) -> Window:
    """Like ``measure.sustained_window``, by the host's clock: XLA has a stream of its own.

    Batches of calls are dispatched one ahead of the device, so dispatch is hidden.
    """
    import jax

    def batch() -> object:
        for _ in range(DISPATCHED_AHEAD):
            grads = play()
        return grads

    warm_up = time.perf_counter() + seconds * WARM_UP
    jax.block_until_ready(batch())
    while time.perf_counter() < warm_up:
        jax.block_until_ready(batch())
    energy, start, batches, clock = meter.joules(), time.perf_counter(), 0, math.nan
    waiting = None
    while time.perf_counter() < start + seconds:
        dispatched = batch()
        batches += 1
        if waiting is not None:
            jax.block_until_ready(waiting)
            clock = meter.sm_clock()
        waiting = dispatched
    jax.block_until_ready(waiting)
    elapsed, energy = time.perf_counter() - start, meter.joules() - energy
    calls = batches * DISPATCHED_AHEAD
    return Window(elapsed * 1e3 / calls, clock, energy / calls)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
