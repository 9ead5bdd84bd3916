"""Print the packages that building dash needs and this machine lacks, one requirement a line.

    pip install --no-deps $(python cmake/requirements.py)
    pip install --no-deps $(python cmake/requirements.py formatters)    # for make lint

Every package is named, so `--no-deps` is safe: nvidia-cutlass is wanted for its headers alone.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import locate

TOOLS = ["setuptools>=77", "wheel", "pybind11>=2.13", "cmake>=3.25", "ninja"]
CUTLASS = ["nvidia-cutlass==4.2.0.0"]
# One release of all parts: spills are build errors, so the compiler is part of what is tested.
# nvcc itself comes as a wheel for CUDA 13 only; the wheel for CUDA 12 holds ptxas and no nvcc.
COMPILER = [
    f"{name}==13.0.*"
    for name in (
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-nvvm",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
    )
]


def driver_cuda_major() -> int | None:
    """The newest CUDA major that the installed driver runs; None without a driver."""
    if not shutil.which("nvidia-smi"):
        return None
    said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"CUDA (?:UMD )?Version:\s*(\d+)\.", said)
    return int(version.group(1)) if version else None


def missing_for_kernels() -> list[str]:
    """What the CUDA part needs and no installed toolkit or checkout provides."""
    needed = [] if locate.cutlass() else list(CUTLASS)
    if locate.nvcc():
        return needed
    major = driver_cuda_major()
    if major is not None and major < locate.CUDA_MAJOR:
        print(
            f"dash: no nvcc found, the driver here runs CUDA {major}, and nvcc is published as a "
            f"package for CUDA {locate.CUDA_MAJOR} only. Install a CUDA {major} toolkit (12.5 or "
            "newer) to build the kernels; the host part is built without them.",
            file=sys.stderr,
        )
        return []
    return needed + COMPILER


def formatters() -> list[str]:
    """The releases that .pre-commit-config.yaml pins: others lay the code out differently."""
    config = Path(__file__).resolve().parent.parent / ".pre-commit-config.yaml"
    return sorted(set(re.findall(r'additional_dependencies: \["([^"]+)"\]', config.read_text())))


if __name__ == "__main__":
    groups = {"tools": lambda: TOOLS, "kernels": missing_for_kernels, "formatters": formatters}
    for group in sys.argv[1:] or ("tools", "kernels"):
        print(*groups[group](), sep="\n")
