"""The parts of `megatron-cp train` that need no ranks: its verdict, its log, the options of a run that goes on."""

import argparse
import dataclasses
import json
import math

import pytest

pytest.importorskip("megatron.core")

from megatron_cp.apps.train import command as train
from megatron_cp.apps.train.loop import _Log
from megatron_cp.apps.train.options import Run, TrainingOptions
from megatron_cp.cli.main import main


@pytest.mark.parametrize(
    ("loss_diff", "gradient_diff", "agrees"),
    [
        (None, None, True), (0.0, 0.0, True), (1e-3, 1e-5, True), (1.1e-3, 0.0, False), (0.0, 1.1e-5, False),
        (math.nan, 0.0, False), (0.0, math.nan, False),
    ],
)  # fmt: skip
def test_two_runs_agree_up_to_rounding(loss_diff, gradient_diff, agrees):
    data = {"max_loss_diff": loss_diff, "first_step_grad_diff": gradient_diff}
    assert train.agrees(data, TrainingOptions()) is agrees
    assert train.agrees(data, TrainingOptions(bf16=True))


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--cp-codec", "fp8"], "--cp-codec"),
        (["--cp-transport", "pairwise", "--cp-head-chunks", "2"], "--cp-transport and --cp-head-chunks"),
    ],
)
def test_rejects_a_comparison_of_what_one_rank_does_not_do(flags, named, capsys):
    assert main(["train", "--compare", *flags]) == 2
    error = capsys.readouterr().err
    assert f"--context-parallel-size: got 1; allowed: 2 or more with --compare and {named}. One rank sends" in error


def test_compare_says_the_limits_of_codecs(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "losses by more than 0.001; with --cp-codec, gradients by more than 0.2 (fp8), 0.4" in said
    assert "(int8) or losses by more than 0.02" in said


def test_every_option_is_a_flag_of_its_type():
    given = {
        "lr": "0.5", "train_iters": "7", "tokenizer_model": "file", "spec": "a b",
        "cp_comm_type": "a2a auto", "save_interval": "3",
    }  # fmt: skip
    arguments = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", *value.split())]
    expected = TrainingOptions(
        lr=0.5, train_iters=7, tokenizer_model="file", spec=("a", "b"), cp_comm_type=("a2a", "auto"),
        save_interval=3, qk_layernorm=True, lr_warmup_iters=1,
    )  # fmt: skip
    assert train._options(parsed(*arguments, "--qk-layernorm")) == expected
    assert train._options(parsed()) == TrainingOptions()
    for entry in dataclasses.fields(TrainingOptions):
        assert entry.name not in parsed(), entry.name  # absent unless given


def test_a_run_goes_on_with_its_options_and_what_is_given(tmp_path):
    saved = TrainingOptions(lr=0.5, qk_layernorm=True, cp_comm_type=("a2a", "auto"))
    (tmp_path / "options.json").write_text(json.dumps(dataclasses.asdict(saved)))
    assert train._options(parsed("--resume", str(tmp_path))) == saved
    changed = train._options(parsed("--resume", str(tmp_path), "--no-qk-layernorm", "--train-iters", "7", "--lr", "0"))
    assert changed == dataclasses.replace(saved, lr=0, qk_layernorm=False, train_iters=7)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 100_000, "Cannot read options.json: maximum recursion depth exceeded"),
        # Neither a command line nor the options of a run that goes on make the trainer import a module.
        ('{"spec": ["os", "x"]}', "spec: got 'os x'; allowed: megatron_cp.megatron.specs hybrid_stack_spec or "),
        ('{"spec": 5}', "Cannot read options.json"), ('{"no_such_option": 1}', "Cannot read options.json"),
        ('{"lr": "fast"}', "Cannot read options.json"), ("[1]", "Cannot read options.json"),
        ("{", "Cannot read options.json"), ('{"lr": NaN}', "lr: got nan"),
        ('{"seq_length": 1e400}', "seq_length: got inf; allowed: a finite number of at least 2."),
    ],
    ids=lambda value: value[:20],
)  # fmt: skip
def test_rejects_options_that_no_run_has_written(content, says, tmp_path, capsys):
    (tmp_path / "options.json").write_text(content)
    assert main(["train", "--resume", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"megatron-cp train: --resume: got '{tmp_path}'; allowed: the folder of a run.")
    assert says in printed
    assert len(printed.splitlines()) == 1


def logged(folder, start, steps, cp_size=1):
    log = _Log(Run(TrainingOptions(train_iters=9, context_parallel_size=cp_size), folder), 0, start)
    for step in steps:
        log.step({"step": step, "loss": float(step), "tokens": 10 * step, "pad_tokens": 1}, 0.5)
    log.close()
    return log.summary()


def written(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_go_on_behind_the_checkpoint(tmp_path):
    logged(tmp_path, 0, [1, 2, 3, 4, 5])
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 6, "loss": 0.')
    logged(tmp_path, 3, [4, 5])
    assert written(tmp_path) == [1, 2, 3, 4, 5]
    logged(tmp_path, 0, [1])
    assert written(tmp_path) == [1]
    logged(tmp_path / "elsewhere", 3, [4])
    assert written(tmp_path / "elsewhere") == [4]


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": null}', "[" * 100_000, '{"step": "x"}', "7"])
def test_lines_that_are_no_metrics_are_left_out(line, tmp_path):
    logged(tmp_path, 0, [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write(line + "\n")
    logged(tmp_path, 2, [3])
    assert written(tmp_path) == [1, 2, 3]


def test_the_summary_leaves_out_the_first_steps_time(tmp_path):
    assert logged(tmp_path, 0, [1]) == {
        "steps": 1, "first_loss": 1.0, "final_loss": 1.0, "tokens_per_second": 20.0, "pad_tokens": 1
    }  # fmt: skip
    summary = logged(tmp_path, 0, [1, 2, 3])
    assert summary["tokens_per_second"] == (20 + 30) / 1.0
    assert (summary["steps"], summary["pad_tokens"], summary["final_loss"]) == (3, 3, 3.0)
