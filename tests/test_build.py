"""The built module keeps the promises of the build: what it needs, and what ptxas made of it.

ptxas' words are read from the log that the build writes beside the module; the machine code is read
from the module itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dash import _C

ROOT = Path(__file__).resolve().parent.parent
MODULE = Path(_C.__file__)
LOG = MODULE.with_name(f"{MODULE.name}.ptxas.log")
MAIN_KERNEL = "attention_backward"
INSTANTIATIONS = 6  # head dimensions 64, 128, 192:128 in bf16 and fp16
MAX_REGISTERS = 65536 // 384  # at entry, of three warpgroups; setmaxnreg moves them afterwards

needs_kernels = pytest.mark.skipif(not _C.HAS_KERNELS, reason="dash._C was built without kernels")


def run(*command: str | Path) -> str:
    words = [str(word) for word in command]
    folder = str(Path(words[0]).parent)  # cuobjdump starts the nvdisasm that lies beside it
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    return subprocess.run(words, check=True, capture_output=True, text=True, env=env).stdout


def binary_tool(name: str) -> str:
    """A tool of NVIDIA's packages, else of the toolkit on the PATH."""
    for site in map(Path, sys.path):
        tool = site / "nvidia" / "cu13" / "bin" / name
        if tool.exists():
            return str(tool)
    return shutil.which(name) or pytest.skip(f"{name} is not installed")


# ---- The module as the system sees it ------------------------------------------------------------


def test_kernels_are_built_where_their_compiler_is():
    locate = [sys.executable, ROOT / "cmake" / "locate.py"]
    can_build = run(*locate, "nvcc").strip() and run(*locate, "cutlass").strip()
    assert _C.HAS_KERNELS or not can_build, "nvcc and CUTLASS are here: run make build"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_needs_no_cuda_and_no_torch_library():
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", MODULE))
    assert needed, "readelf lists at least libc"
    foreign = [name for name in needed if re.match(r"lib(cuda|torch|c10|nv)", name)]
    assert not foreign, f"dash._C must load on any machine, but needs {foreign}"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_exports_its_entry_alone():
    """Torch carries a CUDA runtime of its own: ours must not be seen, and its must not be used."""
    symbols = run("readelf", "-W", "--dyn-syms", MODULE).splitlines()
    fields = [line.split() for line in symbols if re.match(r"\s*\d+:", line)]
    exported = {f[7] for f in fields if f[4] in ("GLOBAL", "WEAK") and f[6] != "UND"}
    assert "PyInit__C" in exported
    cuda = {f[7] for f in fields if len(f) > 7 and re.match(r"_*cu(da)?[A-Z]", f[7])}
    assert not cuda, f"the CUDA runtime must stay inside: {sorted(cuda)[:5]}"


def test_imports_without_torch_and_without_a_driver():
    """Loaded by path in a process that sees no GPU; answers what needs none."""
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_C", {str(MODULE)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert "torch" not in sys.modules
print(*module.strategies(), module.tile_shape(128))
"""
    said = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("ascending")


# ---- ptxas ---------------------------------------------------------------------------------------


def compiled_kernels() -> Iterator[tuple[str, dict[str, int]]]:
    """(mangled name, what ptxas counted) of every kernel in the build's log."""
    blocks = LOG.read_text().split("Compiling entry function '")[1:]
    for block in blocks:
        stack, stores, loads = map(
            int,
            re.search(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block
            ).groups(),
        )
        registers = int(re.search(r"Used (\d+) registers", block).group(1))
        counts = {"stack": stack, "spill stores": stores, "spill loads": loads}
        yield block.split("'")[0], {"registers": registers, **counts}


@pytest.fixture(scope="module")
def main_kernels() -> dict[str, dict[str, int]]:
    assert LOG.exists(), f"the build writes {LOG.name} beside the module: run make build"
    return {name: counts for name, counts in compiled_kernels() if MAIN_KERNEL in name}


@needs_kernels
def test_every_instantiation_is_in_the_log(main_kernels):
    assert len(main_kernels) == INSTANTIATIONS, sorted(main_kernels)
    resources = run(binary_tool("cuobjdump"), "--dump-resource-usage", MODULE)
    in_module = set(re.findall(rf"Function (\S*{MAIN_KERNEL}\S*):", resources))
    assert in_module == set(main_kernels), "the log belongs to another build: run make build"


@needs_kernels
def test_no_main_kernel_spills_or_has_a_stack(main_kernels):
    for name, counts in main_kernels.items():
        memory = {key: counts[key] for key in ("stack", "spill stores", "spill loads")}
        assert not any(memory.values()), f"{name}: {memory}"


@needs_kernels
def test_registers_of_a_main_kernel_fit_three_warpgroups(main_kernels, record_property):
    for name, counts in main_kernels.items():
        record_property(name, counts["registers"])
        assert counts["registers"] <= MAX_REGISTERS, f"{name}: {counts['registers']}"


@needs_kernels
def test_ptxas_had_nothing_to_say():
    """C7507, C7508: setmaxnreg ignored. C7510 to C7518: wgmma serialised. Silent but slow."""
    remarks = re.findall(r".*(?:\(C7\d\d\d\)|warning).*", LOG.read_text())
    assert not remarks, "\n".join(remarks)


# ---- The machine code ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sass() -> dict[str, str]:
    """Mangled name → SASS of every main kernel in the module."""
    text = run(binary_tool("cuobjdump"), "--dump-sass", MODULE)
    functions = re.split(r"^\s*Function : ", text, flags=re.MULTILINE)[1:]
    return {f.split()[0]: f for f in functions if MAIN_KERNEL in f.split()[0]}


def count(opcode: str, code: str) -> int:
    return len(re.findall(rf"\b{opcode}\b", code))


@needs_kernels
def test_one_target(sass):
    images = run(binary_tool("cuobjdump"), "--list-elf", MODULE)
    assert set(re.findall(r"sm_\w+?(?=\.)", images)) == {"sm_90a"}
    assert len(sass) == INSTANTIATIONS


@needs_kernels
def test_products_run_on_the_warpgroup_tensor_cores(sass):
    for name, code in sass.items():
        assert count("HGMMA", code) > 0, f"{name} has no HGMMA"
        assert count("HMMA", code) == 0, f"{name} has products on the slower path"


@needs_kernels
def test_no_local_memory_in_the_machine_code(sass):
    for name, code in sass.items():
        local = {opcode: count(opcode, code) for opcode in ("LDL", "STL")}
        assert not any(local.values()), f"{name}: {local}"


@needs_kernels
def test_roles_trade_registers_and_the_sum_uses_bulk_adds(sass):
    for name, code in sass.items():
        assert count("USETMAXREG", code) >= 2, f"{name}: setmaxnreg is missing"
        assert count("UBLKRED", code) > 0, f"{name}: no bulk add in the ordered reduction"
