"""The compiled module ``dash._C``, loaded on first use.

``import dash`` and ``python -m dash doctor`` work where the module was never built, so that they
can say so; everything else asks here and gets the module or an error that says what to do.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


class ExtensionMissingError(ImportError):
    """``dash._C`` is not there or cannot be loaded."""


@functools.lru_cache(maxsize=1)
def extension() -> ModuleType:
    """Returns ``dash._C``.

    Raises:
        ExtensionMissingError: the module was not built for this Python, or does not load.
    """
    try:
        return importlib.import_module("dash._C")
    except ImportError as error:
        raise ExtensionMissingError(
            f"dash._C cannot be loaded ({error}). Build it with `pip install -e .` in the "
            "repository; `python -m dash doctor` lists what the build needs."
        ) from error
