"""compute-sanitizer finds no access out of bounds and no misused barrier."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TESTS = Path(__file__).resolve().parent
TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.skipif(shutil.which(TOOL) is None, reason="no compute-sanitizer on PATH")
@pytest.mark.parametrize("check", ["memcheck", "synccheck"])
def test_small_problems_are_clean(check: str) -> None:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [TOOL, "--tool", check, "--error-exitcode", "9", sys.executable]
    done = subprocess.run(
        [*command, str(TESTS / "sanitized_calls.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
    )
    said = done.stdout[-6000:] + done.stderr[-2000:]
    assert done.returncode == 0, said
    assert re.search(r"^[1-9]\d* calls returned", done.stdout, re.MULTILINE), said
    assert "ERROR SUMMARY: 0 errors" in done.stdout, said
