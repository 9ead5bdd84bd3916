"""What the wheels' command chooses; the wheels themselves are built and tested by `make wheels`."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheels():
    sys.path.insert(0, str(ROOT / "cmake"))
    try:
        spec = importlib.util.spec_from_file_location("wheels", ROOT / "cmake" / "wheels.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(ROOT / "cmake"))


def test_pythons_are_those_that_the_project_supports(wheels) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={wheels.PYTHONS[0]}"' in text
    assert f'dependencies = ["{wheels.TORCH["oldest"][-1]}"]' in text


def test_an_interpreter_is_found_by_version_or_path(wheels) -> None:
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert wheels.version_of(sys.executable) == here
    assert wheels.find_python(sys.executable) == Path(sys.executable)
    found = wheels.find_python(here)
    assert found is None or wheels.version_of(found) == here
    assert wheels.find_python("3.99") is None
    assert wheels.version_of("/no/such/python") is None


def test_which_environments_are_tested(wheels) -> None:
    versions = ["3.10", "3.12", "3.14"]
    assert wheels.tests_asked("ends", versions) == [("3.10", "oldest"), ("3.14", "newest")]
    assert len(wheels.tests_asked("all", versions)) == 6
    assert wheels.tests_asked("none", versions) == []


def test_contents_of_a_wheel_are_judged(wheels, tmp_path: Path) -> None:
    """A module of another Python, a library that was pulled in: neither may be in it."""

    def wheel(*names: str) -> Path:
        path = tmp_path / "dash_attention-0.1.0+cu13-cp312-cp312-manylinux_2_34_x86_64.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, "")
        return path

    good = ("dash/__init__.py", "dash/_C.cpython-312-x86_64-linux-gnu.so")
    wheels.check_contents(wheel(*good), "3.12")
    for bad in (
        (*good, "dash/_C.cpython-310-x86_64-linux-gnu.so.ptxas.log"),
        (*good, "dash_attention.libs/libcudart.so.13"),
        good[:1],
    ):
        with pytest.raises(SystemExit, match=r"dash: dash_attention-0\.1\.0"):
            wheels.check_contents(wheel(*bad), "3.12")


def test_the_version_tells_the_cuda_major(monkeypatch) -> None:
    import subprocess

    import dash

    words = [sys.executable, "setup.py", "--version"]
    for tag in ("", "+cu12", "+cu13"):
        monkeypatch.setenv("DASH_CUDA_TAG", tag)
        said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        assert said.stdout.split()[-1] == dash.__version__ + tag
