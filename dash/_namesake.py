"""Importing this fails where Plotly's web framework, also imported as ``dash``, is mixed in.

Installed into one folder, the two packages each overwrite some of the other's files.
"""

from __future__ import annotations

from pathlib import Path

_FILES_OF_PLOTLY = ("dash.py", "dependencies.py", "dcc", "html")


def check(folder: Path) -> None:
    """Raises ``ImportError`` if the package's folder holds files of Plotly's dash."""
    found = [name for name in _FILES_OF_PLOTLY if (folder / name).exists()]
    if found:
        raise ImportError(
            f"{folder} holds dash-attention and also files of Plotly's dash ({', '.join(found)}): "
            "both are imported as `dash`, and one overwrote parts of the other. Uninstall both "
            "(pip uninstall dash dash-attention) and install the one this environment is for."
        )


check(Path(__file__).parent)
