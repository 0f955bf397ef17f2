"""`megatron-cp train` as a user runs it: what it prints and writes, resuming, Ctrl-C and kills, refusals, torchrun.

Some commands are new processes, whose ranks import Megatron; the others are forks, which have it and differ in no more.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.validation import save_integrity_manifest

from megatron_cp.cli import train
from megatron_cp.cli.main import main
from megatron_cp.data.corpus import read_corpus
from megatron_cp.data.stream import PackedStream
from megatron_cp.data.tokenizer import ByteTokenizer
from megatron_cp.megatron.train.checkpoint import latest_checkpoint
from megatron_cp.megatron.train.digests import check_digests
from megatron_cp.megatron.train.run_folder import locked
from tests.forked_commands import forked, run_forked
from tests.unit_tests.megatron.indexed_files import write_indexed
from tests.unit_tests.megatron.train.evil import Evil

pytestmark = pytest.mark.timeout(600)  # every rank imports Megatron, which takes a busy machine its time

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megatron_cp.cli.main", "train"]
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
    "-m", "megatron_cp.cli.main", "train",
]  # fmt: skip
# On the CPU wherever this runs, and on one thread.
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
AS_COMMAND = {"environment": {"CUDA_VISIBLE_DEVICES": ""}, "folder": ROOT}
LIMIT = 200
KEYS = {
    "steps", "first_loss", "final_loss", "max_loss_diff", "first_step_grad_diff", "tokens_per_second", "pad_tokens",
    "run_dir",
}  # fmt: skip

SEQ_LENGTH, SEED = 96, 7
SHAPE = [
    "--hidden-size", "32", "--ffn-hidden-size", "48", "--num-attention-heads", "2", "--num-query-groups", "1",
    "--kv-channels", "16", "--linear-num-key-heads", "1", "--linear-num-value-heads", "2",
    "--linear-key-head-dim", "8", "--linear-value-head-dim", "8", "--device", "cpu",
]  # fmt: skip
HYBRID = [*SHAPE, "--hybrid-layer-pattern", "G*-"]
GPT = [*SHAPE, "--spec", "megatron_cp.megatron.specs", "gpt_layer_spec", "--num-layers", "2"]
STEPS = ["--seq-length", str(SEQ_LENGTH), "--seed", str(SEED), "--lr", "5e-3", "--lr-warmup-iters", "1"]
BATCH = ["--global-batch-size", "2"]
# Of documents: one token, more than two packs, and little ones. With ends of documents 7 packs an epoch.
LENGTHS = (7, 1, 130, 64, 2, 33, 250, 90, 11)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of documents, with a file that is empty and one that is not UTF-8."""
    folder = tmp_path_factory.mktemp("data")
    for number, length in enumerate(LENGTHS):
        (folder / f"{number}.txt").write_text((f"{number} and on, " * length)[:length])
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin1.txt").write_bytes(b"caf\xe9")
    return folder


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """A run of 8 steps on one rank."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    arguments = [*HYBRID, *STEPS, *BATCH, "--train-iters", "8", "--data-path", str(data), "--run-dir", str(folder)]
    with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
        assert main(["train", *arguments]) == 0
    return folder


def report_of(out):
    def no_number(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(out.strip().splitlines()[-1], parse_constant=no_number)


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder):
    return [entry["loss"] for entry in metrics_of(folder)]


def tokens_of_steps(data, steps, packs):
    """How many tokens each step must have seen, from the stream alone: which documents, and in which order."""
    stream = PackedStream(read_corpus(data, ByteTokenizer()), SEQ_LENGTH, SEED)
    return [sum(stream.pack(step * packs + pack)[0].total for pack in range(packs)) for step in range(steps)]


def assert_metrics(folder, data, steps, packs=1):
    """One line for each step, of finite numbers, for the documents that belong there."""
    entries = metrics_of(folder)
    assert [entry["step"] for entry in entries] == list(range(1, steps + 1))
    assert all(math.isfinite(value) for entry in entries for value in entry.values())
    assert [entry["tokens"] for entry in entries] == tokens_of_steps(data, steps, packs)


def assert_picture(path):
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


# -- what it prints and writes, and how it goes on -------------------------------------------------------------------


def test_compares_and_goes_on_at_another_size(data, uninterrupted, tmp_path, capsys):
    folder = tmp_path / "run"
    first = [*HYBRID, *STEPS, *BATCH, "--cp-layout", "contiguous", "--train-iters", "4", "--save-interval", "3"]
    first += ["--data-path", str(data), "--run-dir", str(folder), "--context-parallel-size", "2"]
    done = run_forked(["train", *first, "--compare", "--json"], tmp_path, timeout=LIMIT, **AS_COMMAND)
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
    assert_picture(folder / "loss.png")
    assert_picture(folder / "plan.png")
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (folder / "checkpoints" / "iter_0000003").is_dir()
    assert not list(folder.rglob("first_gradients*"))

    again = ["--resume", str(folder), "--context-parallel-size", "3", "--train-iters", "8", "--compare", "--json"]
    assert main(["train", *again]) == 0
    report = report_of(capsys.readouterr().out)
    assert_compared(report, 4)
    assert_metrics(folder, data, 8, 2)
    assert_metrics(folder / "reference", data, 8, 2)
    assert [report["first_loss"], report["final_loss"]] == [losses_of(folder)[4], losses_of(folder)[7]]
    np.testing.assert_allclose(losses_of(folder), losses_of(uninterrupted), rtol=0, atol=1e-4)
    options = json.loads((folder / "options.json").read_text())
    assert (options["context_parallel_size"], options["cp_layout"], options["train_iters"]) == (3, "contiguous", 8)


def assert_compared(report, steps):
    assert report["steps"] == steps
    assert 0 <= report["max_loss_diff"] <= 1e-4
    assert 0 < report["first_step_grad_diff"] <= 5e-6  # no two sizes sum in the same order
    assert report["tokens_per_second"] > 0


@pytest.mark.parametrize("even", [[], ["--cp-even-packs"]], ids=["best-fit", "even-packs"])
def test_replicas_are_one_rank_with_the_same_batch(even, data, uninterrupted, tmp_path, capsys):
    """Also where documents of a step are in other packs."""
    folder = tmp_path / "run"
    arguments = [*HYBRID, *STEPS, *BATCH, *even, "--train-iters", "4", "--data-parallel-size", "2", "--json"]
    assert main(["train", *arguments, "--data-path", str(data), "--run-dir", str(folder)]) == 0
    report = report_of(capsys.readouterr().out)
    assert (report["max_loss_diff"], report["first_step_grad_diff"]) == (None, None)
    assert_metrics(folder, data, 4, 2)
    for ours, theirs in zip(metrics_of(folder), metrics_of(uninterrupted)[:4], strict=True):
        assert abs(ours["loss"] - theirs["loss"]) <= 1e-4
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) <= 1e-4
        assert ours["loss_tokens"] == theirs["loss_tokens"]


def test_runs_under_torchrun_and_prints_once(data, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    arguments = [*HYBRID, *STEPS, *BATCH, "--train-iters", "4", "--context-parallel-size", "2", "--compare", "--json"]
    done = subprocess.run(
        [*TORCHRUN, *arguments, "--data-path", str(data), "--run-dir", str(folder)],
        capture_output=True, text=True, timeout=LIMIT, cwd=ROOT, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("CP=2: 4 steps") == done.stdout.count('"run_dir"') == 1
    report = report_of(done.stdout)
    assert set(report) == KEYS
    assert_compared(report, 4)
    assert_metrics(folder, data, 4, 2)
    np.testing.assert_allclose(losses_of(folder), losses_of(uninterrupted)[:4], rtol=0, atol=1e-4)


def test_rejects_under_torchrun_without_waiting_for_ever(data, uninterrupted):
    # Only the first rank sees it.
    arguments = [*HYBRID, *STEPS, "--context-parallel-size", "2", "--data-path", str(data)]
    done = subprocess.run(
        [*TORCHRUN, *arguments, "--run-dir", str(uninterrupted)],
        capture_output=True, text=True, timeout=LIMIT, cwd=ROOT, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"megatron-cp train: --run-dir: got '{uninterrupted}'" in done.stderr
    assert len(metrics_of(uninterrupted)) == 8


# -- models and data -------------------------------------------------------------------------------------------------


def jsonl(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} " * number}) + "\n" for number in (3, 60, 1, 40)))
    return ["--data-path", str(path)]


def indexed(tmp_path):
    write_indexed(tmp_path / "corpus", [[list(range(1, 1 + length))] for length in (130, 1, 60, 7)])
    return ["--data-path", str(tmp_path / "corpus"), "--vocab-size", "150"]


def tokenized(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["[UNK]", "to", "be", "or", "not", "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "play.txt").write_text("to be or not to be " * 50)
    return ["--data-path", str(tmp_path / "play.txt"), "--tokenizer-model", str(tmp_path / "tokenizer.json")]


VARIANTS = {
    "gpt": (jsonl, [*GPT, "--cp-comm-type", "a2a", "auto", "--cp-layout", "random"], "4 documents, 312 tokens"),
    # Three key heads on two ranks.
    "gpt_gdn": (
        indexed,
        [
            *GPT, "--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "2",
            "--linear-num-key-heads", "3", "--linear-num-value-heads", "3", "--qk-layernorm", "--cp-layout", "auto",
        ],
        "4 documents, 198 tokens",
    ),
    "tensor_parallel": (
        tokenized,
        [
            *HYBRID, "--linear-num-key-heads", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel",
            "--recompute-granularity", "selective", "--cp-layout", "auto",
        ],
        "1 documents, 301 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_compares_models_and_data(variant, tmp_path, capsys):
    write, arguments, says = VARIANTS[variant]
    arguments = [*arguments, *STEPS, *write(tmp_path), "--train-iters", "3", "--run-dir", str(tmp_path / "run")]
    assert main(["train", *arguments, "--context-parallel-size", "2", "--compare", "--json"]) == 0
    printed = capsys.readouterr()
    assert says in printed.err
    assert "CP=2 and CP=1 agree" in printed.out
    assert_compared(report_of(printed.out), 3)
    entries = metrics_of(tmp_path / "run")
    assert len(entries) == 3
    is_chosen = ("--cp-layout", "auto") in itertools.pairwise(arguments)
    assert [entry.get("layout_choice", "")[:14] for entry in entries] == [["", "chosen layout "][is_chosen], "", ""]
    for entry in entries:  # of one pack
        assert sum(entry.get("layouts", {}).values()) == is_chosen


# -- Ctrl-C and kills ------------------------------------------------------------------------------------------------


def heed_interrupts():
    """As a terminal's processes do; a background job of a shell ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def started(arguments, log):
    """The command in a process group of its own, as a terminal starts it; what it prints goes to `log`."""
    with log.open("w") as out:
        run = subprocess.Popen(
            [*COMMAND, *arguments], stdout=out, stderr=out, cwd=ROOT, env=ENVIRONMENT, start_new_session=True,
            preexec_fn=heed_interrupts,
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
    assert log.read_text().splitlines()[1:] == ["megatron-cp train: interrupted"]
    assert steps_in(folder) == 0

    # In the middle, in a folder that has no steps yet; and again, by one who is impatient.
    with started(new, log) as run:
        wait_for(lambda: steps_in(folder) >= 5, "five steps")
        os.killpg(run.pid, signal.SIGINT)
        time.sleep(0.3)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(LIMIT) == 130
        wait_for(lambda: nothing_left(run.pid), "the end of every rank")
    assert log.read_text().endswith("megatron-cp train: interrupted\n")
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
    with forked(["train", *resumed], log, log, **AS_COMMAND) as run:
        wait_for(lambda: steps_in(folder) >= last + 4, "four more steps")  # one more checkpoint, where the half one was
        ranks_of(run)[1].kill()
        run.join(LIMIT)
        assert run.exitcode == 1
        wait_for(lambda: nothing_left(run.pid), "the end of every rank")
    assert "megatron-cp train: rank 1 of 2 was killed" in log.read_text().splitlines()[-1]
    assert "Traceback" not in log.read_text()
    last = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())

    capsys.readouterr()
    assert main(["train", *resumed, "--context-parallel-size", "1", "--train-iters", str(last + 2), "--json"]) == 0
    assert report_of(capsys.readouterr().out)["steps"] == 2
    assert_metrics(folder, data, last + 2)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(data, tmp_path, capsys, monkeypatch):
    """Runs a command that must be refused before any rank starts; returns what it says."""

    def no_rank(*args):
        raise AssertionError("ranks were started")

    def run(*arguments, also=(*HYBRID, *STEPS), train_iters="6"):
        arguments = list(arguments)
        for flag, value in (("--data-path", data), ("--run-dir", tmp_path / "run"), ("--train-iters", train_iters)):
            if not {flag, "--resume"} & set(arguments):
                arguments += [flag, str(value)]
        status = main(["train", *also, *arguments])
        printed = capsys.readouterr()
        assert status == 2, printed
        assert printed.out == ""
        assert not list(tmp_path.rglob("metrics.jsonl"))
        (line,) = printed.err.splitlines()
        return line.removeprefix("megatron-cp train: ")

    monkeypatch.setattr(train, "_train", no_rank)
    return run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--spec", "no.such.module", "name"], "--spec: got 'no.such.module name'"),
        (["--spec", "megatron_cp.megatron.specs", "nothing"], "has no 'nothing'"),
        (["--spec", ".specs", "name"], "Cannot import '.specs'"),
        (["--spec", "json", "JSONDecoder"], "neither a ModuleSpec"),
        (["--spec", "os", "system"], "neither a ModuleSpec"),
        (["--seq-length", "9" * 25], "--seq-length: got"),
        (["--tokenizer-model", "a\0b"], "--tokenizer-model: got"),
        (["--hybrid-layer-pattern", "GX-"], "--hybrid-layer-pattern: got 'GX-'"),
        (["--hybrid-layer-pattern", ""], "--hybrid-layer-pattern: got ''"),
        (["--hybrid-layer-pattern", "G*|-"], "--hybrid-layer-pattern: got 'G*|-'"),
        (["--experimental-attention-variant", "gated_delta_net"], "--experimental-attention-variant: got"),
        (
            ["--cp-layout", "striped"],
            "--cp-layout: got 'striped'; allowed: contiguous or zigzag or random or balanced or auto.",
        ),
        (["--cp-layout", "nonsense"], "--cp-layout: got 'nonsense'"),
        (["--cp-comm-type", "tiled"], "tiled is not built yet; use exact."),
        (["--cp-comm-type", "a2a", "nonsense", "a2a"], "--cp-comm-type: got 'nonsense'"),
        (["--cp-comm-type", "a2a", "a2a"], "one value, or one for each of 3 layers"),
        (["--linear-cp-mode", "ring"], "--linear-cp-mode: got 'ring'"),
        (["--linear-conv-kernel-dim", "65"], "--linear-conv-kernel-dim: got 65"),
        (
            ["--mamba-num-heads", "6", "--mamba-num-groups", "4", "--hybrid-layer-pattern", "M*-"],
            "--mamba-num-groups: got 4",
        ),
        (["--lr-decay-style", "steps"], "--lr-decay-style: got 'steps'; allowed: constant or linear or cosine."),
        (["--device", "tpu"], "--device: got 'tpu'; allowed: auto or cpu or cuda."),
        (["--seq-length", "4", "--context-parallel-size", "5"], "--seq-length: got 4"),
        (["--seq-length", "1"], "--seq-length: got 1; allowed: at least 2"),
        (["--num-attention-heads", "4", "--num-query-groups", "3"], "--num-query-groups: got 3"),
        (["--tensor-model-parallel-size", "4"], "--tensor-model-parallel-size: got 4"),
        (["--context-parallel-size", "0"], "--context-parallel-size: got 0; allowed: at least 1"),
        (["--context-parallel-size", "-2"], "--context-parallel-size: got -2"),
        (["--context-parallel-size", "two"], "--context-parallel-size: got 'two'; allowed: integers"),
        (["--context-parallel-size", "1.5"], "--context-parallel-size: got '1.5'; allowed: integers"),
        (["--context-parallel-size", "65"], "--context-parallel-size: got 65; allowed: at most 64 local ranks"),
        (["--train-iters", "0"], "--train-iters: got 0"),
        (["--save-interval", "0"], "--save-interval: got 0"),
        (["--global-batch-size", "3", "--data-parallel-size", "2"], "--global-batch-size: got 3"),
        (["--lr", "nan"], "--lr: got nan; allowed: a finite number of at least 0"),
        (["--lr", "inf"], "--lr: got inf; allowed: a finite number of at least 0"),
        (["--lr", "fast"], "--lr: got 'fast'; allowed: numbers"),
        (["--min-lr", "1"], "--min-lr: got 1.0; allowed: at most the learning rate"),
        (["--bf16"], "--bf16: got True; allowed: off on cpu"),
        (["--use-distributed-optimizer"], "--use-distributed-optimizer: got True; allowed: off on cpu"),
        (["--no-such-flag"], "--no-such-flag: there is no such option."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_rejects_options(arguments, says, refused):
    assert says in refused(*arguments)


def test_rejects_a_default_by_its_flag(refused):
    found = refused("--num-attention-heads", "3", also=())
    assert found == "--num-query-groups: got 2; allowed: a divisor of the 3 query heads."


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_rejects_cuda_where_there_is_none(refused):
    assert refused("--device", "cuda") == "--device: got 'cuda'; allowed: cpu or auto. This machine has no CUDA device."


def test_rejects_data_that_is_not_there(refused, tmp_path):
    assert refused("--data-path", "no/such/folder").startswith("--data-path: got 'no/such/folder'")
    (tmp_path / "empty").mkdir()
    assert "Nothing is there." in refused("--data-path", str(tmp_path / "empty"))
    (tmp_path / "empty" / "file").touch()
    assert "Skipped: 1 empty." in refused("--data-path", str(tmp_path / "empty"))


def test_rejects_data_that_cannot_be_read(refused, tmp_path):
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    assert "Skipped: 1 not UTF-8." in refused("--data-path", str(tmp_path / "latin1.txt"))
    (tmp_path / "some.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    assert "Line 2 is b'{\"text\": 3}'" in refused("--data-path", str(tmp_path / "some.jsonl"))
    # Its name cannot be looked up, as that of a file in a folder without permission cannot, which root always has.
    too_long = "x" * 300
    assert refused("--data-path", too_long).startswith(f"--data-path: got '{'x' * 199}... (302 characters); allowed")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_rejects_data_without_permission(refused, tmp_path):
    (tmp_path / "locked").mkdir(mode=0)
    assert "--data-path: got" in refused("--data-path", str(tmp_path / "locked" / "some.txt"))


def test_rejects_indexed_data(refused, tmp_path):
    prefix = tmp_path / "corpus"
    write_indexed(prefix, [[[1, 2, 3]]])
    assert refused("--data-path", str(prefix)).startswith("--vocab-size: got None; allowed: the vocabulary")
    assert "unless --data-path is a .bin/.idx pair" in refused("--vocab-size", "300")
    prefix.with_suffix(".idx").write_bytes(b"nothing")
    found = refused("--data-path", str(prefix), "--vocab-size", "300")
    assert found.startswith(f"--data-path: got '{prefix}'")
    prefix.with_suffix(".idx").unlink()
    assert f"There is no {prefix}.idx" in refused("--data-path", str(prefix), "--vocab-size", "300")


def test_rejects_run_dirs(refused, uninterrupted, tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert refused("--run-dir", str(file)) == (
        f"--run-dir: got '{file}'; allowed: a folder that can be written. File exists."
    )
    assert "Not a directory." in refused("--run-dir", str(file / "below"))
    taken = f"--run-dir: got '{uninterrupted}'; allowed: a new folder. A run lives there; to go on: --resume"
    assert refused("--run-dir", str(uninterrupted)) == f"{taken} {uninterrupted}"
    copied = tmp_path / "copied"
    shutil.copytree(uninterrupted, copied, ignore=shutil.ignore_patterns("metrics.jsonl"))
    arguments = ["--resume", str(copied), "--run-dir", str(uninterrupted), "--train-iters", "9"]
    assert refused(*arguments).startswith(taken)
    assert len(metrics_of(uninterrupted)) == 8


def test_rejects_resuming_where_no_run_is(refused, tmp_path):
    assert refused("--resume", str(tmp_path)).startswith(f"--resume: got '{tmp_path}'; allowed: the folder of a run.")
    for content in ("{", "[1]", '{"no_such_option": 1}', '{"lr": "fast"}'):
        (tmp_path / "options.json").write_text(content)
        assert "Cannot read options.json" in refused("--resume", str(tmp_path))


@pytest.fixture
def copied(uninterrupted, tmp_path):
    """A run of 8 steps that a test may damage."""
    shutil.copytree(uninterrupted, tmp_path / "copied", ignore=shutil.ignore_patterns("metrics.jsonl"))
    return tmp_path / "copied"


def test_rejects_resuming_without_a_checkpoint(refused, copied):
    resume = ["--resume", str(copied), "--train-iters", "9"]
    shutil.rmtree(copied / "checkpoints" / "iter_0000008")
    assert "names iter_0000008, which is not there" in refused(*resume, also=())
    shutil.rmtree(copied / "checkpoints")
    found = refused(*resume, also=())
    assert found.startswith(f"--resume: got '{copied}/checkpoints'; allowed: a folder in which a run has saved")


@pytest.mark.parametrize("name", ["metadata.json", ".metadata", "__0_0.distcp"])
def test_rejects_resuming_from_a_damaged_checkpoint(name, refused, copied):
    file = copied / "checkpoints" / "iter_0000008" / name
    for damage in (lambda: os.truncate(file, 60), file.unlink):
        damage()
        found = refused("--resume", str(copied), "--train-iters", "9", also=())
        assert found.startswith(f"--resume: got '{file.parent}'; allowed: a checkpoint of this model")


def flipped(file, byte):
    content = bytearray(file.read_bytes())
    content[byte] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_rejects_resuming_from_a_checkpoint_in_which_a_bit_flipped(share, refused, copied):
    file = copied / "checkpoints" / "iter_0000008" / "__0_0.distcp"
    flipped(file, int(share * file.stat().st_size))
    found = refused("--resume", str(copied), "--train-iters", "9", also=())
    allowed = "a checkpoint of this model whose files are as they were saved"
    assert found == f"--resume: got '{file.parent}'; allowed: {allowed}. __0_0.distcp is damaged."


def evil_metadata(checkpoint, evil):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(evil))


def evil_spare_metadata(checkpoint, evil):
    """torch's loader takes a rank's own where it cannot read that of all."""
    with (checkpoint / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.storage_meta = 5  # on which it fails
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    (checkpoint / "__0.metadata").write_bytes(pickle.dumps(evil))


def evil_object(checkpoint, evil, key="common_state"):
    """In the place of something that is no tensor."""
    with (checkpoint / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    data = checkpoint / "__0_0.distcp"
    end = data.stat().st_size
    with data.open("ab") as file:
        torch.save(evil, file)
    index = next(index for index in metadata.storage_data if key in index.fqn)
    info = metadata.storage_data[index]
    metadata.storage_data[index] = dataclasses.replace(info, offset=end, length=data.stat().st_size - end)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def evil_common_file(checkpoint, evil):
    """Where older checkpoints keep it."""
    torch.save(evil, checkpoint / "common.pt")


@pytest.mark.parametrize("damage", [evil_metadata, evil_spare_metadata, evil_object, evil_common_file])
def test_rejects_resuming_from_a_checkpoint_that_names_a_command(damage, refused, copied, tmp_path):
    """By somebody who knows to make its digests too."""
    checkpoint = copied / "checkpoints" / "iter_0000008"
    damage(checkpoint, Evil(tmp_path / "ran"))
    save_integrity_manifest(str(checkpoint))
    found = refused("--resume", str(copied), "--train-iters", "9", also=())
    assert found.startswith(f"--resume: got '{checkpoint}'; allowed: a checkpoint of this model that megatron-cp train")
    assert "posix.system, which no checkpoint needs" in found or damage is evil_spare_metadata
    assert not (tmp_path / "ran").exists()


def test_rejects_a_checkpoint_that_names_a_command_where_ranks_alone_read(copied, tmp_path, capsys):
    checkpoint = copied / "checkpoints" / "iter_0000008"
    evil_object(checkpoint, Evil(tmp_path / "ran"), "_extra_state")
    save_integrity_manifest(str(checkpoint))
    assert main(["train", "--resume", str(copied), "--train-iters", "9"]) == 2
    assert "Cannot read it: it names posix.system, which no checkpoint needs." in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_rejects_resuming_from_a_checkpoint_without_digests(refused, copied):
    (copied / "checkpoints" / "iter_0000008" / "integrity.json").unlink()
    found = refused("--resume", str(copied), "--train-iters", "9", also=())
    assert "It has no integrity.json: damage would not be noticed." in found


def test_rejects_resuming_a_run_that_is_under_way(refused, copied):
    with locked(copied, "run_dir"):
        found = refused("--resume", str(copied), "--train-iters", "9", also=())
        assert found.startswith(f"--resume: got '{copied}'; allowed: a folder in which no run is under way. A run is")
        assert "A run is under way there" in refused("--run-dir", str(copied))
    assert json.loads((copied / "options.json").read_text())["train_iters"] == 8


def test_rejects_a_run_dir_with_a_checkpoint(refused, copied):
    """Though its metrics are gone: the run would write where the tracker points."""
    assert "A run lives there; to go on: --resume" in refused("--run-dir", str(copied))


def test_rejects_resuming_with_other_betas(refused, copied):
    resume = ["--resume", str(copied), "--train-iters", "9"]
    found = refused(*resume, "--adam-beta2", "0.5", "--adam-beta1", "0.8", also=())
    assert "--adam-beta1 was 0.9, is 0.8; --adam-beta2 was 0.95, is 0.5." in found


def limit_files():
    """To less than a checkpoint, here and in processes that this one starts."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


def test_rejects_a_disk_that_is_full(copied, tmp_path):
    """In one line; what was saved before stays, and what was half written does not."""
    arguments = ["train", "--resume", str(copied), "--train-iters", "9", "--context-parallel-size", "2"]
    done = run_forked(arguments, tmp_path, timeout=LIMIT, before=limit_files, **AS_COMMAND)
    assert done.returncode == 2, done.stderr
    folder = copied / "checkpoints"
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"megatron-cp train: --run-dir: got '{folder}'; allowed: a folder with room for what a run")
    assert "Cannot write iter_0000009: [Errno 27] File too large. " in said
    assert said.endswith(" MB are free there.")
    assert "Traceback" not in done.stderr
    assert "encountered an error" not in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000008", "latest_checkpointed_iteration.txt"]
    assert latest_checkpoint(folder).name == "iter_0000008"
    check_digests(latest_checkpoint(folder))


def test_rejects_a_spec_that_makes_no_spec(data, tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = [*GPT, *STEPS, "--train-iters", "3", "--data-path", str(data), "--run-dir", str(folder)]
    assert main(["train", *arguments, "--spec", "json", "dumps"]) == 2
    assert "--spec: got 'json dumps'" in capsys.readouterr().err
    assert not folder.exists()


def test_rejects_resuming_another_model(refused, copied, tmp_path):
    resume = ["--resume", str(copied), "--train-iters", "9"]
    found = refused(*resume, "--hidden-size", "64", "--hybrid-layer-pattern", "G-", also=())
    assert found.startswith("--resume: got")
    assert "--hidden-size was 32, is 64" in found
    assert "--hybrid-layer-pattern was G*-, is G-" in found
    assert "--ffn-hidden-size" not in found
    assert "--lr was 0.005, is 1.0" in refused(*resume, "--lr", "1", also=())
    assert "--vocab-size was 257, is 6" in refused(*resume, *tokenized(tmp_path), also=())


def test_rejects_resuming_what_is_done(refused, copied):
    says = "allowed: more than the 8 steps that the checkpoint holds."
    assert refused("--resume", str(copied), also=()) == f"--train-iters: got 8; {says}"
    assert refused("--resume", str(copied), "--train-iters", "5", also=()) == f"--train-iters: got 5; {says}"


def test_rejects_redistribution_with_sequence_parallelism(refused):
    sizes = ["--context-parallel-size", "2", "--tensor-model-parallel-size", "2", "--linear-num-key-heads", "2"]
    message = refused("--linear-cp-mode", "redistribute", "--sequence-parallel", *sizes)
    assert (
        "--linear-cp-mode: got 'redistribute'; allowed: headwise, chunkwise or auto with --sequence-parallel" in message
    )


def test_rejects_what_only_the_ranks_can_see(data, tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = [*HYBRID, *STEPS, "--train-iters", "3", "--data-path", str(data), "--run-dir", str(folder)]
    if torch.cuda.is_available():
        pytest.skip("Transformer Engine may be there")
    assert main(["train", *arguments, "--context-parallel-size", "2", "--hybrid-layer-pattern", "DG-"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2  # the first says what will be trained on
    assert lines[1].startswith("megatron-cp train: --hybrid-layer-pattern: got")
    assert not folder.exists()  # so that the next attempt may have its name


def test_rejects_a_checkpoint_whose_weights_are_damaged(copied, capsys):
    file = copied / "checkpoints" / "iter_0000008" / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 2000)  # what the parent process reads is at the start
    save_integrity_manifest(str(file.parent))  # which would show it first
    assert main(["train", "--resume", str(copied), "--train-iters", "9", "--context-parallel-size", "2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(f"megatron-cp train: --resume: got '{file.parent}'; allowed: a checkpoint of this model")
    assert not (copied / "metrics.jsonl").exists()


# -- verdicts --------------------------------------------------------------------------------------------------------


def test_losses_that_are_no_numbers_fail_and_are_null(data, tmp_path, capsys, monkeypatch):
    def diverged(run, *others):
        lines = [json.dumps({"step": step, "loss": math.nan}) for step in (1, 2)]
        (run.folder / "metrics.jsonl").write_text("\n".join(lines))
        torch.save({"weight": torch.ones(3)}, run.folder / "first_gradients.0.pt")
        nothing = {"steps": 2, "first_loss": math.nan, "final_loss": math.nan}
        return nothing | {"tokens_per_second": 1.0, "pad_tokens": 0}

    monkeypatch.setattr(train, "_train", diverged)
    arguments = [*HYBRID, *STEPS, "--train-iters", "2", "--data-path", str(data), "--run-dir", str(tmp_path / "run")]
    assert main(["train", *arguments, "--compare", "--json"]) == 1
    printed = capsys.readouterr().out
    assert "DO NOT AGREE" in printed
    report = report_of(printed)
    assert (report["final_loss"], report["max_loss_diff"], report["first_step_grad_diff"]) == (None, None, 0)


# -- codecs ------------------------------------------------------------------------------------------------------------


def test_training_with_a_codec_stays_beside_one_rank_and_says_how_close(data, tmp_path, capsys):
    """Gradients of the first step are off by what the codec loses, and losses hardly: `--compare` knows the limits."""
    folder = tmp_path / "run"
    wire = ["--cp-codec", "fp8", "--cp-comm-type", "a2a", "--linear-cp-mode", "headwise"]
    arguments = [*HYBRID, *STEPS, *wire, "--train-iters", "6", "--context-parallel-size", "2", "--compare", "--json"]
    assert main(["train", *arguments, "--data-path", str(data), "--run-dir", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "0.2 for gradients" in out
    report = report_of(out)
    assert 1e-4 < report["first_step_grad_diff"] < 0.2  # it was coded
    assert 0 < report["max_loss_diff"] < 0.02
