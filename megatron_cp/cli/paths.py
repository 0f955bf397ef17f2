"""Refuses wrong paths of the command line before torch and Megatron are imported, which takes seconds."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from megatron_cp.data.corpus import is_indexed
from megatron_cp.errors import ArgumentError
from megatron_cp.page import check_page
from megatron_cp.planner.picture import check_picture


def check_paths(args: argparse.Namespace) -> None:
    """Refuses paths that do not exist or cannot be used, for every path option that the command has.

    A path that exists may still hold no corpus, tokenizer or run; its reader refuses that.

    Raises:
        ArgumentError: naming the option.
    """
    for name, check in _CHECKS.items():
        path = getattr(args, name, None)
        if path is not None:
            check(name, path)


def _documents(name: str, path: str) -> None:
    """Refuses a path that leads nowhere, and Megatron's `.bin/.idx` pairs, whose tokens would be read as text."""
    mode = _mode(name, path, _DOCUMENTS)
    if is_indexed(path):
        remedy = "Read .bin/.idx data in a Megatron job of your own, such as examples/pretrain_hybrid.py."
        raise ArgumentError(name, path, _DOCUMENTS, remedy)
    if mode is None or not path:
        raise ArgumentError(name, path, _DOCUMENTS, "No file or folder is there.")


def _corpus(name: str, path: str) -> None:
    if path != "default":
        _documents(name, path)


def _tokenizer(name: str, path: str) -> None:
    mode = _mode(name, path, _TOKENIZER)
    if mode is None or not S_ISREG(mode):
        raise ArgumentError(name, path, _TOKENIZER, "No file is there." if mode is None else "Not a file.")


def _run_dir(name: str, path: str) -> None:
    mode = _mode(name, path, _RUN_DIR)
    if mode is not None and not S_ISDIR(mode):
        raise ArgumentError(name, path, _RUN_DIR, "File exists.")
    nearest = next((parent for parent in Path(path).absolute().parents if parent.exists()), Path("/"))
    if mode is None and not os.access(nearest, os.W_OK):
        raise ArgumentError(name, path, _RUN_DIR, f"Nothing can be written in {nearest}.")


def _trace(name: str, path: str) -> None:
    target = Path(path)
    if "\0" in path or target.suffix != ".json" or not target.parent.is_dir() or target.is_dir():
        raise ArgumentError(name, path, _TRACE)
    place = target if target.exists() else target.parent
    if not os.access(place, os.W_OK):
        raise ArgumentError(name, path, _TRACE, f"Nothing can be written in {target.parent}.")


def _mode(name: str, path: str, allowed: str) -> int | None:
    """Returns the mode of the file or folder at a path; None if nothing is there."""
    try:
        return Path(path).stat().st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # the latter of NUL, which no path holds
        raise ArgumentError(name, path, allowed, f"{getattr(error, 'strerror', error)}.") from None


_DOCUMENTS = "a folder, a .jsonl file or a text file that can be read"
_TOKENIZER = "a Hugging Face tokenizer.json"
_RUN_DIR = "a folder that can be written"
_TRACE = "a file ending in .json, in a folder that exists"
_CHECKS = {
    "data_path": _documents,
    "corpus": _corpus,
    "tokenizer_model": _tokenizer,
    "run_dir": _run_dir,
    "plot": check_picture,
    "report": check_page,
    "profile": _trace,
}
