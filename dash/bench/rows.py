"""CSV rows of benchmarks, one a provider and problem, each with all that places it."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import torch

import dash
from dash.bench.measure import Meter, Window
from dash.bench.shapes import Shape

Row = dict[str, object]


def provenance(meter: Meter) -> Row:
    """Where and with what a run was made."""
    on_gpu = torch.cuda.is_available()
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if on_gpu else platform.processor() or "CPU",
        "driver": meter.driver,
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "dash": dash.__version__,
        "commit": commit(),
    }


def commit() -> str:
    """$DASH_COMMIT, for a copy of a tree; else the short hash of HEAD, + when the tree differs.

    ``unknown`` where the package is not in a checkout: ``dash`` then names its release.
    """
    if told := os.environ.get("DASH_COMMIT"):
        return told
    root = Path(dash.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return "unknown"

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(root), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def measured(windows: list[Window], flops: float, seconds: float) -> Row:
    """Medians over a provider's windows, with the fastest and the slowest."""
    ms = statistics.median(w.ms for w in windows)
    return {
        "ms": round(ms, 4),
        "tflops": round(flops / ms / 1e9, 1),
        "ms_min": round(min(w.ms for w in windows), 4),
        "ms_max": round(max(w.ms for w in windows), 4),
        "sm_mhz": round(statistics.median(w.sm_clock for w in windows), 0),
        "joules": round(statistics.median(w.joules for w in windows), 4),
        "rounds": len(windows),
        "seconds": round(seconds, 4),
    }


class RowFile:
    """A CSV file that rows are appended to; each is on disk before the next is measured."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = columns_of(path)
        self._file: TextIO = path.open("a", newline="")

    def write(self, row: Row) -> None:
        if self._columns is None:
            self._columns = list(row)
            csv.writer(self._file).writerow(self._columns)
        if missing := [name for name in row if name not in self._columns]:
            raise ValueError(f"{self._file.name} has no columns {missing}: write to another file")
        csv.DictWriter(self._file, self._columns, restval="").writerow(row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def columns_of(path: Path) -> list[str] | None:
    if not path.exists() or path.stat().st_size == 0:
        return None
    with path.open(newline="") as file:
        return next(csv.reader(file))


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def places(rows: Iterable[dict[str, str]]) -> list[str]:
    """The distinct places and versions of rows, as a sentence each."""
    found = {
        f"{r['gpu']}, driver {r['driver']}, CUDA {r['cuda']}, torch {r['torch']}, "
        f"commit {r['commit']}, {r['time'][:10]}"
        for r in rows
    }
    return sorted(found)


def head_of(shape: Shape, preset: str) -> Row:
    return {"preset": preset, **shape.columns()}
