"""Links of pages lead somewhere, and an index has every page of its folder."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tools/**/*.md")]


def test_links_of_pages_lead_to_files_and_headings():
    headings, broken = {}, []
    for page in PAGES:
        headings[page] = {anchor(each) for each in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"https?://", target):
                continue
            path, _, heading = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (heading and heading not in headings[file]):
                broken.append((str(page.relative_to(ROOT)), target))
    assert broken == []


def anchor(heading):
    """Returns the name by which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("folder", ["docs", "docs/decisions"])
def test_an_index_has_every_page_of_its_folder(folder):
    index = (ROOT / folder / "README.md").read_text()
    pages = {path.name for path in (ROOT / folder).glob("*.md")} - {"README.md"}
    assert pages == {target for target in re.findall(r"\]\(([^)]*)\)", index) if "/" not in target}
