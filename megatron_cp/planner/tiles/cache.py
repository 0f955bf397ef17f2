"""Keeps answers on disk, by the value of their problem: a JSON file for each, checked when it is read.

A file that does not fit its problem is refused, not passed over: a search may take minutes, during which other ranks
wait, and whoever damaged or edited the file should learn of it.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.errors import ArgumentError, as_number, checked_integer
from megatron_cp.layout.packing import IntArray
from megatron_cp.planner.tiles.problem import TileProblem, check, cost

_FORMAT = 1
_MOST_BYTES = 1 << 23  # limit of a file: eight times the bytes of `MOST_TILES` ranks


@dataclass(frozen=True, eq=False)
class Answer:
    """The result of a search, as a file keeps it.

    Attributes:
        ranks: `[tiles]` the rank that computes each tile.
        bound: the best lower bound that was found on the cost of any answer.
        search_seconds: the time limit of the search.
        steps: the random moves that the fast stage was allowed.
    """

    ranks: IntArray
    bound: int
    search_seconds: float
    steps: int


def checked_directory(cache: object, argument: str = "cache") -> Path | None:
    """Returns the directory as a path; it need not exist yet.

    Args:
        cache: its path; None for none.
        argument: the user's name of the argument.

    Raises:
        ArgumentError: no path, or the path of something other than a directory.
    """
    if cache is None:
        return None
    path = os.fspath(cache) if isinstance(cache, str | os.PathLike) else None
    if not path or not isinstance(path, str) or "\0" in path:
        raise ArgumentError(argument, cache, "the path of a directory, or None for no cache")
    try:
        is_other = not stat.S_ISDIR(Path(path).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_other = False
    except OSError as error:  # a name that is too long, say
        raise ArgumentError(argument, path, "the path of a directory", str(error)) from None
    if is_other:
        raise ArgumentError(argument, path, "the path of a directory", "A file has that name.")
    return Path(path)


def read(directory: Path, problem: TileProblem) -> Answer | None:
    """Reads the answer to a problem; None if no file has one.

    Raises:
        ArgumentError: a file that is no answer to the problem.
    """
    path = directory / f"{problem.digest}.json"
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refused(path, str(error)) from None
    if len(text) > _MOST_BYTES:
        raise _refused(path, f"more than {_MOST_BYTES} bytes")
    try:
        return _checked(json.loads(text), problem)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _refused(path, str(error) or type(error).__name__) from None


def write(directory: Path, problem: TileProblem, answer: Answer) -> None:
    """Writes an answer to a file. A concurrent reader gets the old file or the new one, never a part.

    Raises:
        ArgumentError: the directory cannot be written to.
    """
    content = {
        "format": _FORMAT, "problem": problem.digest, "ranks": answer.ranks.tolist(), "bound": int(answer.bound),
        "search_seconds": float(answer.search_seconds), "steps": int(answer.steps),
    }  # fmt: skip
    try:
        directory.mkdir(parents=True, exist_ok=True)
        part = directory / f"{secrets.token_hex(8)}.part"
        try:
            # With the usual permissions, since others may share the folder: `tempfile` would exclude them.
            with part.open("x") as file:
                json.dump(content, file)
            part.replace(directory / f"{problem.digest}.json")
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ArgumentError("cache", str(directory), "a directory that can be written to", str(error)) from None


def _checked(content: Any, problem: TileProblem) -> Answer:
    """Returns the answer in a file's content; raises an error that describes what is wrong with it."""
    if not isinstance(content, dict) or content["format"] != _FORMAT or content["problem"] != problem.digest:
        raise ValueError("it is of another problem or another version")
    given = content["ranks"]
    if not isinstance(given, list) or any(type(rank) is not int for rank in given):
        raise ValueError("ranks are no integers")
    ranks = check(problem, np.array(given, dtype=np.int64))
    bound, seconds = content["bound"], as_number(content["search_seconds"])
    if type(bound) is not int or not 0 <= bound <= cost(problem, ranks):
        raise ValueError(f"its bound is {bound!r}, its cost {cost(problem, ranks)}")
    if not 0 <= seconds < float("inf"):
        raise ValueError("search_seconds is no number of seconds")
    return Answer(ranks, bound, seconds, checked_integer("steps", content["steps"], 1))


def _refused(path: Path, fault: str) -> ArgumentError:
    return ArgumentError("cache", f"{path}: {fault}", "files that `solve` wrote for the same tiles", f"Delete {path}.")
