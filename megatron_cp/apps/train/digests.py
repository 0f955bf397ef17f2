"""Digests of a checkpoint's files: a file that changed since it was saved is not loaded.

They have Megatron's format, so that its `verify_integrity` reads them too. Megatron's own functions read all files on
one rank; here each rank reads a share. Digests detect damage, not malice: a person who can change a file can change
its digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from megatron_cp.apps.train.run_folder import TRACKER, write_whole
from megatron_cp.errors import ArgumentError

DIGESTS, _ALGORITHM = "integrity.json", "sha256"  # Megatron's names for them


def write_digests(checkpoint: Path) -> None:
    """Writes the digests of all files; each rank reads the files that it wrote, which its host still has in memory.

    Every rank must call it. It returns once the digests are on disk.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    writers = {name: _writer(name, size) for name in _names(checkpoint)}
    own = _digests(checkpoint, [name for name, writer in writers.items() if writer == rank])
    everyone: list[dict[str, str]] = [{} for _ in range(size)]
    dist.all_gather_object(everyone, own)
    if rank == 0:
        files = {name: digest for part in everyone for name, digest in part.items()}
        content = {"algorithm": _ALGORITHM, "files": dict(sorted(files.items()))}
        write_whole(checkpoint / DIGESTS, json.dumps(content, indent=2) + "\n")
    dist.barrier()


def check_digests(checkpoint: Path) -> None:
    """Refuses a checkpoint whose files are not those that were saved, before anything reads one of them.

    If there is a process group every rank must call it; each reads a share, and all get the result.

    Raises:
        ArgumentError: files are missing, changed or additional, or there are no digests; on every rank.
    """
    try:
        found = _differences(checkpoint)
    except OSError as error:
        found = [f"Cannot read {error.filename}: {error.strerror}"]
    if dist.is_initialized():
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, found)
        found = sorted({difference for part in everyone for difference in part})
    if found:
        shown = found if len(found) <= 5 else [*found[:5], f"{len(found) - 5} more"]
        allowed = "a checkpoint of this model whose files are as they were saved"
        older = [path.name for path in checkpoint.parent.glob("iter_*[0-9]") if path.name < checkpoint.name]
        remedy = f" {max(older)} is there too: {TRACKER} says which is taken." if older else ""
        raise ArgumentError("resume", str(checkpoint), allowed, f"{'; '.join(shown)}.{remedy}")


def _differences(checkpoint: Path) -> list[str]:
    try:
        content = json.loads((checkpoint / DIGESTS).read_text())
        saved: dict[str, str] = dict(content["files"]) if content["algorithm"] == _ALGORITHM else {}
    except FileNotFoundError:
        return [f"It has no {DIGESTS}: damage would not be noticed"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return [f"{DIGESTS} is damaged"]
    names = set(_names(checkpoint))
    differences = [f"{name} is missing" for name in sorted(saved.keys() - names)]
    differences += [f"{name} is not one of its files" for name in sorted(names - saved.keys())]
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = sorted(saved.keys() & names)[rank::size]
    now = _digests(checkpoint, share)
    return differences + [f"{name} is damaged" for name in share if now[name] != saved[name]]


def _names(checkpoint: Path) -> list[str]:
    return [path.name for path in checkpoint.iterdir() if path.name != DIGESTS]


def _writer(name: str, size: int) -> int:
    """Returns the rank that wrote a file: the number in `__NUMBER_0.distcp`, or 0."""
    rank = name.removeprefix("__").partition("_")[0]
    return int(rank) if name.startswith("__") and rank.isdecimal() and int(rank) < size else 0


def _digests(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    with ThreadPoolExecutor() as pool:  # hashing leaves Python to others
        return dict(zip(names, pool.map(lambda name: _digest(checkpoint / name), names), strict=True))


def _digest(path: Path) -> str:
    if not path.is_file():  # a pipe would be waited for
        return "no file"
    with path.open("rb") as file:
        digest = hashlib.new(_ALGORITHM)
        while block := file.read(2**20):
            digest.update(block)
        return digest.hexdigest()
