"""The README is short, and links of pages lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tools/**/*.md")]


def test_is_read_in_five_minutes():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(README.split()) < 900
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120
    assert re.findall(r"\balone\b", README) == []  # where "only" is meant
    (program,) = re.findall(r"^```python\n(.*?)^```", "\n".join(lines), re.DOTALL | re.MULTILINE)
    assert len(program.splitlines()) <= 30
    *others, ours = (line.strip("| ").split(" | ") for line in lines if re.match(r"\| \w", line))
    assert len(others) == 5
    assert [row[-1] for row in others] == ["yes"] * 5
    assert ours[-1] == "**no**"


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


def test_pages_have_short_lines_and_the_package_as_cp():
    long = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        lines = (line for line in text.splitlines() if not line.startswith(("|", "![", "    ")))
        long += [(str(page.relative_to(ROOT)), line) for line in lines if len(line) > 130]
    assert long == []
    # A program may paste from several of them, and `import megatron_cp as cp` is on most.
    files = [*PAGES, *(ROOT / "examples").glob("*.py")]
    taken = [
        (file.name, line) for file in files for line in re.findall(r"^ *cp = enable.*$", file.read_text(), re.MULTILINE)
    ]
    assert taken == []
    assert 'parallel = enable_context_parallel(model, mesh["cp"]' in (ROOT / "docs/transformers.md").read_text()
    page = (ROOT / "docs/transformers.md").read_text()
    numbers = r"(\de-\d\d|0e\+00)"
    in_page = re.findall(rf"^\| (\w+) \| [\w, ]+ \| {numbers} \| {numbers} \| {numbers} \|", page, re.MULTILINE)
    names = [row[0] for row in in_page]
    cases = (ROOT / "tests" / "transformers_cases.py").read_text()
    assert all(f'"{name}": ' in cases for name in names)
    assert f"three lines for {len(set(names))} classes that are tested" in README
