"""Programs that load FlashAttention through the ``kernels`` package get dash, unchanged."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="pip install 'dash-attention[integration]'")
pytest.importorskip("kernels", reason="pip install 'dash-attention[integration]'")

from transformers.utils import is_kernels_available

import dash
from dash.compat import kernels

TESTS = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """With LOCAL_KERNELS as the command line prints it, and no hub to fall back to."""
    folder = tmp_path_factory.mktemp("kernel")
    command = [sys.executable, "-m", "dash", "kernels", str(folder)]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    name, value = done.stdout.strip().split("=", 1)
    assert name == "LOCAL_KERNELS"
    paths = (str(TESTS.parent), os.environ.get("PYTHONPATH"))
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return os.environ | paths | {name: value, "HF_HUB_OFFLINE": "1"}


def run(environment: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.skipif(
    not is_kernels_available(), reason="transformers does not take this release of kernels"
)
def test_trl_trains_packed_sequences_unmodified(environment, tmp_path) -> None:
    """The same losses and weights as ``attn_implementation="dash"``, which test_transformers
    checks against eager, and other ones than with each row's documents not kept apart."""
    script = str(TESTS / "train_with_trl.py")
    through = json.loads(run(environment, script, "flash_attention_3", str(tmp_path / "a")))
    register = "import dash.compat.transformers as t, runpy, sys; t.register(); "
    direct = json.loads(
        run(
            environment, "-c", register + "sys.argv = sys.argv[1:]; "
            "runpy.run_path(sys.argv[0], run_name='__main__')",
            script, "dash", str(tmp_path / "b"),
        )
    )  # fmt: skip
    assert through == direct
    assert len(through["losses"]) == 2
    assert all(0 < loss < 10 for loss in through["losses"])


def test_the_kernels_package_loads_the_folder(environment) -> None:
    code = (
        "import kernels; "
        f"m = kernels.get_kernel('{kernels.REPOSITORIES[0]}', version=1); "
        "print(m.flash_attn_varlen_func.__module__)"
    )
    assert run(environment, "-c", code) == "dash.compat.kernels"


def test_transformers_leaves_out_nothing_that_it_was_given() -> None:
    """It passes what the signatures name: sinks, or dropout that must raise, may not be missing."""
    for function in (kernels.flash_attn_func, kernels.flash_attn_varlen_func):
        names = inspect.signature(function).parameters.keys()
        assert names >= {"s_aux", "dropout_p", "softcap", "window_size", "deterministic"}
        tensors = [torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)] * 3
        if function is kernels.flash_attn_varlen_func:
            bounds = torch.tensor([0, 8], dtype=torch.int32)
            tensors = [t[0] for t in tensors] + [bounds, bounds]
        with pytest.raises(dash.UnsupportedError, match=r"dropout_p is 0\.1; required: 0\.0"):
            function(*tensors, dropout_p=0.1)
        with pytest.raises(dash.UnsupportedError, match=r"softcap is 30\.0; required: 0\.0"):
            function(*tensors, softcap=30.0)
