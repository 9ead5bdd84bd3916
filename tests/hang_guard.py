"""Ends the process when one test takes too long: a lost turn hangs a kernel, and pytest with it.

Test modules import both fixtures; it needs no plugin.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from typing import TextIO

import pytest

SECONDS = 90
SLOW_SECONDS = 400


@pytest.fixture(scope="session")
def terminal(pytestconfig: pytest.Config) -> Iterator[TextIO]:
    """The stderr behind pytest's capture."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        copy = os.fdopen(os.dup(2), "w")
    yield copy
    copy.close()


@pytest.fixture(autouse=True)
def hang_guard(request: pytest.FixtureRequest, terminal: TextIO) -> Iterator[None]:
    """Names the test, prints where it is, and exits."""
    slow = request.node.get_closest_marker("slow") is not None
    seconds = SLOW_SECONDS if slow else SECONDS
    faulthandler.dump_traceback_later(seconds, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()
