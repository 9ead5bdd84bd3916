"""The documentation site: docs/*.md and the docstrings, by Sphinx (`make docs`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dash

project = "dash"
author = copyright = "the dash authors"
release = version = dash.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["figures/*.py"]
html_theme = "furo"
html_title = f"dash {version}"

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]

suppress_warnings = ["misc.highlighting_failure"]  # code that writes … for what is left out

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_use_rtype = False
napoleon_use_ivar = True

# README, CONTRIBUTING and benchmarks/README.md are pages here, too: their links to each other.
PAGES = {
    "benchmarks/README.md": "docs/measuring.md",
    "CONTRIBUTING.md": "docs/contributing.md",
    "../benchmarks/README.md": "measuring.md",
}


def link_to_pages(_app: object, _path: object, _parent: object, content: list[str]) -> None:
    for link, page in PAGES.items():
        content[0] = content[0].replace(f"]({link})", f"]({page})")


def setup(app: object) -> None:
    app.connect("include-read", link_to_pages)
