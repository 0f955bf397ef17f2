"""The README is short, and ratios on pages are those of the results that are kept."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tools/**/*.md")]
COSTS = " ".join((ROOT / "docs" / "costs.md").read_text().split())


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}_cpu.json").read_text())


def test_ratios_of_an_exchange_are_geometric_means_of_the_cells_that_were_measured():
    found = result("exchange")
    means, of_cells = {}, {}
    for peer in ("loop", "megatron"):
        name = f"{peer}_over_ours"
        means[peer] = found[name]["inbound, zigzag, with the gate"]["both"]
        of_cells[peer] = [cell[name]["inbound, zigzag, with the gate"]["both"]["median"] for cell in found["cells"]]
    assert f"is {means['loop']:.1f} times faster than one all-to-all per document and tensor" in COSTS
    assert f"and {means['megatron']:.1f} times faster than megatron-core's fused path" in COSTS
    assert len(found["cells"]) == 6
    assert "geometric means of six cells" in COSTS
    low, high = ([f"{end(of_cells[peer]):.1f}" for peer in of_cells] for end in (min, max))
    assert f"which reach from {low[0]} to {high[0]} and from {low[1]} to {high[1]}" in COSTS
    assert f"The way back out is {found['megatron_over_ours']['outbound, zigzag']['both']:.2f} times faster" in COSTS
    slowest = min(cell["megatron_over_ours"]["outbound, zigzag"]["both"]["median"] for cell in found["cells"])
    assert f"but {1 / slowest:.2f} times slower with 4 ranks and 1,024 tokens" in COSTS
    pack, unpack = (found["local_targets"][what]["worst"] for what in ("pack", "unpack"))
    assert f"at most {pack:.1f} memcpys of the same bytes, unpacking {unpack:.1f}" in COSTS


def test_says_what_results_say_and_is_read_in_five_minutes():
    found = result("layer")
    gdn, mamba = (found["megatron_over_ours"][layer]["both"]["median"] for layer in ("gdn", "mamba"))
    said = f"Gated DeltaNet is {gdn:.2f} times faster than megatron-core's, Mamba-2 {mamba:.2f} times"
    assert f"{said}, as medians of {found['repeats']} repeats with {found['cp']} ranks" in COSTS
    devices = {json.loads(path.read_text())["device"] for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert ("Nothing has run on a GPU yet" in README) == (devices == {"cpu"})
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(README.split()) < 900
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120
    assert re.findall(r"\balone\b", README) == []  # where "only" is meant
    (program,) = re.findall(r"^```python\n(.*?)^```", "\n".join(lines), re.DOTALL | re.MULTILINE)
    assert len(program.splitlines()) <= 30
    *others, ours = (line.strip("| ").split(" | ") for line in lines if re.match(r"\| \w", line))
    assert {row[-1] for row in others} == {"yes"}
    assert (ours[-1] == "**no**") == (devices == {"cpu"})


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
    page = (ROOT / "docs/transformers-classes.md").read_text()
    numbers = r"(\de-\d\d|0e\+00)"
    in_page = re.findall(rf"^\| (\w+) \| [\w, ]+ \| {numbers} \| {numbers} \| {numbers} \|", page, re.MULTILINE)
    names = [row[0] for row in in_page]
    cases = (ROOT / "tests" / "transformers_cases.py").read_text()
    assert all(f'"{name}": ' in cases for name in names)
    assert f"three lines for {len(set(names))} classes that are tested" in README
