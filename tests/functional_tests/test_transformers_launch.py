"""The script and the launch lines of docs/trainers.md, as they are printed, on CPUs."""

import contextlib
import importlib.util
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import limit

if not all(importlib.util.find_spec(name) for name in ("accelerate", "transformers")):
    pytest.skip("the trainers are not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/trainers.md").read_text()
JOINED = PAGE.replace("\\\n", "")  # lines that the page breaks
LINES = re.findall(r"^(?:torchrun|accelerate launch) .*$", JOINED, re.MULTILINE)
LINES += re.findall(r"`(accelerate launch --config_file .*?)`", PAGE)
SAID = re.compile(r"^ *parallelism_config=.*\n", re.MULTILINE)
TRAINED = {"SFT": "class LongSFTTrainer", "DPO": "class LongDPOTrainer", "GRPO": "class LongGRPOTrainer"}
TRAINED_PRINTED = re.compile(r"(SFT|DPO), cp_size 2, loss ([\d.]+)")
LOSS_PRINTED = re.compile(r"cp_size 2, eval_loss ([\d.]+)")


def block(language, holding=""):
    """Returns the page's first block of a language that holds a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return next(text for text in blocks if holding in text)


def printed_by_the_page(folder, holding=""):
    """Returns what a script of the page prints on this rank, all but its last line run."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    script, _, end = block("python", holding).rstrip().rpartition("\n")
    assert end == "trainer.accelerator.end_training()"  # which leaves the process group
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(compile(script, "train.py", "exec"), {})
    return printed.getvalue()


def launched(line, folder):
    """Returns what a line prints in a folder; torchrun takes a port that is free, and not the same for all tests."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = subprocess.run(
        line.split(), cwd=folder, capture_output=True, text=True, timeout=limit(120), check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
             "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(folder), "CUDA_VISIBLE_DEVICES": "",
             "PET_MASTER_PORT": str(port)},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def trained_like_the_page(name, printed):
    """Asserts that a script of TRL's trainer printed the loss that the page names."""
    ((_, expected),) = [each for each in TRAINED_PRINTED.findall(PAGE) if each[0] == name]
    found = [float(loss) for trainer, loss in TRAINED_PRINTED.findall(printed) if trainer == name]
    assert found == [pytest.approx(float(expected), abs=1e-2)]  # in bf16, TRL's default


def rewarded_alike(printed):
    """Asserts that both ranks printed one reward of the page's script for GRPO, whose completions are random."""
    rewards = re.findall(r"GRPO, cp_size 2, reward ([\d.]+)", printed)
    assert rewards == rewards[:1] * 2
    assert 0 < float(rewards[0]) < 1


def logged(trainer, unlike):
    """Returns all numbers that a trainer has logged, but for those in whose names is one of the words `unlike`."""
    return {
        f"{key} {number}": value
        for number, entry in enumerate(trainer.state.log_history)
        for key, value in entry.items()
        if not any(word in key for word in unlike)
    }


def assert_near(ours, stock, **near):
    """Asserts that two trainers have the same numbers within `rel` and `abs`."""
    assert set(ours) == set(stock)
    assert {key: (ours[key], stock[key]) for key in stock if ours[key] != pytest.approx(stock[key], **near)} == {}


# The tests of each trainer run the page's scripts by forks, which import nothing again.
@pytest.mark.thorough
@pytest.mark.parametrize("line", LINES)
def test_launch_lines_run_as_printed(line, tmp_path):
    script = block("python")
    (tmp_path / "train.py").write_text(script if line.startswith("torchrun") else SAID.sub("", script))
    (tmp_path / "cp2.yaml").write_text(block("yaml"))
    expected = float(LOSS_PRINTED.search(PAGE)[1])
    printed = LOSS_PRINTED.findall(launched(line, tmp_path))
    assert [float(loss) for loss in printed] == [pytest.approx(expected, abs=1e-3)] * 2
