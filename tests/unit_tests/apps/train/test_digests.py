"""Digests of a checkpoint's files: what is not as it was saved is refused before anything reads it."""

import os

import pytest
import torch.distributed as dist

from megatron_cp.apps.train.digests import DIGESTS, check_digests, write_digests
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks

FILES = {".metadata": b"a", "__0_0.distcp": b"bb", "__1_0.distcp": b"ccc", "metadata.json": b"{}"}


def megatrons():
    return pytest.importorskip("megatron.core.dist_checkpointing.validation")  # here, so that ranks need not


@pytest.fixture
def checkpoint(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    megatrons().save_integrity_manifest(str(tmp_path))
    return tmp_path


def rejected(checkpoint):
    with pytest.raises(ArgumentError) as caught:
        check_digests(checkpoint)
    assert caught.value.argument == "resume"
    return caught.value.remedy


def test_megatrons_digests_are_ours(checkpoint):
    check_digests(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_rejects_a_flipped_bit(name, checkpoint):
    content = bytearray((checkpoint / name).read_bytes())
    content[-1] ^= 4
    (checkpoint / name).write_bytes(content)
    assert rejected(checkpoint) == f"{name} is damaged."


def test_an_older_checkpoint_is_named(checkpoint, tmp_path_factory):
    damaged = checkpoint.rename(tmp_path_factory.mktemp("run") / "iter_0000210")
    (damaged / ".metadata").write_bytes(b"?")
    for name in ("iter_0000200", "iter_0000205", "iter_0000205.new", "iter_0000300"):
        (damaged.parent / name).mkdir()
    assert rejected(damaged) == (
        ".metadata is damaged. iter_0000205 is there too: latest_checkpointed_iteration.txt says which is taken."
    )


def test_rejects_files_that_are_missing_or_new(checkpoint, tmp_path):
    (checkpoint / "__1_0.distcp").rename(checkpoint / "__2_0.distcp")
    assert rejected(checkpoint) == "__1_0.distcp is missing; __2_0.distcp is not one of its files."
    assert DIGESTS in rejected(tmp_path / "nowhere")


@pytest.mark.timeout(20)
def test_rejects_a_pipe(checkpoint):
    (checkpoint / "__1_0.distcp").unlink()
    os.mkfifo(checkpoint / "__1_0.distcp")
    assert rejected(checkpoint) == "__1_0.distcp is damaged."


@pytest.mark.parametrize(
    "content",
    ["", "[", "[]", "{}", '{"algorithm": "sha256", "files": 3}', '{"algorithm": "crc", "files": {}}', "[" * 10**5],
)
def test_rejects_damaged_digests(content, checkpoint):
    (checkpoint / DIGESTS).write_text(content)
    said = rejected(checkpoint)
    assert f"{DIGESTS} is damaged" in said or "is not one of its files" in said


def test_rejects_a_checkpoint_without_digests(checkpoint):
    (checkpoint / DIGESTS).unlink()
    assert rejected(checkpoint) == f"It has no {DIGESTS}: damage would not be noticed."


def _on_ranks(group, checkpoint):
    write_digests(checkpoint)
    check_digests(checkpoint)
    if group.rank == 0:
        (checkpoint / "__1_0.distcp").write_bytes(b"ccd")
    dist.barrier()
    try:
        check_digests(checkpoint)
    except ArgumentError as error:
        return error.remedy
    return None


def test_ranks_share_the_work_and_all_hear_of_damage(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    said = run_ranks(_on_ranks, 2, tmp_path, kind="processes", timeout=60)
    assert said == ["__1_0.distcp is damaged."] * 2
    (tmp_path / "__1_0.distcp").write_bytes(b"ccc")
    megatrons().verify_integrity_manifest(str(tmp_path))
