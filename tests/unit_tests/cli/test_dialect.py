"""Every command takes the same spellings of numbers, types, schemes, masks and layouts, and both names of options."""

import re

import pytest

from megatron_cp.cli.main import command, main, parsed
from megatron_cp.planner.predict.machine_files import machine


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["plan", "--lengths", "256k,1M,1.5k,7"], "lengths", [262144, 1048576, 1536, 7]),
        (["train", "--seq-length", "128K"], "seq_length", 131072),
        (["check", "--dtype", "bf16"], "dtype", "bfloat16"), (["check", "--dtype", "FP32"], "dtype", "float32"),
        (["check", "--dtype", "half"], "dtype", "float16"), (["check", "--dtype", "fp64"], "dtype", "float64"),
        (["plan", "--scheme", "ring"], "scheme", "p2p"), (["check", "--scheme", "Ulysses"], "scheme", "a2a"),
        (["check", "--scheme", "all-gather"], "scheme", "all_gather"),
        (["plan", "--scheme", "Head-wise"], "scheme", "headwise"),
        (["plan", "--layout", "zig-zag"], "layout", "zigzag"), (["check", "--layer", "Mamba2"], "layer", "mamba"),
        (["plan", "--mask", "window:1.5k"], "mask", "window:1536"), (["check", "--mask", "Causal"], "mask", "causal"),
        (["train", "--cp-comm-type", "ag", "ring"], "cp_comm_type", ["all_gather", "p2p"]),
        (["train", "--cp-layout", "ZigZag"], "cp_layout", "zigzag"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and isinstance(value[0], str) else "",
)  # fmt: skip
def test_values_have_several_spellings(words, name, value):
    assert getattr(parsed(words), name) == value


@pytest.mark.parametrize(
    ("command", "more"), [("plan", "transport=pairwise"), ("check", "transport=pairwise"), ("train", "codec=fp8")]
)
def test_commands_take_their_own_names_and_those_of_megatrons_flags(command, more):
    own = f"--cp 4 --heads 8 --kv-heads 2 --layout zigzag --scheme p2p --{more}"
    megatrons = "--context-parallel-size 4 --num-attention-heads 8 --num-query-groups 2 --cp-layout zigzag "
    megatrons += f"--cp-comm-type p2p --cp-{more}"
    first, second = (vars(parsed([command, *words.split()])) for words in (own, megatrons))
    assert first | {"words": None} == second | {"words": None}
    assert first["num_query_groups" if command == "train" else "kv_heads"] == 2


def test_machines_have_names_in_any_case():
    assert machine("H100") is machine("h100")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "--kv-heads=4", "--num-attention-heads=6"], "plan: --kv-heads: got 4"),
        (["plan", "--num-query-groups=4", "--heads=6"], "plan: --num-query-groups: got 4"),
        (["train", "--kv-heads", "3"], "train: --kv-heads: got 3"),
        (["plan", "--lengths", "1.3k"], "--lengths: got '1.3k'; allowed: integers from 0"),
        (["train", "--rotary-base", "500k"], "--rotary-base: got '500k'"),
        (["train", "--train-iters", "10k"], "--train-iters: got '10k'; allowed: integers"),
        (["plan", "--mask", "window:1.3k"], "got 'window:1.3k'"),
        (["plan", "--lengths", "4g"], "--lengths: got '4g'"),
        (["plan", "--mask", "windw:5"], "Did you mean window:N?"), (["plan", "--gpu", "h1000"], "Did you mean h100?"),
        (["plan", "--model", "meta-llama/Llama-3-8B"], "pass the model's config.json, or a preset. Did"),
        (["plan", "--cp-layouts", "zigzag"], "Did you mean --cp-layout?"),
        (["plan", "--scheme=a2a", "--layer=mamba", "--cp-comm-type=Ring"], "got 'Ring'; allowed: headwise or"),
        (["check", "--layer", "kda", "--scheme", "usp", "--cp", "2"], "check: --scheme: got 'usp'; allowed: headwise"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_rejects_what_is_no_spelling_by_the_name_that_was_typed(words, says, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said


def test_examples_of_help_are_parsed(capsys):
    for name in ("train", "check", "plan", "doctor"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        text = capsys.readouterr().out
        lines = [line.strip() for line in text.partition("\nexamples:\n")[2].splitlines()[:2]]
        assert len(lines) == 2
        for line in lines:
            parsed(line.split()[1:])  # is no error of usage


@pytest.mark.parametrize("name", ["train", "check", "plan"])
def test_help_lists_common_options_and_help_all_every_one(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    shown = {}
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stopped:
            main([name, option])
        assert stopped.value.code == 0
        shown[option] = capsys.readouterr().out
    options = {option: set(re.findall(r"^  (--[a-z-]+)", text, re.M)) for option, text in shown.items()}
    assert options["--help"] <= options["--help-all"]
    assert len(options["--help"]) == len(command(name).COMMON) + 1  # and --help-all
    unlisted = {"train": "--cp-codec", "check": "--codec", "plan": "--codec"}[name]
    assert unlisted in options["--help-all"] - options["--help"]
