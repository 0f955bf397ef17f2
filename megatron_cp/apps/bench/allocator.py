"""Keeps freed memory in the process, so that no call pays for paging it in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator

# As a GPU's caching allocator does, freed blocks (to 32 MiB, glibc's limit) are kept: paging memory in anew for each
# buffer would be most of the time outside of kernels.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**36)}


@contextlib.contextmanager
def kept_blocks() -> Iterator[None]:
    """Makes processes that start in the block use an allocator that keeps freed memory."""
    before = {name: os.environ.get(name) for name in _ALLOCATOR}
    os.environ.update(_ALLOCATOR)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory of any size: otherwise a block above 32 MiB is paged in anew each time.

    That would be most of the time of any code that makes one. A GPU's caching allocator keeps blocks too.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, -1)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def page_faults() -> int:
    """Returns the number of pages that this thread has had paged in."""
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(who).ru_minflt
