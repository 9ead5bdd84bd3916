"""``python -m dash kernels``: a folder through which programs that load FlashAttention get dash."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dash.compat.kernels import write

Folder = Annotated[Path, typer.Argument(help="Folder to write; made where it is missing.")]


def kernels(folder: Folder) -> None:
    """Writes a folder for the kernels package, which transformers and TRL load kernels with."""
    # To stdout and nothing else, so that  export $(python -m dash kernels DIR)  works.
    typer.echo(f"LOCAL_KERNELS={write(folder)}")
