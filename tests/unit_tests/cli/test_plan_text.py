"""The verdict of `megatron-cp plan` has the numbers of its table, and names what is as fast."""

import re

import pytest

from megatron_cp.plan.describe import describe_ties, size, tied
from megatron_cp.planner.predict.machine_files import written
from tests.commands import reported
from tests.fixed_machine import FIXED


@pytest.mark.parametrize("options", [[], ["--scheme", "ring"], ["--mask", "window:20"]])
def test_the_verdict_comes_first_with_the_times_of_its_scheme_and_of_the_next(options):
    shape = ["--cp", "4", "--heads", "8", "--kv-heads", "8", "--head-dim", "64", "--lengths", "7,1,130"]
    text, data = reported(["plan", *shape, *options])
    lines = text.splitlines()
    times = {name: f"{sum(row['predicted_ms'].values()):.3f}" for name, row in data["schemes"].items()}
    chosen, following = times.pop(data["scheme"]), min(times.values(), key=float)
    assert lines[0].startswith("as asked: p2p" if "ring" in options else f"take this: {data['scheme']}")
    said = rf" in layout (contiguous|zigzag|balanced), {chosen} ms predicted on h100, the default --gpu$"
    assert re.search(said, lines[0].partition(";")[0])
    assert [line.partition(":")[0] for line in lines[1:6]] == ["time", "bytes", "memory", "work", "why"]
    assert re.search(r"([0-9.]+) ms", lines[5])[1] == following
    assert any(name in lines[5] for name in times if times[name] == following)


@pytest.mark.parametrize("lengths", [",".join(["130", "1000", "64", "300"] * 40), "65536"])
def test_without_a_layout_the_fastest_of_all_layouts_and_schemes_is_taken(lengths):
    """The layout matters much for short documents, and not for one long document whose heads are exchanged."""
    shape = ["plan", "--cp", "8", "--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--lengths", lengths]
    text, taken = reported(shape)
    each = {name: reported([*shape, "--layout", name])[1] for name in ("contiguous", "zigzag", "balanced")}
    times = {name: sum(data["predicted_ms"].values()) for name, data in each.items()}
    assert times[taken["layout"]] == pytest.approx(sum(taken["predicted_ms"].values()))
    assert times[taken["layout"]] <= min(times.values()) * 1.001
    assert (max(times.values()) > 1.1 * min(times.values())) == (lengths != "65536")
    first = text.splitlines()[0]
    assert first.startswith(f"take this: {taken['scheme']}{taken['detail']} in layout {taken['layout']}, ")
    assert "try --layout" not in text
    assert sum(line.startswith(("chosen layout", "other  layout")) for line in text.splitlines()) == 3


@pytest.fixture
def fixed(tmp_path):
    """Options that name the file of a machine that stays as it is."""
    (tmp_path / "fixed.toml").write_text(written(FIXED))
    return ["--gpu", str(tmp_path / "fixed.toml")]


def test_the_verdict_names_the_candidates_that_are_as_fast(fixed):
    """Within half a per cent of the time of the one that is taken."""
    shape = ["--cp", "2", "--heads", "8", "--kv-heads", "8", "--head-dim", "128", "--mask", "full"]
    shape += ["--layout", "zigzag"]
    found = {}
    for lengths in ("300k,200k", "30000,50000", "7,1,130"):
        text, data = reported(["plan", *shape, *fixed, "--lengths", lengths])
        times = {name: sum(row["predicted_ms"].values()) for name, row in data["schemes"].items()}
        taken = times.pop(data["scheme"])
        assert {*data["ties"]} == {name for name, time in times.items() if abs(time / taken - 1) <= 0.005}
        found[lengths] = text.splitlines()[0].partition(" predicted on fixed")[2]
    assert found == {
        "300k,200k": "; p2p, all_gather and 1 more are within 0.5 %", "30000,50000": "; p2p is within 0.5 %",
        "7,1,130": "",
    }  # fmt: skip
    assert describe_ties(tied({"x": 99.4, "y": 100.5, "z": 99.6}, 100.0)) == "; z and y are within 0.5 %"


def test_no_size_is_fastest_where_each_has_a_batch_of_its_own(fixed):
    text, data = reported(["plan", "--cp", "2,4", "--documents", "3", "--tokens-per-rank", "1k", *fixed])
    first = text.splitlines()[0]
    assert first.startswith("no size is fastest: --tokens-per-rank gives each its own batch, of 2,048 to 4,096 tokens")
    assert "fastest: cp" not in text
    for cp, found in data["sizes"].items():
        tokens = sum(found["tokens_per_rank"])
        assert tokens == 1024 * int(cp)
        assert f"cp {cp} {1e3 * int(cp) * sum(found['predicted_ms'].values()) / tokens:.3f}" in first


def test_the_verdict_says_what_makes_the_next_one_slower_and_what_crosses_between_hosts():
    shape = ["--cp", "16", "--heads", "32", "--kv-heads", "1", "--head-dim", "128", "--lengths", "200k"]
    text, data = reported(["plan", *shape, "--layout", "balanced", "--gpu", "h100"])
    lines, rows = text.splitlines(), data["schemes"]
    assert lines[0].startswith("take this: exact_by_host in layout balanced")
    times = {name: sum(row["predicted_ms"].values()) for name, row in rows.items() if name != data["scheme"]}
    following = min(times, key=times.get)
    more = rows[following]["parts_ms"]["exposed transfers"] - rows[data["scheme"]]["parts_ms"]["exposed transfers"]
    why = next(line for line in lines if line.startswith("why: "))
    assert why.endswith(f"next is {following}, {times[following]:.3f} ms: it has {more:.3f} ms more exposed transfers")
    links = next(price["bytes_by_link"] for price in data["prices"] if price["candidate"].startswith("exact_by_host"))
    sent = sum(rows["exact_by_host"]["bytes_sent"].values())
    assert sum(links.values()) == sent
    assert links["between_hosts"] < 0.3 * sent  # of 8 ranks that see a key, one gets it from the other host
    (line,) = (line for line in lines if line.startswith("bytes: "))
    assert line.endswith(f"within hosts and {size(links['between_hosts'])} between hosts, both directions")


def test_a_row_has_as_many_head_chunks_as_are_fastest():
    shape = ["--cp", "8", "--heads", "32", "--kv-heads", "32", "--head-dim", "128", "--lengths", "100k"]
    shape += ["--layout", "balanced", "--gpu", "h100"]
    rows = {chunks: reported(["plan", *shape, *chunks])[1]["schemes"] for chunks in ((), ("--head-chunks", "2"))}
    for name, row in rows[()].items():
        others = sum(rows["--head-chunks", "2"][name]["predicted_ms"].values())
        assert sum(row["predicted_ms"].values()) <= others * (1 + 1e-9), name
    assert any(row["head_chunks"] == 4 for row in rows[()].values())
