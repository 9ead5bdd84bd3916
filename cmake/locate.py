"""Print where a thing that the build needs lies, as this Python sees it; nothing if it is absent.

    python cmake/locate.py pybind11|cutlass|nvcc

Standard library only: it runs before anything is installed.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA_MAJOR = 13  # the major whose compiler NVIDIA ships as wheels, nvcc included


def package_folders(name: str) -> list[Path]:
    """The folders of an importable package, without importing it; several for a namespace."""
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []


def pybind11() -> Path | None:
    """The folder that holds pybind11/pybind11.h; Torch carries a copy, where no other is."""
    folders = [folder / "include" for folder in package_folders("pybind11")]
    folders += [folder / "include" for folder in package_folders("torch")]
    return next((it for it in folders if (it / "pybind11" / "pybind11.h").is_file()), None)


def cutlass() -> Path | None:
    """The folder that holds cute/tensor.hpp: $DASH_CUTLASS_DIR, third_party/cutlass, the wheel."""
    chosen = os.environ.get("DASH_CUTLASS_DIR")
    places = [ROOT / "third_party" / "cutlass"]
    places += [folder / "source" for folder in package_folders("cutlass_library")]
    for place in [Path(chosen)] if chosen else places:
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
    for wheels in package_folders("nvidia"):
        places.append(wheels / f"cu{CUDA_MAJOR}" / "bin" / "nvcc")
    return next((place for place in places if os.access(place, os.X_OK)), None)


if __name__ == "__main__":
    found = {"pybind11": pybind11, "cutlass": cutlass, "nvcc": nvcc}[sys.argv[1]]()
    print(found or "")
