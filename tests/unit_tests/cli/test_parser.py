"""Every option of every command, given values that it cannot have: one line, status 2, no traceback."""

import functools

import pytest

from megatron_cp.cli import main as command_line
from megatron_cp.cli.report import Report

ODD = ["--", "", "-", "-1", "0", "nan", "inf", "1e400", "é", "1,", "9" * 5000, "\ud800"]


@pytest.fixture
def parsed(monkeypatch):
    """The options of each command line, none of which runs; the parser of a command is made once."""
    found = []
    monkeypatch.setattr(command_line, "_parsers", functools.cache(command_line._parsers))
    for name in command_line.COMMANDS:
        monkeypatch.setattr(command_line.command(name), "run", lambda args: found.append(args) or Report(""))
    return found


def values(action, parsed):
    """Returns an option's value, and each of its entries if it takes several."""
    if not hasattr(parsed, action.dest):
        return []
    value = getattr(parsed, action.dest)
    return value if isinstance(value, list | tuple) and action.nargs else [value]


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_rejects_odd_values_of_every_option_in_one_line(name, parsed, capsys):
    _, parsers = command_line._parsers(name)
    options = [action for action in parsers[name]._actions if action.option_strings and action.dest != "help"]
    wrong = []
    for action in options:
        for option in action.option_strings:
            for words in ([f"{option}={odd}"] for odd in ODD):
                parsed.clear()
                status = command_line.main([name, *words])
                said = capsys.readouterr().err
                one_line = (status, said.count("\n")) == (2, 1) if not parsed else status == 0
                # What is accepted is a value: argparse would leave an empty list where it drops "--".
                held = [each for args in parsed for each in values(action, args)]
                is_value = not parsed or (held and [] not in held)
                if not (one_line and is_value) or (words[0].endswith("=--") and parsed and action.nargs != "..."):
                    wrong.append((words[0][:60], status, said[:200], held))
    assert options
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "option", "allowed"),
    [
        ("plan", "--cp", "integers from 1 to 1024, as in 4,8"),
        ("plan", "--layout", "balanced|contiguous|zigzag|auto|random"), ("train", "--cp-comm-type", "a value"),
    ],
)  # fmt: skip
def test_rejects_two_dashes_as_a_value_and_says_what_to_give(name, option, allowed, capsys):
    assert command_line.main([name, f"{option}=--"]) == 2
    said = capsys.readouterr().err
    assert said == f"megatron-cp {name}: {option}: got '--'; allowed: {allowed}. See megatron-cp {name} --help.\n"
