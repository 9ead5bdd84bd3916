"""Checks a built site: every link to a page, a file or an anchor of it leads somewhere.

    python docs/check_links.py build/site

Sphinx warns of what it resolves itself; this also sees what arrived as HTML. Links to other hosts
are counted, not followed: CI has no way out.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Attributes: anchors, and links with the line they are on."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[int, str]] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            elif value and name in ("href", "src"):
                self.links.append((self.getpos()[0], value))


def dead_links(site: Path) -> tuple[list[str], int]:
    """What leads nowhere, and how many links lead to other hosts."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    dead, elsewhere = [], 0
    for path, page in pages.items():
        for line, link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                elsewhere += 1
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            known = pages[target].anchors if target in pages else None
            if not target.exists() or (anchor and known is not None and anchor not in known):
                dead.append(f"{path.relative_to(site.resolve())}:{line}: {link}")
    return dead, elsewhere


def main(site: Path) -> None:
    dead, elsewhere = dead_links(site)
    print(*dead, sep="\n", end="\n" if dead else "")
    print(f"{len(dead)} dead links; {elsewhere} links to other hosts not followed")
    sys.exit(bool(dead))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
