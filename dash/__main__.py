"""``python -m dash`` and ``dash-attention``: doctor, bench, verify, demo, schedule."""

from __future__ import annotations

import sys
from pathlib import Path

from dash.extension import ExtensionMissingError
from dash.support import UnsupportedError

CONSOLE_SCRIPT = "dash-attention"


def main() -> None:
    try:
        from dash.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"{program_name()} needs {error.name}: pip install 'dash-attention[cli]'")
    try:
        app(prog_name=program_name())
    except (UnsupportedError, ExtensionMissingError) as error:
        sys.exit(str(error))


def program_name() -> str:
    """As it was started: the console script has shell completion, which goes by the name."""
    started = Path(sys.argv[0]).name
    return CONSOLE_SCRIPT if started == CONSOLE_SCRIPT else "python -m dash"


if __name__ == "__main__":
    main()
