"""``python -m dash verify``: each condition finds a difference; its report says what was done."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import dash
from dash.cli import app, conditions, fresh
from dash.cli.conditions import Subject
from dash.cli.problem import Shape, make_inputs
from dash.device import default_device

SMALL = Shape(2, 70, 150, 4, 2, 64, torch.bfloat16, causal=True)
SIZES = ("--batch=2", "--seqlen=70", "--seqlen-k=150", "--heads=4", "--kv-heads=2", "--causal")
without_gpu = pytest.mark.skipif(default_device().type == "cuda", reason="this machine has a GPU")


def verify(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", *SIZES, *words])
    return result.exit_code, result.output


def plan(strategy: str = "auto") -> dash.Plan:
    return dash.plan(SMALL.q, SMALL.kv, SMALL.dtype, causal=True, strategy=strategy, device="cpu")


@without_gpu
def test_every_strategy_that_can_run_passes() -> None:
    code, text = verify("--repeats=1", "--processes=0", "--packings=1", "--strategy=all")
    assert code == 0, text
    assert len(plan().alternatives) > 1
    for one in (plan(), *map(plan, plan().alternatives)):
        assert f"{one.strategy}, fingerprint {one.fingerprint}" in text
    assert text.count("1 of 1") >= 1 + len(plan().alternatives)


@without_gpu
def test_the_report_of_another_run_is_equal(tmp_path) -> None:
    reports = []
    for name in ("a.json", "b.json"):
        words = ("--repeats=1", "--processes=1", "--packings=2", f"--json={tmp_path / name}")
        code, text = verify(*words)
        assert code == 0, text
        reports.append(json.loads((tmp_path / name).read_text()))
    assert reports[0] == reports[1]
    report = reports[0]
    assert report["passed"] is True
    assert report.keys() >= {"problem", "inputs", "forward", "dash", "torch", "device", "seed"}
    (one,) = report["plans"]
    assert (one["strategy"], one["fingerprint"]) == (plan().strategy, plan().fingerprint)
    calls = {c["name"]: (c["calls"], c["different"], c["skipped"]) for c in one["conditions"]}
    assert calls == {
        "repeats, memory poisoned": (1, 0, None),
        "beside work on another stream": (0, 0, "the CPU has no streams"),
        "fresh processes": (1, 0, None),
        "packings": (2, 0, None),
    }
    assert [verdict["name"] for verdict in one["accuracy"]] == ["dq", "dk", "dv"]


@without_gpu
def test_a_difference_ends_with_exit_code_1_and_stands_in_the_report(tmp_path, monkeypatch) -> None:
    plain = conditions.repeats
    monkeypatch.setattr(conditions, "repeats", lambda *args: replace(plain(*args), different=1))
    path = tmp_path / "report.json"
    code, text = verify("--repeats=2", "--processes=0", "--packings=0", f"--json={path}")
    assert code == 1
    assert "1 of 2" in text
    report = json.loads(path.read_text())
    assert report["passed"] is report["plans"][0]["passed"] is False


def test_json_to_stdout_is_json_alone() -> None:
    result = CliRunner().invoke(
        app, ["verify", *SIZES, "--repeats=1", "--processes=0", "--packings=0", "--json=-"]
    )
    assert json.loads(result.stdout)["passed"] is True


# ---- Each condition must be able to say no -------------------------------------------------------


def subject(changed: bool) -> Subject:
    """A subject on the CPU; ``changed``: one bit of what others are compared with."""
    inputs = make_inputs(SMALL, seed=0, device=torch.device("cpu"))
    order = plan().strategy, plan().group_split
    first = tuple(grad.clone() for grad in inputs.backward(*order))
    if changed:
        first[2].view(torch.int16)[1, 7, 1, 3] ^= 1
    return Subject(inputs, *order, plan().workspace_bytes, first)


def test_repeats_and_packings_and_processes_see_one_bit() -> None:
    """That they find none where there is none, the reports above show."""
    given = subject(changed=True)
    results = [
        conditions.repeats(given, 1, iter),
        conditions.packings(given, 1, iter, seed=3),
        conditions.fresh_processes(given, 1, iter),
    ]
    assert [r.different for r in results] == [1, 1, 1]
    assert all(r.skipped is None for r in results)


def test_packings_says_why_a_strategy_is_left_out() -> None:
    shape = replace(SMALL, seqlen_k=70)
    inputs = make_inputs(shape, seed=0, device=torch.device("cpu"))
    grads = inputs.backward("symmetric_shift")
    result = conditions.packings(Subject(inputs, "symmetric_shift", 1, 0, grads), 2, iter, seed=0)
    assert result.calls == 0
    assert "symmetric_shift" in result.skipped


def test_a_fresh_process_computes_by_itself(tmp_path, capsys) -> None:
    """Its digest follows the inputs in the file."""
    inputs = subject(False).inputs
    printed = []
    for dout in (inputs.dout, inputs.dout * 2):
        tensors = inputs.tensors() | {"dout": dout}
        torch.save({"tensors": tensors, "mask": inputs.mask}, tmp_path / "inputs.pt")
        fresh.main(str(tmp_path / "inputs.pt"), "ascending", "1", "cpu")
        printed.append(capsys.readouterr().out)
    assert printed[0] != printed[1]


@pytest.mark.gpu
def test_verify_on_the_gpu_runs_every_condition() -> None:
    code, text = verify("--repeats=20", "--processes=1", "--packings=2")
    assert code == 0, text
    assert "left out" not in text
    assert text.count("20 of 20") == 2
