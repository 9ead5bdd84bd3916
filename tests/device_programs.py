"""Compiles the tests' own CUDA sources with nvcc, on the machine that runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent / "csrc"
TARGET = ("-gencode", "arch=compute_90a,code=sm_90a")


def find_nvcc() -> str:
    """$NVCC, nvcc on PATH or in the usual place; skips the test where there is none."""
    for candidate in (os.environ.get("NVCC"), "nvcc", "/usr/local/cuda/bin/nvcc"):
        found = candidate and shutil.which(candidate)
        if found:
            return found
    pytest.skip("no nvcc: set NVCC or put it on PATH")


def compile_cuda(source: str, output: Path, *flags: str) -> Path:
    """Compiles a file of this folder; fails the test with nvcc's words where it cannot."""
    command = [find_nvcc(), "-O3", "-std=c++20", *TARGET, f"-I{CSRC}", *flags]
    command += ["-o", str(output), str(TESTS / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return output
