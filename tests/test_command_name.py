"""The console script `dash-attention`: its name, its completion, and what it says without typer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from dash.cli.driver import driver_cuda, fit

ROOT = Path(__file__).parent.parent


def start(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    """Starts what pip writes for ``[project.scripts]``."""
    script = tmp_path / "dash-attention"
    script.write_text("import sys\nfrom dash.__main__ import main\nsys.exit(main())\n")
    # Not where the script lies: there Python would find the package by the folder's name.
    search = os.pathsep.join([str(ROOT), environment.pop("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": search, **environment}
    command = [sys.executable, str(script), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_the_project_names_the_script() -> None:
    assert 'dash-attention = "dash.__main__:main"' in (ROOT / "pyproject.toml").read_text()


def test_it_calls_itself_by_its_name(tmp_path: Path) -> None:
    said = start(tmp_path, "--help")
    assert said.returncode == 0
    assert "Usage: dash-attention" in said.stdout
    assert "--install-completion" in said.stdout
    module = subprocess.run(
        [sys.executable, "-m", "dash", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert "Usage: python -m dash" in module.stdout


@pytest.mark.parametrize(("begun", "wanted"), [("be", "bench"), ("doc", "doctor")])
def test_the_shell_completes_commands(tmp_path: Path, begun: str, wanted: str) -> None:
    said = start(
        tmp_path,
        _DASH_ATTENTION_COMPLETE="complete_bash",
        COMP_WORDS=f"dash-attention {begun}",
        COMP_CWORD="1",
    )
    assert said.stdout.split() == [wanted]


def test_the_shell_completes_presets(tmp_path: Path) -> None:
    said = start(
        tmp_path,
        _DASH_ATTENTION_COMPLETE="complete_bash",
        COMP_WORDS="dash-attention bench --preset lla",
        COMP_CWORD="3",
    )
    assert said.stdout.split() == ["llama3-8b", "llada-1b"]


def test_without_typer_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "hides").mkdir()
    (tmp_path / "hides" / "typer.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')\n"
    )
    search = str(tmp_path / "hides")
    script = "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = 'dash-attention'\n"
    script += "from dash.__main__ import main; main()"
    said = subprocess.run(
        [sys.executable, "-c", script, search], capture_output=True, text=True, cwd=ROOT
    )
    assert said.returncode == 1
    assert said.stderr == "dash-attention needs typer: pip install 'dash-attention[cli]'\n"


def test_doctor_starts_where_the_module_does_not_load() -> None:
    """Not only `import dash`: the whole command line, as a user of a broken wheel types it."""
    script = "import sys; sys.modules['dash._C'] = None; sys.argv = ['dash-attention', 'doctor']\n"
    script += "from dash.__main__ import main; main()"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert said.returncode == 1
    assert "dash cannot run" in said.stdout
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize(
    ("built", "driver", "good"),
    [("13.0", (13, 0), True), ("12.8", (13, 1), True), ("12.8", (12, 4), True),
     ("13.0", (12, 8), False)],
)  # fmt: skip
def test_driver_and_build_fit_within_a_major(built: str, driver: tuple[int, int], good) -> None:
    found = fit(built, driver)
    assert found.good is good
    if not good:
        assert "install dash-attention==0.1.0+cu12, or a driver from 580 on" in found.text


def test_no_driver_is_no_error() -> None:
    assert driver_cuda() is None or driver_cuda() >= (11, 0)


def test_doctor_refuses_an_old_driver(monkeypatch) -> None:
    from typer.testing import CliRunner

    from dash.cli import app

    doctor = sys.modules["dash.cli.doctor"]

    class Built:
        __file__ = "_C.so"
        HAS_KERNELS = True
        CUDA_VERSION = "13.0"

        @staticmethod
        def strategies() -> list[str]:
            return ["spt"]

    monkeypatch.setattr(doctor, "extension", Built)
    monkeypatch.setattr(doctor, "driver_cuda", lambda: (12, 8))
    said = CliRunner().invoke(app, ["doctor"])
    assert said.exit_code == 1
    assert "do not fit the driver" in said.output
