"""The check of a GPU without one: shares of its budget, what is cut, its summary, what travels, and what it refuses."""

import json
import os
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.refusals import rejects
from tools.gpu_check import probe
from tools.gpu_check.__main__ import Check, arguments, brought, checked, install, missing, parsed
from tools.gpu_check.plan import BUDGET, RESERVE, STEPS, commands, expression, seconds_for
from tools.gpu_check.refusals import check_idle, check_size, other_gpu
from tools.gpu_check.summary import LINES, WIDTH, Result, summary
from tools.gpu_check.wheels import MARK, MIB, built_wheels, check_own, fitting, needs, pins, shrunk


def options_of(*words, began=0.0):
    return arguments().parse_args([*words, "--began", str(began)])


@pytest.fixture
def check(tmp_path):
    return Check(options_of(began=time.time()), tmp_path)


def test_shares_scale_with_the_budget_and_what_is_spared_is_shared():
    for budget in (BUDGET, 100.0):
        left = budget
        for number, step in enumerate(STEPS):
            limit = seconds_for(step, STEPS[number + 1 :], left)
            assert limit == pytest.approx(step.share * budget / sum(each.share for each in STEPS))
            left -= limit
        assert left == pytest.approx(0)
    assert sum(step.share for step in STEPS) + RESERVE <= BUDGET
    assert seconds_for(STEPS[-1], (), 200.0) == 200.0


def test_every_step_has_commands_and_names_none_twice():
    options = {"repeats": 2, "workers": 2, "small": True, "only": "varlen", "folder": "f", "checker": "memcheck"}
    found = [words for step in STEPS for part, words in commands(step, **options) if 0 < part <= 1]
    assert len(found) == len({" ".join(words) for words in found}) == 11
    assert sum("-k" in words and "(varlen)" in words[words.index("-k") + 1] for words in found) == 5
    assert expression(STEPS[0]).startswith("(very_bits")
    assert all(step.tests in expression(STEPS[3]) for step in STEPS if step.tests)


def test_a_budget_too_short_for_a_step_skips_it_by_name(tmp_path):
    check = Check(options_of("--budget", "60", began=time.time() - 30), tmp_path)
    check.steps(str(tmp_path))
    assert [result.status for result in check.results] == ["skipped"] * len(STEPS)
    lines = check.keep()
    assert "give --only one-rank" in lines[3]
    assert (tmp_path / "gpu_check.txt").read_text().splitlines() == lines


def test_a_command_that_exceeds_its_share_is_ended_with_what_it_started(check, tmp_path):
    result = Result("smoke", 1.0)
    started, seconds = tmp_path / "child", 2.0
    while not started.exists():  # a busy machine may take longer than that to start it
        assert not check.run(["sh", "-c", f"sleep 600 & echo $! > {started}; wait"], seconds, result)
        assert (result.status, result.failures) == ("cut", [])
        seconds *= 2
    child = Path(f"/proc/{started.read_text().strip()}/status")
    assert not child.exists() or "zombie" in child.read_text()


def test_rows_are_kept_as_they_come_and_failures_are_told(check, tmp_path):
    rows = [
        {"test": "tests/a.py::test_a", "outcome": "passed", "seconds": 1},
        {"test": "tests/a.py::test_b", "outcome": "failed", "seconds": 1, "why": "AssertionError: b"},
        {"row": "a2a", "column": "32k", "not_run": "OutOfMemoryError: c", "is_refused": False},
    ]
    (tmp_path / "rows").write_text("text\n" + "".join(json.dumps(row) + "\n" for row in rows))
    result = Result("parity")
    assert check.run(["sh", "-c", f"cat {tmp_path}/rows; exit 1"], 60, result)
    assert result.failures == ["a.py::test_b: AssertionError: b", "a2a, 32k: OutOfMemoryError: c"]
    assert [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()] == [
        {"step": "parity", **row} for row in rows
    ]
    assert check.run(["sh", "-c", "echo why; exit 7"], 60, result)
    assert result.failures[-1].endswith("ended with exit code 7: why")
    assert parsed("{no json") is None


def test_a_summary_has_thirty_lines_at_most_and_each_ratio():
    def measured(row, column, device_us=30.0, **more):
        return {"row": row, "column": column, "device_us": device_us, "predicted_us": 20.0, "host_bound": False} | more

    results = [Result("smoke", 80, 40), Result("one-rank", 150, 150, cut=True), Result("nccl", skipped="2 s are left")]
    results[0].rows = [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "skipped"}]
    results[1].rows = [
        measured("attention a2a", "32k cp2", peak=99, peak_predicted=100),
        measured("attention a2a", "32k cp8", 10.0, host_bound=True, peak=110, peak_predicted=100),
        {"row": "mamba headwise", "column": "32k cp2", "not_run": "not installed", "is_refused": True},
    ]
    lines = summary("H100", results, 10.0, 110.0, 540.0)
    assert lines == [
        "gpu_check: 100 of 540 s on H100",
        "smoke    passed    40 of 80 s: 1 passed, 1 skipped",
        "one-rank cut      150 of 150 s: 2 rows measured, cut: its time was over",
        "nccl     skipped  2 s are left",
        lines[4],
        "attention a2a        32k cp2 30/20=1.50 | 32k cp8 ~10/20=0.50 | peak 1.10",
        "not run: mamba headwise: not installed",
    ]
    results[0].failures = [f"test {number}: {'x' * 500}" for number in range(90)]
    results[1].rows = [measured(f"row {number}", "32k") for number in range(90)]
    lines = summary("H100", results, 10.0, 110.0, 540.0)
    assert len(lines) == LINES
    assert max(map(len, lines)) == WIDTH
    assert "and 87 failures more" in lines[7]


def test_packages_of_another_torch_or_gpu_and_kernels_that_lack_are_named():
    found = {"broken": {"mamba-ssm 2.3": "was built for another torch"}, "kernels": {"fla of kda": "no Triton"}}
    assert missing(found, {"fla-core"}, is_emulated=False) == [
        "mamba-ssm 2.3 was built for another torch: build it anew, or take it out of .whl",
        "kernel fla of kda, for which fla-core is here: no Triton",
    ]
    assert len(missing(found, {"fla-core"}, is_emulated=True)) == 1
    assert brought("") == set()


def test_a_package_that_does_not_load_is_left_out_and_named(tmp_path, monkeypatch, capsys):
    site, metadata = tmp_path / "site", "mamba_ssm-2.3.2.post1.dist-info/"
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as wheel:
        files = {
            "mamba_ssm/__init__.py": "", "broken_cuda.cpython-312-x86_64-linux-gnu.so": "junk",
            f"{metadata}METADATA": "Metadata-Version: 2.1\nName: mamba-ssm\nVersion: 2.3.2.post1\n",
            f"{metadata}WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp312-cp312-linux_x86_64\n",
        }  # fmt: skip
        for name, text in {**files, f"{metadata}RECORD": "".join(f"{name},,\n" for name in files)}.items():
            wheel.writestr(name, text)
    install(str(tmp_path), str(site))
    assert brought(str(site)) == {"mamba-ssm"}
    monkeypatch.setattr(sys, "argv", ["probe", str(site)])
    monkeypatch.syspath_prepend(str(site))
    probe.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["probe"]
    assert "does not load beside torch" in found["broken"]["mamba-ssm 2.3.2.post1"]
    assert list(site.iterdir()) == []
    assert missing(found, {"mamba-ssm"}, is_emulated=False)[0].startswith("mamba-ssm 2.3.2.post1 does not load")


@pytest.mark.parametrize(
    ("names", "capability", "expected"),
    [
        ("a.sm_90.cubin", (9, 0), None), ("a.sm_90a.cubin", (9, 0), None), ("a.sm_80.cubin", (8, 6), None),
        ("a.sm_80.cubin b.sm_80.ptx", (9, 0), None), ("", (9, 0), None),
        ("a.sm_90.cubin b.sm_100.cubin", (8, 0), "was built for sm_90, sm_100, and the device is sm_80"),
        ("a.sm_90.ptx", (8, 9), "was built for sm_90, and the device is sm_89"),
    ],
)  # fmt: skip
def test_an_extension_runs_on_the_gpus_that_it_was_built_for(names, capability, expected):
    listing = "".join(f"ELF file    1: {name}\n" for name in names.split())
    assert other_gpu(listing, capability) == expected


def wheel_in(folder, name, size=0):
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("z3/lib/libz3.so", b"z" * size)
        wheel.writestr("z3.data/data/bin/z3", b"z" * size)
        wheel.writestr("selective_scan_cuda.cpython-312.so", b"z" * size)
    return folder / name


PINS = {"mamba-ssm": "2.3.2.post1", "causal-conv1d": "1.7.0", "flash-attn": "2.8.3"}
WHEEL = "mamba_ssm-2.3.2.post1-cp312-cp312-linux_x86_64.whl"
REFUSED = {
    "device": [
        (check_idle, "40000, 0"), (check_idle, "3, 97"), (check_size, 16 << 30, [("smoke", 8), ("one-rank", 32)]),
    ],
    "--budget": [(checked, options_of("--budget", budget)) for budget in ("44", "0", "-1", "nan", "inf")],
    "--repeats": [(checked, options_of("--repeats", "0"))],
    "--workers": [(checked, options_of("--workers", "0"))],
    "--limit": [(fitting, [[("a", 2 * MIB)]], MIB)],
}  # fmt: skip


@pytest.mark.parametrize(("argument", "call"), [(name, call) for name, calls in REFUSED.items() for call in calls])
def test_rejects_devices_and_numbers(argument, call):
    rejects(argument, *call)


@pytest.mark.parametrize("name", ["", WHEEL.replace("post1", "post2"), WHEEL.replace("12", "11"), "torch-2.whl"])
def test_rejects_wheels(name, tmp_path):
    if name:
        wheel_in(tmp_path, name)
    rejects("--built", built_wheels, tmp_path, PINS)
    rejects("--wheels", install, str(tmp_path / "none"), str(tmp_path))


def test_rejects_a_folder_of_somebody_else(tmp_path):
    kept = wheel_in(tmp_path, WHEEL)
    rejects("--out.*that this command made", check_own, tmp_path)
    rejects("--out", check_own, kept)
    (tmp_path / MARK).touch()
    check_own(tmp_path)
    check_own(tmp_path / "new")
    assert kept.exists()


def test_what_travels(tmp_path):
    wheel_in(tmp_path, WHEEL.replace("post1", "post1+torch2.11"))
    wheel_in(tmp_path, "torch-2.whl")  # of a package that does not travel
    assert len(built_wheels(tmp_path, PINS)) == 1
    assert pins('a = ["mamba-ssm==2.3.2.post1", "torch>=2.9"]') == {"mamba-ssm": "2.3.2.post1"}
    assert needs('Requires-Dist: z3-solver<5,>=4\nRequires-Dist: torch\nRequires-Dist: x; extra == "y"\n') == [
        "z3-solver<5,>=4"
    ]
    groups = [[("must", 2)], [("built", 5)], [("tilelang", 4), ("z3", 1)]]
    assert fitting(groups, 8) == ([("must", 2), ("built", 5)], [("tilelang", 4), ("z3", 1)])
    assert fitting(groups, 12)[1] == []
    small, large = wheel_in(tmp_path, "small.whl"), wheel_in(tmp_path, "large.whl", 5 * MIB)
    assert shrunk(small, tmp_path / "to") == small
    found = shrunk(large, tmp_path / "to")
    before = found.stat().st_mtime_ns
    assert shrunk(large, tmp_path / "to").stat().st_mtime_ns == before
    os.utime(large, (time.time() + 9, time.time() + 9))  # it was built anew
    assert shrunk(large, tmp_path / "to").stat().st_mtime_ns > before
    with zipfile.ZipFile(found) as wheel:
        assert wheel.namelist() == ["z3/lib/libz3.so", "selective_scan_cuda.py"]
        assert wheel.read("selective_scan_cuda.py") == b""
        assert len(wheel.read("z3/lib/libz3.so")) == 5 * MIB
    assert found.stat().st_size < large.stat().st_size
    assert list((tmp_path / "to").iterdir()) == [found]
