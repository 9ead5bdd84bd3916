"""How the code is laid out: sizes, include directions, names, one source list."""

from __future__ import annotations

import ast
import operator
import re
import subprocess
from pathlib import Path

import pytest
import torch

import dash  # noqa: F401  registers torch.ops.dash

ROOT = Path(__file__).resolve().parent.parent
CXX = {".h", ".cuh", ".cpp", ".cu"}
TEXT = CXX | {".py", ".sh", ".cmake", ".toml"}
COLUMNS = 100
LINES = 350  # most files have fewer than 250

# A folder of csrc and the folders that its files may include from.
MAY_INCLUDE = {
    "csrc/schedule": {"csrc/schedule"},
    "csrc/sm90": {"csrc/sm90"},
    "csrc/bwd": {"csrc/bwd", "csrc/sm90", "csrc/schedule"},
    "csrc/bwd/instantiations": {"csrc/bwd"},
    "csrc/bindings": {"csrc/bindings", "csrc/bwd", "csrc/schedule"},
}


def project_files(suffixes: set[str], *folders: str) -> list[Path]:
    """Files that git has or would take, below the folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    try:
        said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        listed = said.stdout.split()
    except (OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        listed = [p.relative_to(ROOT) for f in folders for p in (ROOT / f).rglob("*")]
    return sorted(p for p in map(ROOT.joinpath, listed) if p.suffix in suffixes and p.is_file())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def each_file(suffixes: set[str], *folders: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", project_files(suffixes, *folders), ids=name_of)


@each_file(CXX | {".py"}, "csrc", "dash", "tests", "benchmarks", "cmake", "examples")
def test_files_are_small_enough_to_read(path):
    lines = len(path.read_text().splitlines())
    assert lines <= LINES, f"{name_of(path)} has {lines} lines: split it by responsibility"


@each_file(TEXT, "csrc", "dash", "tests", "benchmarks", "cmake", "examples")
def test_lines_fit_a_hundred_columns(path):
    lines = enumerate(path.read_text().splitlines(), start=1)
    table_row = re.compile(r"\s*//\s*\|")
    long = [str(n) for n, line in lines if len(line) > COLUMNS and not table_row.match(line)]
    assert not long, f"{name_of(path)} has lines over {COLUMNS} columns: {', '.join(long)}"


@each_file(CXX, "csrc")
def test_no_file_includes_torch_and_one_folder_knows_python(path):
    included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.MULTILINE)
    torch = [i for i in included if re.match(r"(torch|ATen|c10|caffe2)/", i)]
    assert not torch, f"{name_of(path)} includes {torch}: dash._C has no Torch ABI"
    if name_of(path.parent) != "csrc/bindings":
        python = [i for i in included if re.match(r"(pybind11/|Python\.h)", i)]
        assert not python, f"{name_of(path)} includes {python}: only csrc/bindings knows Python"


@each_file(CXX, "csrc")
def test_include_direction(path):
    folder = name_of(path.parent)
    included = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE)
    for target in included:
        resolved = (path.parent / target).resolve()
        assert resolved.is_file(), f'{name_of(path)}: "{target}" does not exist'
        assert name_of(resolved.parent) in MAY_INCLUDE[folder], (
            f"{name_of(path)} includes {name_of(resolved)}: {folder} may include from "
            f"{sorted(MAY_INCLUDE[folder])}"
        )


@each_file({".h", ".cuh"}, "csrc")
def test_headers_are_guarded(path):
    assert "#pragma once" in path.read_text()


@each_file({".h", ".cuh", ".cu"}, "csrc/bwd", "csrc/schedule")
def test_only_a_kernel_reads_its_thread_and_block(path):
    """Roles get their place as an argument, so that who runs them is decided in one file."""
    text = path.read_text()
    lane = r"threadIdx\.x % (kWarp|32)\b"  # means the same whoever asks
    launch = r"\bconfig\.(gridDim|blockDim)\b"  # the host's
    if "__global__" not in text:
        rest = re.sub(f"{lane}|{launch}", "", text)
        assert not re.search(r"\b(threadIdx|blockIdx|blockDim|gridDim)\b", rest)


@each_file(CXX | {".py"}, "csrc", "dash", "tests", "benchmarks", "cmake", "examples")
def test_names_say_what_a_file_is(path):
    words = set(re.split(r"[_\W]+", path.stem.lower()))
    assert not words & {"utils", "util", "helper", "helpers", "impl", "fast", "v2", "misc"}


def test_one_list_names_every_source():
    lines = (ROOT / "sources.txt").read_text().splitlines()
    listed = {line for line in lines if line and not line.startswith("#")}
    assert listed == {name_of(path) for path in project_files({".cpp", ".cu"}, "csrc")}


@each_file({".py"}, "dash", "benchmarks")
def test_names_of_torch_exist(path):
    """Code that only a GPU runs is spelled right, too."""
    unknown = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and (name := dotted(node)).startswith("torch."):
            if torch.version.cuda is None and name.startswith("torch._C._cuda"):
                continue  # a torch built for the CPU has none of them
            try:
                operator.attrgetter(name.removeprefix("torch."))(torch)
            except AttributeError:
                unknown.append(f"line {node.lineno}: {name}")
    assert not unknown


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute of a name; ``?`` in the place of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"
