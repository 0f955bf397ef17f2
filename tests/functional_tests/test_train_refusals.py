"""Tests of the refusals of `megatron-cp train`: options, data, folders and checkpoints, most before any rank starts."""

import json
import os
import resource
import shutil

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.validation import save_integrity_manifest, verify_integrity_manifest

from megatron_cp.apps.train import command as train
from megatron_cp.apps.train.run_folder import latest_checkpoint, locked
from megatron_cp.cli.main import main
from tests.functional_tests.train_runs import (
    HYBRID,
    STEPS,
    metrics_of,
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
        (["--spec", "no.such.module", "name"], "--spec: got 'no.such.module name'; allowed: megatron_cp.megatron"),
        (["--hybrid-layer-pattern", "GX-"], "--hybrid-layer-pattern: got 'GX-'"),
        (
            ["--hybrid-layer-pattern", "G*-", "--spec", "megatron_cp.megatron.specs", "gpt_layer_spec"],
            "--hybrid-layer-pattern: got 'G*-'; allowed: only with HybridModel",
        ),
        (
            ["--cp-layout", "striped"],
            "--cp-layout: got 'striped'; allowed: balanced or contiguous or zigzag or auto or random.",
        ),
        (["--cp-comm-type", "tiles"], "Did you mean tiled?"),
        (["--cp-comm-type", "a2a", "a2a"], "one value, or one for each of 3 layers"),
        (["--linear-cp-mode", "ring"], "--linear-cp-mode: got 'ring'"),
        (["--device", "tpu"], "--device: got 'tpu'; allowed: auto or cpu or cuda."),
        (["--tensor-model-parallel-size", "4"], "no such option. Use it in a Megatron job of your own, such as"),
        (["--context-parallel-size", "0"], "--context-parallel-size: got 0; allowed: at least 1"),
        (["--context-parallel-size", "two"], "--context-parallel-size: got 'two'; allowed: integers"),
        (["--context-parallel-size", "65"], "--context-parallel-size: got 65; allowed: at most 64 local ranks"),
        (["--lr", "nan"], "--lr: got nan; allowed: a finite number of at least 0"),
        (["--bf16"], "--bf16: got True; allowed: off on cpu"),
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


def test_rejects_data_that_is_not_there_or_cannot_be_read(refused, tmp_path):
    assert refused("--data-path", "no/such/folder").startswith("--data-path: got 'no/such/folder'")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file").touch()
    assert "Skipped: 1 empty." in refused("--data-path", str(tmp_path / "empty"))
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


def test_rejects_run_dirs(refused, uninterrupted, tmp_path):
    taken = f"--run-dir: got '{uninterrupted}'; allowed: a new folder. The folder has the steps of a run; "
    taken += "to continue it: --resume"
    assert refused("--run-dir", str(uninterrupted)) == f"{taken} {uninterrupted}"
    copied = tmp_path / "copied"
    shutil.copytree(uninterrupted, copied, ignore=shutil.ignore_patterns("metrics.jsonl"))
    arguments = ["--resume", str(copied), "--run-dir", str(uninterrupted), "--train-iters", "9"]
    assert refused(*arguments).startswith(taken)
    assert len(metrics_of(uninterrupted)) == 8


@pytest.fixture
def copied(uninterrupted, tmp_path):
    """A run of 8 steps that a test may damage."""
    shutil.copytree(uninterrupted, tmp_path / "copied", ignore=shutil.ignore_patterns("metrics.jsonl"))
    return tmp_path / "copied"


@pytest.fixture
def resumed(refused, copied):
    """Goes on with the run, which must be refused; returns what is said."""
    return lambda *more: refused("--resume", str(copied), "--train-iters", "9", *more, also=())


def test_rejects_resuming_without_a_run_or_a_checkpoint(refused, resumed, copied, tmp_path):
    assert refused("--resume", str(tmp_path)).startswith(f"--resume: got '{tmp_path}'; allowed: the folder of a run.")
    shutil.rmtree(copied / "checkpoints" / "iter_0000008")
    assert "names iter_0000008, which is not there" in resumed()
    shutil.rmtree(copied / "checkpoints")
    assert resumed() == (
        f"--resume: got '{copied}'; allowed: a run that has saved a checkpoint. The run saved no checkpoint: a run "
        "saves one every --save-interval steps, and one at its end. Start again without --resume, in another --run-dir."
    )


def cut(file):
    os.truncate(file, 60)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[int(0.999 * len(content))] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        *((name, damage, "") for name in ("metadata.json", ".metadata", "__0_0.distcp") for damage in (cut, os.unlink)),
        ("__0_0.distcp", flip_a_bit, "__0_0.distcp: hash mismatch"),
        ("integrity.json", os.unlink, "Integrity manifest not found at"),
    ],
)
def test_rejects_resuming_from_a_damaged_checkpoint(name, damage, says, resumed, copied):
    file = copied / "checkpoints" / "iter_0000008" / name
    damage(file)
    found = resumed()
    assert found.startswith(f"--resume: got '{file.parent}'; allowed: a checkpoint of this model")
    assert says in found


def test_rejects_a_run_dir_with_a_checkpoint_or_a_run_under_way(refused, resumed, copied):
    # Though its metrics are gone: the run would write where the tracker points.
    assert "The folder has the steps of a run; to continue it: --resume" in refused("--run-dir", str(copied))
    with locked(copied, "run_dir"):
        assert resumed().startswith(f"--resume: got '{copied}'; allowed: a folder in which no run is under way. A run")
        assert "A run is under way there" in refused("--run-dir", str(copied))
    assert json.loads((copied / "options.json").read_text())["train_iters"] == 8


def test_rejects_resuming_another_model_or_what_is_done(refused, resumed, copied, tmp_path):
    found = resumed("--hidden-size", "64", "--hybrid-layer-pattern", "G-")
    assert "iter_0000008'; allowed: a checkpoint of the same model" in found
    assert found.endswith(" optimizer. --hybrid-layer-pattern was G*-, is G-; --hidden-size was 32, is 64.")
    assert "--lr was 0.005, is 1.0" in resumed("--lr", "1")
    assert "--vocab-size was 257, is 6" in resumed(*tokenized(tmp_path))
    found = resumed("--adam-beta2", "0.5", "--adam-beta1", "0.8")
    assert "--adam-beta1 was 0.9, is 0.8; --adam-beta2 was 0.95, is 0.5." in found
    says = "allowed: more than the 8 steps of the checkpoint."
    assert refused("--resume", str(copied), also=()) == f"--train-iters: got 8; {says}"
    assert refused("--resume", str(copied), "--train-iters", "5", also=()) == f"--train-iters: got 5; {says}"


def limit_files():
    """To less than a checkpoint, here and in processes that this one starts."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


@pytest.mark.thorough
def test_rejects_a_disk_that_is_full(copied):
    """The refusal is one line; an earlier checkpoint stays, and a partial one does not."""
    arguments = ["--resume", str(copied), "--train-iters", "9", "--context-parallel-size", "2"]
    done = run_command(*arguments, preexec_fn=limit_files)
    assert done.returncode == 2, done.stderr
    folder = copied / "checkpoints"
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"megatron-cp train: --run-dir: got '{folder}'; allowed: a folder with room for what a run")
    assert "Cannot write iter_0000009: a writer failed, and Megatron's log above says why. " in said
    assert "[Errno 27] File too large" in done.stdout + done.stderr
    assert said.endswith(" MB are free there.")
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000008", "latest_checkpointed_iteration.txt"]
    assert latest_checkpoint(folder).name == "iter_0000008"
    verify_integrity_manifest(str(latest_checkpoint(folder)))


def test_rejects_what_only_the_ranks_can_see(data, tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = [*HYBRID, *STEPS, "--train-iters", "3", "--data-path", str(data), "--run-dir", str(folder)]
    if torch.cuda.is_available():
        pytest.skip("Transformer Engine may be there")
    assert main(["train", *arguments, "--context-parallel-size", "2", "--hybrid-layer-pattern", "DG-"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2  # the first says what will be trained on
    assert lines[1].startswith("megatron-cp train: --multi-latent-attention: got False; allowed: True with layers")
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
