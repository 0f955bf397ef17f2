"""The command line answers before it imports torch or Megatron: their imports take seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_cp.apps.train.run_folder import locked
from megatron_cp.cli import case_options, doctor
from megatron_cp.executor import launch
from tests.limits import limit

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "megatron.core", "matplotlib", "plotly", "tokenizers", "triton")

# Runs each command line in one process, and says after each which heavy modules are there.
PROBE = """
import contextlib, io, json, sys
from megatron_cp.cli.main import main
for line in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = main(line)
        except SystemExit as stopped:
            status = stopped.code
    print(json.dumps([line, status, said.getvalue(), [name for name in sys.argv[2:] if name in sys.modules]]))
"""


def answers(lines, cwd=ROOT):
    command = [sys.executable, "-c", PROBE, json.dumps(lines), *HEAVY]
    run = subprocess.run(command, capture_output=True, text=True, timeout=limit(120), cwd=cwd, check=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_help_imports_neither_torch_nor_megatron():
    commands = ("train", "check", "plan", "doctor")
    for line, status, said, heavy in answers([["--help"], *([name, "--help"] for name in commands)]):
        assert status == 0, line
        assert "usage: megatron-cp" in said
        assert heavy == [], line


@pytest.fixture
def refused_lines(tmp_path):
    """Command lines whose paths lead nowhere, and what is said of each."""
    taken, file, rotten, empty = (tmp_path / name for name in ("taken", "file", "rotten", "empty"))
    busy, unsaved = tmp_path / "busy", tmp_path / "unsaved"
    for folder in (taken, rotten, empty, busy, unsaved):
        folder.mkdir()
    (unsaved / "options.json").write_text("{}")
    (unsaved / "metrics.jsonl").write_text("{}\n")
    (taken / "metrics.jsonl").write_text("{}\n")
    (rotten / "options.json").write_text('{"data_path": "no/such/data"}')
    file.touch()
    pair = tmp_path / "pair"
    pair.with_suffix(".bin").touch()
    nul = "a\0b"
    with locked(busy, "run_dir"):
        yield {
            ("train", "--data-path", "no/such/folder"): "--data-path: got 'no/such/folder'; allowed: a folder, a .",
            ("train", "--data-path", str(pair)): "Read .bin/.idx data in a Megatron job of your own, such as examples",
            ("train", "--data-path", str(pair) + ".bin"): "Read .bin/.idx data in a Megatron job of your own",
            ("plan", "--documents", "3", "--corpus", str(pair)): "Read .bin/.idx data in a Megatron job of your own",
            ("train", "--data-path", nul): r"--data-path: got 'a\x00b'",
            ("train", "--tokenizer-model", "no/such/file"): "--tokenizer-model: got 'no/such/file'",
            ("train", "--tokenizer-model", str(tmp_path)): "Not a file.",
            ("train", "--run-dir", str(file)): "a folder that can be written. File exists.",
            ("train", "--run-dir", str(file / "below")): "a folder that can be written. Not a directory.",
            ("train", "--run-dir", str(taken)): "The folder has the steps of a run, but no checkpoint: a run saves one",
            ("train", "--wandb", "x"): "--wandb: there is no such option. metrics.jsonl in the run's folder has",
            ("train", "--resume", "no/such/run"): "--resume: got 'no/such/run'; allowed: the folder of a run.",
            ("train", "--resume", nul): r"--resume: got 'a\x00b'",
            ("train", "--resume", str(rotten)): "--data-path: got 'no/such/data'",
            ("plan", "--documents", "3", "--corpus", "no/such/folder"): "--corpus: got 'no/such/folder'",
            ("check", "--report", "page.txt"): "ending in .html",
            ("train", "--report", "no/such/page.html"): "--report: got 'no/such/page.html'",
            ("plan", "--plot", "no/such/folder/plan.png"): "--plot: got 'no/such/folder/plan.png'",
            ("plan", "--plot", "a\0b.png"): r"--plot: got 'a\x00b.png'",
            ("plan", "--plot", "plan.txt"): "ending in .png",
            ("train", "--data-path", str(empty)): "Nothing is there.",
            ("train", "--run-dir", str(busy)): "allowed: a folder in which no run is under way. A run is under",
            ("train", "--resume", str(unsaved)): "no checkpoint: a run saves one every --save-interval",
            ("doctor", "--megatron", "--num-layerz", "3"): "--num-layerz is no flag of megatron-core 0.19",
        }


def test_rejects_paths_that_lead_nowhere_without_importing_torch(refused_lines):
    for line, status, said, heavy in answers(list(refused_lines)):
        assert status == 2, (line, said)
        assert said.count("\n") == 1, said
        assert said.startswith(f"megatron-cp {line[0]}: --")
        assert refused_lines[tuple(line)] in said
        assert heavy == [], line


def test_rejects_usage_without_importing_torch():
    lines = [[], ["chekc"], ["check", "--cp", "0"], ["plan", "--no-such"], ["train", "--lr", "fast"], ["bench"]]
    lines += [["check", "--layer", "attn"], ["doctor", "--megatron"]]
    lines += [["check", "--layer", "gdn", "--mask", "window:4"]]
    for line, status, said, heavy in answers(lines):
        assert (status, said.count("\n"), heavy) == (2, 1, []), (line, said)


def test_plan_imports_no_torch():
    lines = [
        ["plan", "--cp", "8", "--json"],
        ["plan", "--cp", "4", "--layout", "balanced", "--scheme", "exact", "--softcap", "2", "--dtype", "float16"],
        ["plan", "--cp", "8", "--layer", "gdn", "--model", "qwen3-next"],
        ["plan", "--cp", "6", "--layer", "mamba", "--scheme", "redistribute", "--transport", "hierarchical"],
    ]
    refused = [["plan", "--dropout", "1"], ["plan", "--softmax-scale", "nan"]]
    for line, status, said, heavy in answers([*lines, *refused]):
        assert (status, heavy) == (2 if line in refused else 0, []), (line, said)
        assert line not in refused or said.startswith(f"megatron-cp plan: {line[1]}: got ")


def test_doctor_judges_a_megatron_job_without_importing_torch_or_megatron():
    judged = [*doctor.EXAMPLES[1].split(), "--cp-comm-type", "a2a", "--num-attention-heads", "8", "--hidden-size", "64"]
    for line, status, said, heavy in answers([doctor.EXAMPLES[1].split(), judged, [*judged, "--qk-clip"]]):
        assert (status, heavy) == (int("--qk-clip" in line), []), (line, said)
        assert said.startswith("NOT READY: refused: --qk-clip" if status else "READY: no flag is refused")


def test_ranks_are_of_the_kinds_that_can_be_launched():
    assert case_options.RANK_KINDS == launch.RANK_KINDS  # the command line must not import the latter
