"""A provider in a process of its own: FlashAttention-3, whose deterministic mode was seen to hang.

The process owns the calls: the benchmark asks it for a window at its turn of the round, and gives a
problem up when no answer comes. It speaks JSON lines: a problem or seconds in, facts or a window
out.

    python -m dash.bench.worker fa3_det|fa3_nondet      what the benchmark starts
"""

from __future__ import annotations

import importlib.util
import json
import math
import queue
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import TextIO

from dash.bench import fa3_jax
from dash.bench.flash_interface import FA3_MODULE, find_module, interface_calls
from dash.bench.inputs import Tensors, make_tensors
from dash.bench.measure import Meter, Window
from dash.bench.providers import CallProvider, Prepared, Provider, Unavailable
from dash.bench.shapes import Shape, from_columns

START_SECONDS = 60  # imports, XLA's start, one compilation
ANSWER_SECONDS = 25  # one compilation
HANGS_ENOUGH = 2  # then the provider is given up

MODES = {"fa3_det": True, "fa3_nondet": False}


class WorkerProvider:
    """FA3 in one mode, wherever it is installed from."""

    def __init__(self, name: str) -> None:
        self.name, self.deterministic = name, MODES[name]
        self._command = [sys.executable, "-m", "dash.bench.worker", name]
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._shape: Shape | None = None
        self._hangs = 0

    def prepare(self, shape: Shape, tensors: Tensors) -> Prepared:
        if (reason := self.why_absent(shape)) is not None:
            raise Unavailable(reason)
        self._shape = None
        version = self._prepared(shape)

        def window(seconds: float) -> Window:
            if self._shape is None:
                raise Unavailable(f"{self.name} was given up")
            answer = self._ask({"seconds": seconds}, 2 * seconds + ANSWER_SECONDS)
            return Window(**{k: math.nan if v is None else v for k, v in answer.items()})

        return Prepared(window, version=version)

    def why_absent(self, shape: Shape) -> str | None:
        """Without starting a process: why there is no number for this problem."""
        if self._hangs >= HANGS_ENOUGH:
            return f"given up after {self._hangs} problems without an answer"
        if importlib.util.find_spec(FA3_MODULE) is not None:
            return None
        if (reason := fa3_jax.missing()) is not None:
            return f"no module {FA3_MODULE}; flash-attn3-jax: {reason}"
        return fa3_jax.cannot_run(shape)

    def _prepared(self, shape: Shape) -> str:
        patience = START_SECONDS if self._process is None else ANSWER_SECONDS
        if self._process is None:
            self._start()
        answer = self._ask({"shape": shape.columns()}, patience)
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        self._shape = shape
        return answer["version"]

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

    def _ask(self, request: dict[str, object], patience: float) -> dict[str, object]:
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            return json.loads(self._answer(patience))
        except (OSError, ValueError, TimeoutError) as error:
            self._hangs += isinstance(error, TimeoutError)
            self._shape = None
            self.close()
            raise Unavailable(f"gave {self.name} up: {error}") from error

    def _answer(self, seconds: float) -> str:
        """The next line that is JSON; whatever else the libraries print is skipped."""
        until = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no answer in {seconds:.0f} s") from None
            if line is None:
                raise ValueError("its process ended")
            if line.startswith("{"):
                return line


def forward_lines(stdout: TextIO, lines: queue.Queue[str | None]) -> None:
    """A pipe's lines, then None: select() would miss what the file object has already read."""
    for line in stdout:
        lines.put(line)
    lines.put(None)


def fa3_here(name: str) -> Provider:
    """FA3 for this process to call: the package that clusters have, else the wheel for JAX."""
    meter, deterministic = Meter(), MODES[name]
    try:
        find_module(FA3_MODULE)
    except Unavailable:
        return fa3_jax.JaxFa3(name, deterministic, meter)
    return CallProvider(name, deterministic, interface_calls(FA3_MODULE, deterministic), meter)


def serve(provider: Provider) -> None:
    """The worker: answers the requests that come in, one after another."""
    prepared = None
    for line in sys.stdin:
        request = json.loads(line)
        if "shape" in request:
            prepared = None  # frees the last problem's memory
            shape = from_columns({k: str(v) for k, v in request["shape"].items()})
            try:
                prepared = provider.prepare(shape, make_tensors(shape))
                answer = {"version": prepared.version}
            except (Unavailable, ImportError, RuntimeError, ValueError, TypeError) as reason:
                answer = {"unavailable": f"{type(reason).__name__}: {reason}".splitlines()[0]}
        else:
            window = asdict(prepared.window(request["seconds"]))
            answer = {k: None if math.isnan(v) else v for k, v in window.items()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(fa3_here(sys.argv[1]))
