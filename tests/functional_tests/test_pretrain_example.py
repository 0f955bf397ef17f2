"""examples/pretrain_hybrid.py, run whole through Megatron's own `pretrain`: flags, schedules, checkpoints and all."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.forked_ranks import forking_context
from tests.functional_tests import pretrain_on_cpu
from tests.limits import limit

pytest.importorskip("megatron.training")

EXAMPLES = Path(__file__).parents[2] / "examples"
FLAGS = """
    --spec megatron_cp.megatron.specs hybrid_stack_spec --hybrid-layer-pattern GG*- --position-embedding-type rope
    --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 16
    --linear-conv-kernel-dim 4 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 256 --max-position-embeddings 256 --vocab-size 64 --make-vocab-size-divisible-by 32
    --tokenizer-type NullTokenizer --dataloader-type external
    --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant --lr-decay-iters 100
    --calculate-per-token-loss --cp-comm-type a2a --eval-iters 1 --eval-interval 100 --split 9,1,0 --log-interval 1
    --distributed-backend gloo --use-cpu-initialization --transformer-impl local --no-rope-fusion
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-load-rng
"""


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return indexed(tmp_path_factory.mktemp("data") / "docs", 0)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return indexed(tmp_path_factory.mktemp("others") / "docs", 1)


def indexed(prefix, seed):
    """The prefix of a `.bin/.idx` pair of ragged documents."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    random = np.random.default_rng(seed)
    for length in random.integers(1, 90, 100):
        builder.add_document(torch.tensor(random.integers(0, 60, length)), [int(length)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="module")
def checkpoint(documents, tmp_path_factory):
    """Trains two steps on one rank and returns the checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    pretrain(1, documents, "--train-iters", 4, "--exit-interval", 2, "--save", folder, "--save-interval", 2)
    return folder


def pretrain(num_ranks, documents, *flags, run=None):
    """Loss and gradient norm of each step. `run` starts the ranks: `forked` or `under_torchrun`."""
    return trained(num_ranks, "--data-path", documents, *flags, run=run)[0]


def trained(num_ranks, *flags, run=None):
    """Returns the loss of each step, and of all evaluations."""
    printed = (run or forked)(num_ranks, [*FLAGS.split(), *map(str, flags)])
    found = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+) ", printed)
    evaluations = re.findall(r"validation loss at .*? lm loss value: (\S+) ", printed)
    return {int(step): (float(loss), float(norm)) for step, loss, norm in found}, [float(loss) for loss in evaluations]


def assert_same_training(actual, expected):
    steps, evaluations = actual
    assert steps.keys() == expected[0].keys()
    for step, (loss, norm) in steps.items():
        assert loss == pytest.approx(expected[0][step][0], abs=1e-5)
        assert norm == pytest.approx(expected[0][step][1], abs=2e-3)  # printed with three digits
    assert evaluations == pytest.approx(expected[1], abs=1e-5)


def under_torchrun(num_ranks, arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, pretrain_on_cpu.__file__, *arguments], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def forked(num_ranks, arguments):
    """Runs a job with the variables that torchrun sets, in forks, so that ranks do not import Megatron again."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    shared |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "CUDA_DEVICE_MAX_CONNECTIONS": 1}
    with tempfile.TemporaryDirectory() as folder:
        prints = [Path(folder) / str(rank) for rank in range(num_ranks)]
        ranks = [
            forking_context().Process(target=start, args=(shared | {"RANK": n, "LOCAL_RANK": n}, arguments, prints[n]))
            for n in range(num_ranks)
        ]
        try:
            for rank in ranks:
                rank.start()
            wait_for(ranks)
            printed = [path.read_text() for path in prints]
            assert [rank.exitcode for rank in ranks] == [0] * num_ranks, "".join(text[-6000:] for text in printed)
            return "".join(printed)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def wait_for(ranks, seconds=240):
    """Waits until all have ended, or one has failed."""
    deadline = time.monotonic() + seconds
    while any(rank.exitcode is None for rank in ranks) and all(rank.exitcode in (None, 0) for rank in ranks):
        assert time.monotonic() < deadline, f"the ranks did not finish in {seconds} s"
        time.sleep(0.05)


def start(environment, arguments, prints):
    os.environ.update({name: str(value) for name, value in environment.items()})
    with prints.open("w") as out:
        for descriptor in (1, 2):
            os.dup2(out.fileno(), descriptor)
    sys.argv = [pretrain_on_cpu.__file__, *arguments]
    torch.set_num_threads(1)
    pretrain_on_cpu.main()


@pytest.fixture(scope="module")
def one_rank(documents, checkpoint):
    return pretrain(1, documents, "--train-iters", 4, "--load", checkpoint)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("run", "num_ranks", "flags"),
    [
        (forked, 2, "--context-parallel-size 2 --cp-layout contiguous"),
        pytest.param(under_torchrun, 2, "--context-parallel-size 2", marks=pytest.mark.thorough),
        *(
            pytest.param(forked, 4, f"--context-parallel-size 2 {more}", marks=pytest.mark.thorough)
            for more in (
                "--tensor-model-parallel-size 2 --sequence-parallel --cp-layout auto",
                "--pipeline-model-parallel-size 2 --hybrid-layer-pattern GG|*-",
                "--cp-even-packs",
            )
        ),
    ],
    ids=["cp2", "cp2-under-torchrun", "tp2-cp2-sequence-parallel", "pp2-cp2", "dp2-cp2-even-packs"],
)
def test_the_example_continues_a_one_rank_checkpoint(run, num_ranks, flags, documents, checkpoint, one_rank):
    steps = pretrain(num_ranks, documents, "--train-iters", 4, "--load", checkpoint, *flags.split(), run=run)
    assert steps.keys() == one_rank.keys() == {3, 4}
    for step, (loss, norm) in steps.items():
        assert loss == pytest.approx(one_rank[step][0], abs=1e-5)
        assert norm == pytest.approx(one_rank[step][1], abs=2e-3)  # printed with three digits


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """Packs of ragged conversations, a line each."""
    path, random = tmp_path_factory.mktemp("sft") / "conversations.jsonl", np.random.default_rng(1)
    lines = []
    for _ in range(8):
        roles = ["system", "user", "assistant"] * int(random.integers(2, 7))
        messages = [
            {"role": role, "content": "".join(random.choice([*"abcdefgh"], random.integers(1, 20)))} for role in roles
        ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_sft_is_the_same_over_ranks(conversations, checkpoint):
    """Evaluation too, which Megatron does otherwise with `--sft`: a mean over the ranks of each rank's own quotient."""
    flags = ["--data-path", conversations, "--sft", "--split", "1,1,0", "--eval-interval", 2, "--train-iters", 4]
    alone = trained(1, *flags, "--load", checkpoint)
    assert alone[0].keys() == {3, 4}
    assert len(alone[1]) == 2
    # Tensor- and pipeline-parallel ranks would wait for each other for ever if the first one built the data set alone.
    both = ["--context-parallel-size", 2, "--tensor-model-parallel-size", 2]
    stages = ["--pipeline-model-parallel-size", 2, "--hybrid-layer-pattern", "GG|*-"]
    for num_ranks, parallel in ((4, both), (2, stages)):
        assert_same_training(trained(num_ranks, *flags, "--load", checkpoint, *parallel), alone)


@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_a_blend_is_the_same_over_ranks(documents, others, checkpoint):
    """`--data-path` of two prefixes with weights, or one for each split."""
    flags = ["--train-iters", 4, "--load", checkpoint, "--eval-interval", 2]
    blend = ["--data-path", 3, documents, 1, others]
    alone = trained(1, *flags, *blend)
    assert alone != trained(1, *flags, "--data-path", documents)
    assert_same_training(trained(2, *flags, *blend, "--context-parallel-size", 2), alone)
    of_splits = [
        trained(1, *flags, "--train-data-path", documents, "--valid-data-path", path) for path in (documents, others)
    ]
    assert of_splits[0][0] == of_splits[1][0]
    assert of_splits[0][1] != of_splits[1][1]


def test_every_flag_of_the_script_is_megatrons_or_ours(tmp_path):
    """The script with stand-ins for torchrun and nvidia-smi, its flags read by Megatron's parser."""
    for name, body in {"torchrun": 'printf "%s\\n" "$@"', "nvidia-smi": "echo GPU 0; echo GPU 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TOKENIZER": "t", "CP": "2"}
    script = EXAMPLES / "pretrain_hybrid.sh"
    done = subprocess.run([script, "docs", "ckpt"], env=environment, capture_output=True, text=True, check=True)
    launcher, flags = done.stdout.splitlines()[:3], done.stdout.splitlines()[4:]
    assert launcher == ["--standalone", "--nproc-per-node", "2"]
    parser, printed = forking_context().Process(target=parse, args=(flags, tmp_path / "said")), tmp_path / "said"
    parser.start()  # in a fork, which has imported Megatron
    parser.join(limit(120))
    assert parser.exitcode == 0, printed.read_text()[-2000:]
    expected = "['megatron_cp.megatron.specs', 'hybrid_stack_spec'] 2 zigzag ckpt"
    assert printed.read_text().splitlines()[-2:] == [expected, "False False False None"]


def parse(flags, prints):
    """Prints options by the names by which our configuration is filled."""
    with prints.open("w") as out:
        for descriptor in (1, 2):
            os.dup2(out.fileno(), descriptor)
    sys.argv = ["pretrain_hybrid.py", *flags]
    from megatron.training.arguments import parse_args

    from megatron_cp.megatron.config import add_arguments

    args = parse_args(add_arguments)
    print(args.spec, args.context_parallel_size, args.cp_layout, args.load)
    print(args.sft, args.dataloader_inter_document_masking, args.reset_attention_mask, args.cp_packed_order, flush=True)
