"""The turn lock keeps order: folds that do not commute, played by many CTAs.

turn_lock_kernel.cu says what is played. Built without the waits the same program must find a wrong
answer, or it could not see a broken lock.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from device_programs import compile_cuda

pytestmark = pytest.mark.gpu

SECONDS = 60  # a lost turn: the watchdog traps after 4


def play(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program)], capture_output=True, text=True, check=False, timeout=SECONDS
    )


def test_turns_keep_their_order(tmp_path: Path) -> None:
    program = compile_cuda("turn_lock_kernel.cu", tmp_path / "turn_lock", "-DDASH_WATCHDOG")
    done = play(program)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("0 values differ, 0 locks") == 8


def test_without_waiting_the_answer_is_wrong(tmp_path: Path) -> None:
    program = compile_cuda("turn_lock_kernel.cu", tmp_path / "no_lock", "-DDASH_SKIP_TURNS")
    done = play(program)
    assert done.returncode == 1, done.stdout
    lines = done.stdout.splitlines()
    for kind in ("fold", "bulk"):
        wrong = [line for line in lines if line.startswith(kind) and ": 0 values" not in line]
        assert wrong, f"{kind} came out right without a lock: {done.stdout}"
