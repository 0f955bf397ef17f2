"""`whole_file`: a file that is written completely or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yields the path of a new file beside `path`, and renames it to that if the body succeeds, or deletes it.

    So a full disk leaves what was there before. The new file's name has the same ending, from which writers of pictures
    know the format.
    """
    target = Path(os.path.realpath(path))  # a link keeps pointing to its file
    new = target.with_name(f"{secrets.token_hex(8)}.new{target.suffix}")
    try:
        yield new
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)
