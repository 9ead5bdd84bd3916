"""What dash.schedule shows: slack, traces, charts, tables and the command."""

import json

import pytest

from dash import _C
from dash.schedule import H200, Play, simulate, slack, square


def problem_of(n, q, heads, causal, **rest):
    return square(n, q, heads=heads, causal=causal, **rest)


# ---- slack, drawings, traces --------------------------------------------------------------


def test_slack_of_shift_is_its_spacing_and_of_ascending_is_none():
    assert slack(Play.of("shift", problem_of(8, 2, 1, False)), 8).least == 2
    assert slack(Play.of("shift", problem_of(8, 4, 1, False)), 8).least == 4
    grouped = slack(Play.of("shift", problem_of(8, 2, 8, False, kv_heads=2)), 8)
    assert grouped.least == 8, "a row is as many steps as the group has heads"
    assert slack(Play.of("ascending", problem_of(8, 2, 1, False)), 8).tight == 1.0


def test_trace_and_gantt_are_written(tmp_path):
    from dash.schedule import trace

    run = simulate(Play.of("spt", problem_of(4, 2, 2, True)), H200.with_(sms=4), record=True)
    assert len(run.steps) == run.play.num_steps
    trace.write(run, tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    computes = [e for e in events if e["ph"] == "X" and e["name"].startswith("KV")]
    assert len(computes) == run.play.num_steps
    assert {e["pid"] for e in computes} == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="record=True"):
        trace.write(simulate(run.play, run.machine), tmp_path / "none.json")

    pytest.importorskip("matplotlib")
    from dash.schedule import gantt

    gantt.write(run, tmp_path / "run.svg")
    assert (tmp_path / "run.svg").read_text().lstrip().startswith("<?xml")


def test_table_lists_every_strategy():
    pytest.importorskip("rich")
    from dash.schedule import table

    lines = table.compare(problem_of(4, 2, 4, True), H200.with_(sms=4))
    assert [line.strategy for line in lines] == list(_C.strategies())
    assert {line.strategy for line in lines if line.refusal} == {"shift"}
    assert all(line.over_ideal >= 1 for line in lines if not line.refusal)
    assert table.render(problem_of(4, 2, 4, True), H200, lines).row_count == len(lines)


def test_command_compares_draws_and_refuses(tmp_path):
    typer = pytest.importorskip("typer")
    testing = pytest.importorskip("typer.testing")
    from dash.cli.schedule import schedule

    app = typer.Typer()
    app.command()(schedule)

    def call(*arguments):
        small = ("--kv-tiles", "4", "--heads", "4", "--sms", "8")
        return testing.CliRunner().invoke(app, [*small, *arguments], env={"COLUMNS": "120"})

    compared = call("--mask", "full")
    assert compared.exit_code == 0
    assert all(name in compared.output for name in _C.strategies())
    path = tmp_path / "zigzag.json"
    traced = call("--strategy", "zigzag", "--format", "trace", "--out", str(path))
    assert traced.exit_code == 0
    assert "traceEvents" in json.loads(path.read_text())
    refused = call("--strategy", "shift", "--format", "trace")
    assert refused.exit_code == 2
    assert "full mask" in refused.output
