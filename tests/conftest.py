"""Markers: ``gpu`` tests are skipped, with the reason, where they cannot run."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch

from dash import _C
from dash.device import is_hopper


@functools.lru_cache(maxsize=1)
def why_no_gpu_tests() -> str | None:
    """None on a machine that can run the kernels, else a sentence."""
    if not torch.cuda.is_available():
        return "needs a Hopper GPU: torch sees no CUDA device"
    if not is_hopper(torch.cuda.current_device()):
        return f"needs a Hopper GPU: this is a {torch.cuda.get_device_name()}"
    if not _C.HAS_KERNELS:
        return "needs the kernels: dash._C was built without nvcc (python -m dash doctor)"
    return None


def pytest_report_header() -> str:
    kernels = "with" if _C.HAS_KERNELS else "without"
    device = why_no_gpu_tests() or torch.cuda.get_device_name()
    return f"dash: built {kernels} kernels; torch {torch.__version__}; gpu tests: {device}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skips by reason: a line each would bury everything else where there is no GPU."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} skipped: {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_gpu_tests()
    if reason is None:
        return
    skip = pytest.mark.skip(reason=reason)
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
