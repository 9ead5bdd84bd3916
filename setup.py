"""Builds dash._C. Metadata is in pyproject.toml, sources in sources.txt, flags in CMakeLists.txt.

The command is Torch's BuildExtension where Torch is installed, but CMake compiles. BuildExtension
would require a CUDA build of Torch whose major equals nvcc's and would add Torch's headers, flags
and libraries, and dash._C must depend on none of them: it knows no Torch ABI, so it builds beside a
CPU-only Torch, or beside none.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup

try:
    from torch.utils.cpp_extension import BuildExtension
except ImportError:  # an isolated build environment
    from setuptools.command.build_ext import build_ext as BuildExtension

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "cmake"))
import build  # noqa: E402


class BuildDash(BuildExtension):
    """Builds in place with CMake, then puts the module where setuptools wants it."""

    def build_extensions(self):
        if os.environ.get("DASH_BUILD") == "no":  # the Makefile builds by itself, and shows it
            return
        build.build_in_place()
        for extension in self.extensions:
            target = Path(self.get_ext_fullpath(extension.name)).resolve()
            built = ROOT / "dash" / target.name
            target.parent.mkdir(parents=True, exist_ok=True)
            for source in (built, built.with_name(f"{built.name}.ptxas.log")):
                if source.exists() and source.parent != target.parent:
                    shutil.copy2(source, target.parent)

    def copy_extensions_to_source(self):
        """Nothing to do for an editable install: the build is in place."""


def sources() -> list[str]:
    lines = (ROOT / "sources.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def version() -> str:
    """``dash.__version__``; of wheels with +cu12 or +cu13 behind it, so that both can be had."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "dash" / "__init__.py").read_text(), re.M)
    return found.group(1) + os.environ.get("DASH_CUDA_TAG", "")


setup(
    version=version(),
    ext_modules=[Extension("dash._C", sources())],
    cmdclass={"build_ext": BuildDash},
)
