"""`megatron-cp train` in tests: its data, models and options, how it is started, and what it leaves."""

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

from megatron_cp.cli.main import main
from megatron_cp.data.corpus import read_corpus
from megatron_cp.data.stream import PackedStream
from megatron_cp.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megatron_cp.cli.main", "train"]
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
    "-m", "megatron_cp.cli.main", "train",
]  # fmt: skip
# On the CPU wherever this runs, and on one thread.
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
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


def write_documents(folder):
    """Documents, a file that is empty and one that is not UTF-8."""
    for number, length in enumerate(LENGTHS):
        (folder / f"{number}.txt").write_text((f"{number} and on, " * length)[:length])
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin1.txt").write_bytes(b"caf\xe9")
    return folder


def run_command(*arguments, command=COMMAND, **how):
    """Runs the command in a process of its own and returns the result; `how` is of `subprocess.run`."""
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=LIMIT, cwd=ROOT, env=ENVIRONMENT, check=False,
        **how,
    )  # fmt: skip


def run_without_a_break(data, folder):
    """8 steps on one rank."""
    arguments = [*HYBRID, *STEPS, *BATCH, "--train-iters", "8", "--data-path", str(data), "--run-dir", str(folder)]
    with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
        assert main(["train", *arguments]) == 0
    return folder


def report_of(out):
    def no_number(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(out, parse_constant=no_number)


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder):
    return [entry["loss"] for entry in metrics_of(folder)]


def tokens_of_steps(data, steps, packs, seq_length=SEQ_LENGTH):
    """Returns the number of tokens of each step, from the stream alone: which documents, and in which order."""
    stream = PackedStream(read_corpus(data, ByteTokenizer()), seq_length, SEED)
    return [sum(stream.pack(step * packs + pack)[0].total for pack in range(packs)) for step in range(steps)]


def assert_metrics(folder, data, steps, packs=1):
    """Checks that there is a line for each step, with finite numbers, for the right documents."""
    entries = metrics_of(folder)
    assert [entry["step"] for entry in entries] == list(range(1, steps + 1))
    assert all(math.isfinite(value) for entry in entries for value in entry.values())
    assert [entry["tokens"] for entry in entries] == tokens_of_steps(data, steps, packs)


def tokenized(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["[UNK]", "to", "be", "or", "not", "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "play.txt").write_text("to be or not to be " * 50)
    return ["--data-path", str(tmp_path / "play.txt"), "--tokenizer-model", str(tmp_path / "tokenizer.json")]
