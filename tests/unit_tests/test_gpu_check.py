"""The check of a GPU without one: shares of its budget, what is cut, its summary, and what it refuses."""

import json
import time
from pathlib import Path

import pytest

from tests.refusals import rejects
from tools.gpu_check.__main__ import Check, Result, arguments, check_device, check_options, parsed
from tools.gpu_check.plan import BUDGET, RESERVE, STEPS, commands, expression, seconds_for


def options_of(*words):
    return arguments().parse_args(words)


@pytest.fixture
def check(tmp_path):
    return Check(options_of(), tmp_path, "H100")


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
    assert len(found) == len({" ".join(words) for words in found}) == 12
    assert sum("-k" in words and "(varlen)" in words[words.index("-k") + 1] for words in found) == 5
    assert expression(STEPS[0]).startswith("(very_bits")
    assert all(step.tests in expression(STEPS[3]) for step in STEPS if step.tests)


def test_a_budget_too_short_for_a_step_skips_it_by_name(tmp_path):
    check = Check(options_of("--budget", "50"), tmp_path, "H100")
    check.steps(str(tmp_path))
    assert [result.status for result in check.results] == ["skipped"] * len(STEPS)
    assert "give --only one-rank" in (tmp_path / "gpu_check.txt").read_text().splitlines()[3]


def test_a_command_that_exceeds_its_share_is_ended_with_what_it_started(check, tmp_path):
    started, seconds = tmp_path / "child", 2.0
    while not started.exists():  # a busy machine may take longer than that to start it
        result = Result("smoke", 1.0)
        check.run(["sh", "-c", f"sleep 600 & echo $! > {started}; wait"], seconds, result)
        assert (result.status, result.failures) == ("cut", [])
        seconds *= 2
    child = Path(f"/proc/{started.read_text().strip()}/status")
    while child.exists() and "zombie" not in child.read_text():
        time.sleep(0.01)


def test_rows_are_kept_as_they_come_and_failures_are_told(check, tmp_path):
    row = {"row": "a2a", "column": "32k", "not_run": "OutOfMemoryError: c", "is_refused": False}
    (tmp_path / "rows").write_text(f"text\nFAILED a.py::test_b - AssertionError: b\n{json.dumps(row)}\n")
    result = Result("parity")
    check.run(["sh", "-c", f"cat {tmp_path}/rows; exit 1"], 60, result)
    assert result.failures == ["FAILED a.py::test_b - AssertionError: b", "a2a, 32k: OutOfMemoryError: c"]
    assert json.loads((tmp_path / "gpu_check.jsonl").read_text()) == {"step": "parity", **row}
    check.run(["sh", "-c", "echo why; exit 7"], 60, result)
    assert result.failures[-1].endswith("ended with exit code 7: why")
    check.run(["sh", "-c", "echo '== 2 skipped in 1s =='", "pytest"], 60, result)
    assert (result.tests, result.failures[-1]) == ("2 skipped in 1s", "no test ran")
    assert parsed("{no json") is None


def test_a_summary_has_steps_failures_and_each_ratio(check):
    def measured(row, column, device_us=30.0, **more):
        return {"row": row, "column": column, "device_us": device_us, "predicted_us": 20.0, "host_bound": False} | more

    check.results = [
        Result("smoke", 80, 40, tests="1 passed, 1 skipped in 9s"), Result("one-rank", 150, 150, ["a" * 500], cut=True),
        Result("nccl", skipped="2 s are left"),
    ]  # fmt: skip
    check.results[1].rows = [
        measured("attention a2a", "32k cp2", peak=99, peak_predicted=100),
        measured("attention a2a", "32k cp8", 10.0, host_bound=True, peak=110, peak_predicted=100),
        {"row": "mamba headwise", "column": "32k cp2", "not_run": "not installed", "is_refused": True},
    ]
    lines = check.keep().splitlines()
    assert lines[0].endswith("of 540 s on H100")
    assert lines[1:] == [
        "smoke    passed    40 of 80 s: 1 passed, 1 skipped in 9s",
        "one-rank failed   150 of 150 s: 2 rows measured; its time was over",
        "nccl     skipped  2 s are left",
        f"one-rank: {'a' * 170}",
        "attention a2a        32k cp2 30/20=1.50 | 32k cp8 ~10/20=0.50 | peak 1.10",
        "not run: not installed mamba headwise 32k cp2",
    ]


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("device: got '3.0 GiB in use'", (check_device, 37 << 30, 40 << 30, STEPS)),
        ("device.*Leave one-rank out", (check_device, 16 << 30, 16 << 30, STEPS)),
        *(("--budget", (check_options, options_of("--budget", budget))) for budget in ("44", "0", "-1", "nan", "inf")),
        ("--repeats", (check_options, options_of("--repeats", "0"))),
        ("--workers", (check_options, options_of("--workers", "0"))),
    ],
)
def test_rejects_devices_and_numbers(argument, call):
    rejects(argument, *call)


def test_accepts_an_idle_device_of_any_size_for_small_steps():
    check_device(15 << 30, 16 << 30, STEPS[:1])
