"""Presets are files with a source for every number; what is no machine is refused."""

import dataclasses
import re

import pytest

from megatron_cp.errors import ArgumentError
from megatron_cp.planner.predict import Link, Topology, machine, presets
from megatron_cp.planner.predict.machine_files import SAFE, written
from tests.fixed_machine import FIXED
from tests.refusals import rejects


def test_presets_have_hosts_that_are_full_but_for_the_last():
    assert {"a100", "h100", "h200", "b200", "h800", "rtx4090", "cpu"} <= set(presets())
    assert SAFE in presets()
    assert machine() is machine(SAFE)
    found = machine("h100").topology(19)
    assert found.hosts == (0,) * 8 + (1,) * 8 + (2,) * 3
    assert found.rail.tolist() == [*range(19)]  # a card each
    assert machine("h100").topology(5, 2).hosts == (0, 0, 0, 1, 1)
    assert machine("rtx4090").topology(8).rail.tolist() == [0] * 8
    # And a file says so.
    emulated = dataclasses.replace(machine("cpu"), shares_cores=True)
    assert "shares_cores = true" in written(emulated)
    assert emulated.topology(4).shares_cores
    assert not machine("cpu").topology(4).shares_cores


@pytest.mark.parametrize("name", presets())
def test_a_machine_has_a_source_of_every_number_and_a_file(name, tmp_path):
    found = machine(name)
    numbers = {field.name for field in dataclasses.fields(found.hardware)} - {"name", "about", "sources"}
    lacking = numbers - set(found.hardware.sources)
    assert not lacking
    assert {"within", "between"} <= set(found.hardware.sources)
    assert all(len(source) >= 10 or source == "data sheet" for source in found.hardware.sources.values())
    path = tmp_path / "mine.toml"
    for base in (None, *sorted({"h100", "b200"} - {name})):
        path.write_text(written(found, base))
        again = machine(path)
        assert again == found
        assert again.hardware.sources == found.hardware.sources


def test_a_file_may_name_the_preset_that_it_changes(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nbase = "h100-fa2"\n[hardware]\nmemory = 9.6e10\n[sources]\nmemory = "data sheet"\n')
    found, base, h100 = machine(path), machine("h100-fa2"), machine("h100")
    assert found == dataclasses.replace(
        base, hardware=dataclasses.replace(base.hardware, name="mine", about="", memory=9.6e10)
    )
    assert found.hardware.sources == {**base.hardware.sources, "memory": "data sheet"}
    assert base.hardware.attention != h100.hardware.attention
    path.write_text('base = "h100"\n[hardware]\ncopy = 9.6e11\n[topology]\nrails = 4\n')
    found = machine(path)
    assert (found.hardware.copy, found.rails) == (9.6e11, 4)
    assert set(h100.hardware.sources) - set(found.hardware.sources) == {"copy"}  # whose source was another number's
    assert base.hardware.rule == h100.hardware.rule
    path.write_text('base = "h100"\n[topology]\nbetween = { bandwidth = 1e10 }\n')
    assert machine(path).between == dataclasses.replace(h100.between, bandwidth=1e10)
    path.write_text('base = "h1000"')
    with pytest.raises(ArgumentError, match=r"^base of .*mine.toml: got 'h1000'; allowed: a100, "):
        machine(path)


@pytest.mark.parametrize(
    ("name", "says"),
    [("h1000", r"Did you mean h100\?"), ("nothing like it", "FILE` writes such a file"), (5, "a100, b200, cpu")],
)
def test_rejects_unknown_machines(name, says):
    with pytest.raises(ArgumentError, match=says) as caught:
        machine(name)
    assert caught.value.argument == "hardware"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("copy = ", "copies = "), "It lacks hardware.copy. It has copies (did you mean copy?)."),
        (("memory = ", "memroy = "), "It lacks hardware.memory. It has memroy (did you mean memory?)."),
        (("launch = ", "products = []\nlaunch = "), "It has products (whole steps are no longer predicted"),
        (("[topology]", "[topologies]"), "It has topologies outside of its table (did you mean topology?)."),
        (("[hardware]", "memory = 9e10\n[hardware]"), "It has memory outside of its table."),
        (("rails = 8", "rails = 8\nrail = 8"), "It has topology.rail (did you mean topology.rails?)."),
        (
            ("bandwidth = ", "bandwith = "),
            "It has topology.within.bandwith (did you mean topology.within.bandwidth?), topology.between.bandwith",
        ),
        (("matrix = 6.5e+14", "matrix = -1"), "matrix: got -1; allowed: a number above 0"),
        (("launch = ", "launch = nonsense"), "a file in TOML"),
        (("attention = [[", "attention = [[1], ["), "rows of a head size and two rates"),
        (("rails = 8", "rails = 0"), "rails"),
        (("rule = [[", 'rule = [["gdn", 3.6e+13], ['), "rule: got ('gdn', 36000000000000.0)"),
        (("3.2e+13, 0]", "-5, 0]"), "a kind, a head size, two rates above 0, and seconds of at least 0"),
        ((', ["mamba", 128, 3.6e+13, 3.2e+13, 0]', ""), "one row or more of each of gdn, kda, mamba"),
        (('["kda", 128,', '["gdn", 128,'), "of different head sizes"),
        (('"mamba"', '"mambo"'), "rule: got [('gdn', 128), ('kda', 128), ('mambo', 128)]"),
        (("convolution = [6.5e+11, 2.2e+11]", "convolution = [0, 1]"), "convolution: got (0, 1)"),
        (("band = [0, 0]", "band = [0, -1]"), "two numbers of at least 0"),
        (("row = []", "row = [[128, 1.0, -1.0]]"), "rows of a head size and two numbers of at least 0"),
        (("chain = []", "chain = [[128, 1.0, 1.0]]"), "rows of a kind, a head size and two numbers of at least 0"),
        (("host = [0, 0, 0]", "host = [0, 0]"), "host: got (0, 0); allowed: three numbers of at least 0"),
        (("ring = [1, 1]", "ring = [1, 1.5]"), "ring: got (1, 1.5); allowed: two numbers of at least 0 and at most 1"),
        (("ramp = 0", "ramp = -1"), "ramp: got -1"),
        (("collective = 0", "collective = -1"), "collective: got -1"),
        (("transfer = 0", "transfer = nan"), "transfer: got nan"),
        (("shares_cores = false", "shares_cores = 1"), "shares_cores"),
        (("tile = 128", "tile = 0.5"), "tile: got 0.5"),
        (("cores = 0", "cores = 2.5"), "cores: got 2.5"),
        (("wider = [2, 4]", "wider = [0, 0]"), "wider: got (0, 0)"),
    ],
)
def test_rejects_malformed_files(change, says, tmp_path):
    path, text = tmp_path / "mine.toml", written(FIXED)
    assert change[0] in text
    path.write_text(text.replace(*change))
    rejects(re.escape(says), machine, path)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("hosts", lambda: machine().topology(4, 5)), ("hosts", lambda: machine().topology(4, [0, 0, 1])),
        ("ranks", lambda: machine().topology(0)), ("hosts", lambda: Topology((0, 2), Link(0, 0, 1), Link(0, 0, 1))),
        ("bandwidth", lambda: Link(0.0, 0.0, 0.0)), ("latency", lambda: Link(-1.0, 0.0, 1.0)),
        ("shares_cores", lambda: Topology((0, 1), Link(0, 0, 1), Link(0, 0, 1), shares_cores=1)),
    ],
)  # fmt: skip
def test_rejects_impossible_places(argument, call):
    rejects(f"^{argument}: got ", call)


def test_a_kind_has_its_own_rates_of_the_nearest_head_size():
    rows = (
        ("gdn", 64, 1.0, 2.0, 3.0), ("kda", 64, 4.0, 5.0, 6.0), ("kda", 128, 10.0, 11.0, 12.0),
        ("mamba", 64, 7.0, 8.0, 9.0),
    )  # fmt: skip
    hardware = dataclasses.replace(machine("h100").hardware, rule=rows)
    assert [hardware.rule_rate("kda", 80, forward=way) for way in (True, False)] == [4.0, 5.0]
    assert [hardware.rule_rate("kda", 100, forward=way) for way in (True, False)] == [10.0, 11.0]
    assert [hardware.rule_host_seconds(kind, 256) for kind in ("gdn", "kda", "mamba")] == [3.0, 12.0, 9.0]
