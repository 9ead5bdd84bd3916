"""Build dash._C into dash/ for the Python that runs this: `python cmake/build.py`.

Environment: MAX_JOBS (default 2), DASH_KERNELS (AUTO, ON, OFF), DASH_WATCHDOG, DASH_SKIP_TURNS,
DASH_CUTLASS_DIR, DASH_KERNEL_ARCHIVE (kernels of another build, as cmake/wheels.py passes them). A
second run compiles only what changed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = {
    "DASH_KERNELS": "AUTO",
    "DASH_WATCHDOG": "OFF",
    "DASH_SKIP_TURNS": "OFF",
    "DASH_KERNEL_ARCHIVE": "",
}


def find_tool(name: str) -> str:
    """A program beside this Python (a virtual environment need not be active), else on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise SystemExit(f"dash: {name} is needed to build and was not found: pip install {name}")
    return found


def build_folder() -> Path:
    return ROOT / "build" / sys.implementation.cache_tag


def build_in_place(target: str = "all") -> None:
    """Configure and build; the module and what ptxas said of it end up in dash/."""
    jobs = max(1, int(os.environ.get("MAX_JOBS") or 2))
    folder = build_folder()
    configure = [
        *(find_tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DDASH_CUDA_JOBS={min(jobs, 2)}",
        *(f"-D{name}={os.environ.get(name) or value}" for name, value in OPTIONS.items()),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "configure.log").open("w") as log:
        status = subprocess.run(configure, stdout=log, stderr=subprocess.STDOUT, check=False)
    said = (folder / "configure.log").read_text()
    if status.returncode:
        raise SystemExit(f"{said}\ndash: CMake could not configure the build")
    print(*(line for line in said.splitlines() if line.startswith("-- dash:")), sep="\n")
    compile_it = [find_tool("cmake"), "--build", str(folder), "--parallel", str(jobs)]
    if subprocess.run([*compile_it, "--target", target], check=False).returncode:
        raise SystemExit("dash: the build failed; the compiler's words are above")


if __name__ == "__main__":
    build_in_place()
