"""The documentation site's own check of links; the site itself is built by `make docs`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("check_links", ROOT / "docs" / "check_links.py")
check_links = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_links)

PAGE = """<h1 id="top">A</h1> <a href="#top">up</a> <a href="b.html#there">b</a>
<a href="https://example.org/x">out</a> <img src="figures/a.png"> <a href="mailto:a@b.c">mail</a>
{}
"""


def site(folder: Path, more: str = "") -> Path:
    (folder / "figures").mkdir()
    (folder / "figures" / "a.png").write_bytes(b"png")
    (folder / "b.html").write_text('<p id="there">b</p>')
    (folder / "a.html").write_text(PAGE.format(more))
    return folder


def test_a_whole_site_has_no_dead_link(tmp_path: Path) -> None:
    assert check_links.dead_links(site(tmp_path)) == ([], 2)


def test_a_dead_page_file_or_anchor_is_named(tmp_path: Path) -> None:
    more = '<a href="c.html">c</a> <a href="b.html#gone">d</a> <a href="#nowhere">e</a>'
    more += '<img src="f.png">'
    dead, _ = check_links.dead_links(site(tmp_path, more))
    assert [line.rpartition(": ")[2] for line in dead] == [
        "c.html", "b.html#gone", "#nowhere", "f.png",
    ]  # fmt: skip
    assert dead[0].startswith("a.html:3: ")


def test_every_page_of_docs_is_in_the_site() -> None:
    """The index takes all pages, so that a new one cannot be forgotten."""
    assert "*\n```" in (ROOT / "docs" / "index.md").read_text()
