"""`megatron-cp train` as a user runs it: what it prints and writes, resuming, Ctrl-C and kills, refusals, torchrun.

Some commands are new processes, whose ranks import Megatron; the others run in this process, and their ranks are forks.
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest
import torch

pytest.importorskip("megatron.core")


from megatron_cp.apps.train import command as train
from megatron_cp.cli.main import main
from tests.commands import reported
from tests.functional_tests.train_runs import (
    BATCH,
    COMMAND,
    ENVIRONMENT,
    GPT,
    HYBRID,
    KEYS,
    LENGTHS,
    LIMIT,
    ROOT,
    STEPS,
    TORCHRUN,
    assert_metrics,
    losses_of,
    metrics_of,
    report_of,
    run_command,
    run_without_a_break,
    tokenized,
    write_documents,
)

pytestmark = pytest.mark.timeout(600)  # every rank imports Megatron, which takes a busy machine its time


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    return run_without_a_break(data, tmp_path_factory.mktemp("uninterrupted") / "run")


def test_compares_and_goes_on_at_another_size(data, uninterrupted, tmp_path, capsys):
    folder = tmp_path / "run"
    first = [*HYBRID, *STEPS, *BATCH, "--cp-layout", "contiguous", "--train-iters", "4", "--save-interval", "3"]
    first += ["--data-path", str(data), "--run-dir", str(folder), "--context-parallel-size", "2"]
    done = run_command(*first, "--compare", "--json")
    assert done.returncode == 0, done.stderr
    report = report_of(done.stdout)
    assert set(report) == KEYS
    assert_compared(report, 4)
    assert report["run_dir"] == str(folder)
    assert report["final_loss"] < report["first_loss"] - 0.1
    assert_metrics(folder, data, 4, 2)
    entries = metrics_of(folder)
    assert [report["first_loss"], report["final_loss"]] == [entries[0]["loss"], entries[-1]["loss"]]
    assert report["pad_tokens"] == sum(entry["pad_tokens"] for entry in entries)
    assert f"{len(LENGTHS)} documents, {sum(LENGTHS) + len(LENGTHS)} tokens, the longest 251" in done.stderr
    assert "skipped 1 empty, 1 not UTF-8" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    for name in ("loss.png", "plan.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (folder / "checkpoints" / "iter_0000003").is_dir()
    assert not list(folder.rglob("first_gradients*"))

    again = ["--resume", str(folder), "--context-parallel-size", "3", "--train-iters", "8", "--compare", "--json"]
    assert main(["train", *again]) == 0
    report = report_of(capsys.readouterr().out)
    assert_compared(report, 4)
    assert_metrics(folder, data, 8, 2)
    assert_metrics(folder / "one_rank", data, 8, 2)
    assert [report["first_loss"], report["final_loss"]] == [losses_of(folder)[4], losses_of(folder)[7]]
    np.testing.assert_allclose(losses_of(folder), losses_of(uninterrupted), rtol=0, atol=1e-4)
    assert_left(folder)
    options = json.loads((folder / "options.json").read_text())
    assert (options["context_parallel_size"], options["cp_layout"], options["train_iters"]) == (3, "contiguous", 8)


def assert_left(folder):
    """Checks that the folder has nothing that no one asked for, and how both parts of the run came to be."""
    names = {"checkpoints", "metrics.jsonl", "one_rank", "options.json", "run.json", ".lock", "loss.png", "plan.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert {path.name for path in (folder / "one_rank").iterdir()} == {"metrics.jsonl"}
    record = json.loads((folder / "run.json").read_text())
    (before,) = record["before"]
    assert [each["options"]["context_parallel_size"] for each in (before, record)] == [2, 3]
    assert [each["result"]["steps"] for each in (before, record)] == [4, 4]
    assert before["started"] <= before["ended"] <= record["started"] <= record["ended"]
    assert f"--resume {folder}" in record["command"]
    assert record["environment"]["threads"] == 1
    assert record["environment"]["versions"]["numpy"] == np.__version__


def assert_compared(report, steps):
    assert report["steps"] == steps
    assert 0 <= report["max_loss_diff"] <= 1e-4
    assert 0 < report["first_step_grad_diff"] <= 5e-6  # no two sizes sum in the same order
    assert report["tokens_per_second"] > 0


def test_replicas_are_one_rank_with_the_same_batch(data, uninterrupted, tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = [*HYBRID, *STEPS, *BATCH, "--train-iters", "4", "--data-parallel-size", "2", "--json"]
    assert main(["train", *arguments, "--data-path", str(data), "--run-dir", str(folder)]) == 0
    report = report_of(capsys.readouterr().out)
    assert (report["max_loss_diff"], report["first_step_grad_diff"]) == (None, None)
    assert_metrics(folder, data, 4, 2)
    for ours, theirs in zip(metrics_of(folder), metrics_of(uninterrupted)[:4], strict=True):
        assert abs(ours["loss"] - theirs["loss"]) <= 1e-4
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) <= 1e-4
        assert ours["loss_tokens"] == theirs["loss_tokens"]


@pytest.mark.thorough
def test_runs_under_torchrun_and_prints_once(data, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    arguments = [*HYBRID, *STEPS, *BATCH, "--train-iters", "4", "--context-parallel-size", "2", "--compare", "--json"]
    done = run_command(*arguments, "--data-path", str(data), "--run-dir", str(folder), command=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"run_dir"') == 1
    report = report_of(done.stdout)
    assert set(report) == KEYS
    assert_compared(report, 4)
    assert_metrics(folder, data, 4, 2)
    np.testing.assert_allclose(losses_of(folder), losses_of(uninterrupted)[:4], rtol=0, atol=1e-4)


def test_rejects_under_torchrun_without_waiting_for_ever(data, uninterrupted):
    # Only the first rank sees it.
    arguments = [*HYBRID, *STEPS, "--context-parallel-size", "2", "--data-path", str(data)]
    done = run_command(*arguments, "--run-dir", str(uninterrupted), command=TORCHRUN)
    assert done.returncode != 0
    assert f"megatron-cp train: --run-dir: got '{uninterrupted}'" in done.stderr
    assert len(metrics_of(uninterrupted)) == 8


def jsonl(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} " * number}) + "\n" for number in (3, 60, 1, 40)))
    return ["--data-path", str(path)]


def conversations(tmp_path):
    """Writes a pack in which 6 of 14 and 5 of 31 tokens are learnt."""
    messages = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "two"}]
    path = tmp_path / "chat.jsonl"
    lines = [{"prompt": "question", "answer": "reply"}, {"messages": messages}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--data-path", str(path)]


VARIANTS = {
    "gpt": (jsonl, [*GPT, "--cp-comm-type", "a2a", "auto", "--cp-layout", "random"], "4 documents, "),
    "conversations": (conversations, [*GPT, "--cp-layout", "contiguous"], "2 documents, "),
    # Three key heads on two ranks.
    "gdn": (
        tokenized,
        [
            *HYBRID, "--linear-num-key-heads", "3", "--linear-num-value-heads", "3", "--qk-layernorm",
            "--recompute-granularity", "selective", "--cp-layout", "auto",
        ],
        "1 document, 301 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_compares_models_and_data(variant, tmp_path, capsys):
    write, arguments, says = VARIANTS[variant]
    arguments = [*arguments, *STEPS, *write(tmp_path), "--train-iters", "3", "--run-dir", str(tmp_path / "run")]
    text, report = reported(["train", *arguments, "--context-parallel-size", "2", "--compare"])
    assert says in capsys.readouterr().err
    assert "CP=2 and CP=1 agree" in text
    assert_compared(report, 3)
    entries = metrics_of(tmp_path / "run")
    assert len(entries) == 3
    if variant == "conversations":  # "reply", "two" and a new line, and the ends
        assert {entry["loss_tokens"] for entry in entries} == {11}


def heed_interrupts():
    """Handles Ctrl-C as a terminal's processes do; background jobs, and their children, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def started(arguments, log, launcher=()):
    """The command in a process group of its own, as a terminal starts it; what it prints goes to `log`."""
    with log.open("w") as out:
        run = subprocess.Popen(
            [*(launcher or COMMAND), *arguments], stdout=out, stderr=out, cwd=ROOT, env=ENVIRONMENT,
            start_new_session=True, preexec_fn=heed_interrupts,
        )  # fmt: skip
    try:
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


def ranks_of(run):
    """The processes of the ranks, in their order."""
    children = sorted(psutil.Process(run.pid).children(), key=lambda child: (child.create_time(), child.pid))
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def nothing_left(group):
    """True if no process of the group runs."""
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return not alive


def steps_in(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["local ranks", "torchrun"])
def test_a_sigterm_ends_a_run_as_ctrl_c_does(launcher, data, tmp_path):
    """Sent to the launcher alone, as schedulers do; torchrun passes it on to the ranks."""
    folder, log = tmp_path / "run", tmp_path / "log"
    job = [*HYBRID, *STEPS, "--data-path", str(data), "--context-parallel-size", "2", "--run-dir", str(folder)]
    with started([*job, "--train-iters", "100000", "--save-interval", "3"], log, launcher) as run:
        wait_for(lambda: steps_in(folder) >= 4, "four steps")
        run.terminate()
        assert run.wait(LIMIT) == (1 if launcher else 130)
        wait_for(lambda: nothing_left(run.pid), "the end of every rank")
    found = json.loads((folder / "run.json").read_text())
    assert found["ended"] is not None
    assert found["result"]["steps"] == steps_in(folder)
    assert re.match(r"interrupted by SIGTERM after step \d+ of 100000; the last checkpoint is of step", found["error"])
    assert f"To go on from there: --resume {folder}" in log.read_text()


@pytest.mark.thorough
def test_goes_on_after_ctrl_c_and_kills(data, tmp_path, capsys):
    folder, log, run_dir = tmp_path / "run", tmp_path / "log", ["--run-dir", str(tmp_path / "run")]
    new = [*HYBRID, *STEPS, "--data-path", str(data), "--context-parallel-size", "2", *run_dir]
    new += ["--train-iters", "100000", "--save-interval", "3"]
    resumed = ["--resume", str(folder)]

    # While the ranks still import.
    with started(new, log) as run:
        wait_for(lambda: "Writing to" in log.read_text(), "the start")
        wait_for(lambda: len(ranks_of(run)) == 2, "the ranks")
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(LIMIT) == 130
        wait_for(lambda: nothing_left(run.pid), "the end of every rank")
    said = "interrupted by Ctrl-C before the first step; nothing was saved. To start again, run the same command"
    assert log.read_text().splitlines()[1:] == [f"megatron-cp train: {said}"]
    assert steps_in(folder) == 0

    # In the middle, in a folder that has no steps yet; and again, by one who is impatient.
    with started(new, log) as run:
        wait_for(lambda: steps_in(folder) >= 5, "five steps")
        os.killpg(run.pid, signal.SIGINT)
        time.sleep(0.3)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(LIMIT) == 130
        wait_for(lambda: nothing_left(run.pid), "the end of every rank")
    last = log.read_text().splitlines()[-1]
    assert re.fullmatch(
        r"megatron-cp train: interrupted by Ctrl-C after step \d+ of 100000; the last checkpoint is of step \d+. "
        rf"To go on from there: --resume {folder}", last,
    )  # fmt: skip
    assert "Traceback" not in log.read_text()
    assert "Warning" not in log.read_text()

    # What a killed run can leave behind: a line and a checkpoint that are not whole.
    done = steps_in(folder)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(f'{{"step": {done + 1}, "lo')
    last = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert last % 3 == 0
    assert done - 3 <= last <= done  # the latest one may have been interrupted
    for later in (last + 3, last + 300):
        half = folder / "checkpoints" / f"iter_{later:07d}"
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(folder / "checkpoints" / f"iter_{last:07d}", half)
        (half / "metadata.json").unlink()
        os.truncate(half / "__0_0.distcp", 1000)

    log.unlink()
    with started(resumed, log) as run:
        wait_for(lambda: steps_in(folder) >= last + 4, "four more steps")  # one more checkpoint, where the half one was
        ranks_of(run)[1].kill()
        assert run.wait(LIMIT) == 1
        wait_for(lambda: nothing_left(run.pid), "the end of every rank")
    assert "megatron-cp train: rank 1 of 2 was killed" in log.read_text().splitlines()[-1]
    assert "Traceback" not in log.read_text()
    last = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())

    capsys.readouterr()
    assert main(["train", *resumed, "--context-parallel-size", "1", "--train-iters", str(last + 2), "--json"]) == 0
    assert report_of(capsys.readouterr().out)["steps"] == 2
    assert_metrics(folder, data, last + 2)


def test_losses_that_are_no_numbers_fail_and_are_null(data, tmp_path, capsys, monkeypatch):
    def diverged(run, *others):
        lines = [json.dumps({"step": step, "loss": math.nan}) for step in (1, 2)]
        (run.folder / "metrics.jsonl").write_text("\n".join(lines))
        run.first_gradients.mkdir(parents=True, exist_ok=True)
        torch.save({"weight": torch.ones(3)}, run.first_gradients / "first_gradients.pt")
        nothing = {"steps": 2, "first_loss": math.nan, "final_loss": math.nan}
        return nothing | {"tokens_per_second": 1.0, "pad_tokens": 0, "threads": 1}

    monkeypatch.setattr(train, "_train", diverged)
    arguments = [*HYBRID, *STEPS, "--train-iters", "2", "--data-path", str(data), "--run-dir", str(tmp_path / "run")]
    text, report = reported(["train", *arguments, "--compare"], status=1)
    assert "DO NOT AGREE" in text
    assert (report["final_loss"], report["max_loss_diff"], report["first_step_grad_diff"]) == (None, None, 0)


def test_training_with_a_codec_stays_beside_one_rank_and_says_how_close(data, tmp_path, capsys):
    """Gradients of the first step are off by what the codec loses, and losses hardly: `--compare` knows the limits."""
    folder = tmp_path / "run"
    wire = ["--cp-codec", "fp8", "--cp-comm-type", "p2p", "--linear-cp-mode", "headwise"]
    arguments = [*HYBRID, *STEPS, *wire, "--train-iters", "3", "--context-parallel-size", "2", "--compare"]
    text, report = reported(["train", *arguments, "--data-path", str(data), "--run-dir", str(folder)])
    assert "0.2 for gradients" in text
    assert 1e-4 < report["first_step_grad_diff"] < 0.2  # it was coded
    assert 0 < report["max_loss_diff"] < 0.02
