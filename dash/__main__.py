"""``python -m dash``: doctor, bench, verify, demo, schedule."""

from __future__ import annotations

import sys

from dash.extension import ExtensionMissingError
from dash.support import UnsupportedError


def main() -> None:
    try:
        from dash.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"python -m dash needs {error.name}: pip install typer rich")
    try:
        app(prog_name="python -m dash")
    except (UnsupportedError, ExtensionMissingError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
