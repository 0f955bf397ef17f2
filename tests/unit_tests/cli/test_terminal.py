"""Colours and progress: at a terminal they are there, elsewhere they are not in the way."""

import io

import pytest

from megatron_cp.cli import terminal
from megatron_cp.cli.terminal import Progress, coloured
from tests.terminal import Terminal

TEXT = "ok: 2 cases\nFAILED attention\nno  kernel fla of gdn\nnothing here is ok"


def test_verdicts_are_coloured_at_a_terminal_alone(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = coloured(TEXT, Terminal())
    assert shown.splitlines() == [
        "\033[32mok\033[0m: 2 cases", "\033[31mFAILED\033[0m attention", "\033[31mno\033[0m  kernel fla of gdn",
        "nothing here is ok",
    ]  # fmt: skip
    assert coloured(TEXT, io.StringIO()) == TEXT
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as here:
            here.setenv(name, value)
            assert coloured(TEXT, Terminal()) == TEXT


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_has_one_line_of_progress_that_ends_empty(monkeypatch, clock):
    monkeypatch.setattr("sys.stderr", err := Terminal())
    progress = Progress("cases", 4)
    for second in range(1, 5):
        clock[0] = 2.0 * second
        progress.step("a2a")
    progress.clear()
    lines = err.getvalue().split("\r")
    assert lines[1].rstrip() == "1/4 cases, about 6 s left: a2a"
    assert lines[3].rstrip() == "3/4 cases, about 2 s left: a2a"
    assert "\n" not in err.getvalue()
    assert [line.strip() for line in lines[5:]] == ["", ""]


def test_elsewhere_there_is_a_line_every_ten_seconds(monkeypatch, clock):
    monkeypatch.setattr("sys.stderr", err := io.StringIO())
    progress, silent = Progress("cases", 100), Progress("cases", 100, quiet=True)
    for step in range(1, 51):
        clock[0] = 0.5 * step
        progress.step()
        silent.step()
    assert err.getvalue() == "20/100 cases, about 40 s left\n40/100 cases, about 30 s left\n"
