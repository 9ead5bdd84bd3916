"""setuptools' build backend; it also asks for CUTLASS and NVIDIA's compiler if missing.

`pip install .` puts them into its own build environment. DASH_KERNELS=OFF asks for neither.
"""

import os

import requirements
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks this file does not replace


def _kernels() -> list[str]:
    return [] if os.environ.get("DASH_KERNELS") == "OFF" else requirements.missing_for_kernels()


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + _kernels()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + _kernels()
