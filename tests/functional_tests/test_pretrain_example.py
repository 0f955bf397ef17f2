"""examples/pretrain_hybrid.py, run whole through Megatron's own `pretrain`: flags, schedules, checkpoints and all."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_cp.executor.launch import run_ranks
from tests.forked_ranks import as_launched
from tests.functional_tests import pretrain_on_cpu
from tests.limits import limit

pytest.importorskip("megatron.training")
from tests.unit_tests.megatron.indexed_files import write_indexed

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs/moving-a-megatron-job.md"
COMMON = """
    --position-embedding-type rope
    --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 256 --max-position-embeddings 256 --vocab-size 64 --make-vocab-size-divisible-by 32
    --tokenizer-type NullTokenizer
    --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant --lr-decay-iters 100
    --eval-iters 1 --eval-interval 100 --split 9,1,0 --log-interval 1
    --distributed-backend gloo --use-cpu-initialization --transformer-impl local --no-rope-fusion
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-load-rng
"""
OF_THE_EXAMPLE = """
    --spec megatron_cp.megatron.specs hybrid_stack_spec --hybrid-layer-pattern GG*-
    --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 16
    --linear-conv-kernel-dim 4 --dataloader-type external --calculate-per-token-loss --cp-comm-type a2a
"""


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return indexed(tmp_path_factory.mktemp("data") / "docs", 0)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return indexed(tmp_path_factory.mktemp("others") / "docs", 1)


def indexed(prefix, seed):
    """The prefix of a `.bin/.idx` pair of ragged documents."""
    random = np.random.default_rng(seed)
    write_indexed(prefix, [[random.integers(0, 60, length)] for length in random.integers(1, 90, 100)], np.uint16)
    return prefix


@pytest.fixture(scope="module")
def checkpoint(documents, tmp_path_factory):
    """Trains two steps on one rank and returns the checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    pretrain(1, documents, "--train-iters", 4, "--exit-interval", 2, "--save", folder, "--save-interval", 2)
    return folder


def pretrain(num_ranks, documents, *flags):
    """Returns the loss and gradient norm of each step."""
    return trained(num_ranks, "--data-path", documents, *flags)[0]


def trained(num_ranks, *flags, main=pretrain_on_cpu.main):
    """Returns the loss and gradient norm of each step, and the losses of all evaluations."""
    own = OF_THE_EXAMPLE if main is pretrain_on_cpu.main else ""
    arguments = [*COMMON.split(), *own.split(), *map(str, flags)]
    printed = "".join(run_ranks(printed_by, num_ranks, arguments, main, kind="processes", timeout=limit(240)))
    return found_in(printed)


def found_in(printed):
    """Returns the loss and gradient norm of each step, and the losses of all evaluations, of what Megatron prints."""
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


def printed_by(group, arguments, main):
    """Returns what a rank of a job prints, which finds the variables that torchrun sets."""
    as_launched(group, 29993, CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.argv = ["job", *arguments]
    with tempfile.TemporaryFile("w+") as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", lambda: None)  # `run_ranks` made the group and needs it
        for descriptor in (1, 2):
            os.dup2(out.fileno(), descriptor)
        try:
            main()
        except SystemExit as ended:  # at --exit-interval, and with a code where Megatron gives up
            if ended.code:
                out.seek(0)
                raise RuntimeError(out.read()[-3000:]) from ended
        sys.stdout.flush()
        out.seek(0)
        return out.read()


@pytest.fixture(scope="module")
def one_rank(documents, checkpoint):
    return pretrain(1, documents, "--train-iters", 4, "--load", checkpoint)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (2, "--context-parallel-size 2 --cp-layout contiguous"),
        (2, "--context-parallel-size 2 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 200"),
        *(
            pytest.param(4, f"--context-parallel-size 2 {more}", marks=pytest.mark.thorough)
            for more in (
                "--tensor-model-parallel-size 2 --sequence-parallel --cp-layout auto",
                "--pipeline-model-parallel-size 2 --hybrid-layer-pattern GG|*-",
                "--cp-even-packs",
                "--dynamic-context-parallel --pipeline-model-parallel-size 2 --hybrid-layer-pattern GG|*-",
            )
        ),
    ],
    ids=["cp2", "dynamic-cp2", "tp2-cp2-sequence-parallel", "pp2-cp2", "dp2-cp2-even-packs", "dynamic-pp2-cp2"],
)
def test_the_example_continues_a_one_rank_checkpoint(num_ranks, flags, documents, checkpoint, one_rank):
    steps = pretrain(num_ranks, documents, "--train-iters", 4, "--load", checkpoint, *flags.split())
    assert steps.keys() == {3, 4}
    assert_same_training((steps, []), (one_rank, []))


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


@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_step_of_the_patch_trains_packed_documents_the_same_over_ranks(documents, others, tmp_path):
    """Its data set says where documents of a sample begin."""
    flags = ["--spec", "megatron_cp.megatron.specs", "gpt_layer_spec", "--num-layers", 2, "--num-workers", 0,
             "--dataloader-inter-document-masking", "--calculate-per-token-loss", "--train-iters", 3,
             "--data-path", 0.3, documents, 0.7, others]  # fmt: skip

    def step_of_the_patch(ranks, *more):
        places = ["--context-parallel-size", ranks, "--data-cache-path", tmp_path / str(ranks)]
        return trained(ranks, *flags, *places, *more, main=pretrain_on_cpu.main_of_the_patch)

    start = tmp_path / "start"  # on other numbers of ranks Megatron draws other weights
    step_of_the_patch(1, "--save", start, "--save-interval", 1, "--exit-interval", 1)
    alone, spread = (step_of_the_patch(ranks, "--load", start) for ranks in (1, 2))
    assert (alone[0].keys(), len(alone[1])) == ({2, 3}, 1)
    assert_same_training(spread, alone)


def test_the_page_shows_the_step_of_the_patch():
    added = re.findall(r"^\+(?!\+\+)(.*\n)", pretrain_on_cpu.PATCH.read_text(), re.MULTILINE)
    (shown,) = re.findall(r"^```python\n(groups = .*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert shown in "".join(added)


@pytest.fixture
def patched(request, tmp_path):
    """The folder of Megatron's own pretrain_gpt.py, of the checkout that `--megatron` names, with the patch applied."""
    checkout = request.config.getoption("--megatron", default=None)
    if checkout is None or not Path(checkout, "pretrain_gpt.py").is_file():
        pytest.skip("needs --megatron=PATH, a checkout of Megatron-LM with its pretrain_gpt.py")
    folder = tmp_path / "Megatron-LM"
    folder.mkdir()
    for name in ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        shutil.copy(Path(checkout, name), folder)
    shutil.copytree(Path(checkout, "megatron"), folder / "megatron")
    if not any((folder / "megatron/core/datasets").glob("helpers_cpp*.so")):  # those of the wheel are compiled
        (helpers,) = Path(distribution("megatron-core").locate_file("megatron/core/datasets")).glob("helpers_cpp*.so")
        shutil.copy(helpers, folder / "megatron/core/datasets")
    subprocess.run(["git", "apply", pretrain_on_cpu.PATCH], cwd=folder, check=True)
    return folder


@pytest.mark.timeout(1800)
@pytest.mark.thorough
def test_megatrons_patched_script_trains_the_same_over_ranks(patched, documents, tmp_path):
    """As the page says: under torchrun, by examples/megatron_on_cpu.py."""

    def losses(ranks, *more):
        flags = [*COMMON.split(), "--num-layers", 2, "--num-workers", 0, "--train-iters", 3, "--data-path", documents,
                 "--spec", "megatron_cp.megatron.specs", "gpt_layer_spec", "--dataloader-inter-document-masking",
                 "--calculate-per-token-loss", "--context-parallel-size", ranks,
                 "--data-cache-path", tmp_path / str(ranks), *more]  # fmt: skip
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        words = [sys.executable, *launch, EXAMPLES / "megatron_on_cpu.py", "pretrain_gpt.py", *flags]
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        environment["PYTHONPATH"] = str(EXAMPLES.parent)
        done = subprocess.run(
            list(map(str, words)), cwd=patched, env=environment, capture_output=True, text=True, timeout=limit(480)
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return found_in(done.stdout)

    start = tmp_path / "start"
    losses(1, "--save", start, "--save-interval", 1, "--exit-interval", 1)
    alone, spread = (losses(ranks, "--load", start) for ranks in (1, 2))
    assert (alone[0].keys(), len(alone[1])) == ({2, 3}, 1)
    assert_same_training(spread, alone)


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
    (printed,) = run_ranks(printed_by, 1, flags, parse, kind="processes", timeout=limit(120))
    expected = "['megatron_cp.megatron.specs', 'hybrid_stack_spec'] 2 balanced ckpt"
    assert printed.splitlines()[-2:] == [expected, "False False False None"]


def parse():
    """Prints options by the names by which our configuration is filled."""
    from megatron.training.arguments import parse_args

    from megatron_cp.megatron.config import add_arguments

    args = parse_args(add_arguments)
    print(args.spec, args.context_parallel_size, args.cp_layout, args.load)
    print(args.sft, args.dataloader_inter_document_masking, args.reset_attention_mask, args.cp_packed_order)
