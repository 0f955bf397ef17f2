"""Looks after every link of the built site: `python -m tools.site.links FOLDER`.

Each internal link must lead to a file of the site and, with an anchor, to an element of that name. External links are
counted and listed in `external_links.txt` beside the folder, and not fetched. Exit code 1 if a link leads nowhere.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Page(HTMLParser):
    """The anchors and the links of one page."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.links += [values[name] for name in ("href", "src") if values.get(name)]


@dataclass
class Found:
    """The result: counts, external links, and those that lead nowhere, each as `page: link`."""

    pages: int = 0
    internal: int = 0
    anchors: int = 0
    external: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)


def read(path: Path) -> Page:
    """Parses a page."""
    page = Page()
    page.feed(path.read_text())
    return page


def check(folder: Path) -> Found:
    """Follows all links of all pages below a folder."""
    pages = {path: read(path) for path in sorted(folder.resolve().rglob("*.html"))}
    found = Found(pages=len(pages))
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                found.external.add(link)
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            found.internal += 1
            found.anchors += bool(anchor)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                found.broken.append(f"{path.relative_to(folder.resolve())}: {link}")
    return found


def main() -> int:
    """Prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    found = check(folder)
    listed = folder.parent / "external_links.txt"
    listed.write_text("".join(f"{link}\n" for link in sorted(found.external)))
    print(
        f"{found.pages} pages, {found.internal:,} internal links ({found.anchors:,} with an anchor), "
        f"{len(found.broken)} lead nowhere; {len(found.external)} external links, not fetched: {listed}"
    )
    for line in sorted(set(found.broken)):
        print(line, file=sys.stderr)
    return 1 if found.broken or not found.pages else 0


if __name__ == "__main__":
    sys.exit(main())
