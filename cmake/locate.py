"""Print where a thing that the build needs lies, as the given Python sees it; nothing if it is absent.

    python cmake/locate.py pybind11|cutlass|nvcc

Standard library only: it runs before anything is installed. The order of places is the documented one.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA_MAJOR = 13  # the major whose compiler NVIDIA ships as wheels, nvcc included


def package_folder(name: str) -> Path | None:
    """The folder of an importable package, without importing it."""
    spec = importlib.util.find_spec(name)
    locations = list(spec.submodule_search_locations or []) if spec else []
    return Path(locations[0]) if locations else None


def pybind11() -> Path | None:
    """The folder that holds pybind11/pybind11.h."""
    package = package_folder("pybind11")
    return package / "include" if package else None


def cutlass() -> Path | None:
    """The folder that holds cute/tensor.hpp: $DASH_CUTLASS_DIR, third_party/cutlass, the wheel."""
    chosen = os.environ.get("DASH_CUTLASS_DIR")
    wheel = package_folder("cutlass_library")
    places = [Path(chosen)] if chosen else [ROOT / "third_party" / "cutlass"]
    if wheel and not chosen:
        places.append(wheel / "source")
    for place in places:
        for include in (place / "include", place):
            if (include / "cute" / "tensor.hpp").is_file():
                return include
    return None


def nvcc() -> Path | None:
    """$CUDACXX, $CUDA_HOME, $CUDA_PATH, the PATH, /usr/local/cuda, then the compiler wheels."""
    places = []
    if chosen := os.environ.get("CUDACXX"):
        places.append(Path(chosen))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            places.append(Path(home) / "bin" / "nvcc")
    if on_path := shutil.which("nvcc"):
        places.append(Path(on_path))
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    if wheels := package_folder("nvidia"):
        places.append(wheels / f"cu{CUDA_MAJOR}" / "bin" / "nvcc")
    return next((place for place in places if os.access(place, os.X_OK)), None)


if __name__ == "__main__":
    found = {"pybind11": pybind11, "cutlass": cutlass, "nvcc": nvcc}[sys.argv[1]]()
    print(found or "")
