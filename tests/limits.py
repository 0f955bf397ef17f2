"""Time limits of ranks and processes, in terms of how long one takes to start here and now.

A limit is there to end what hangs. What it must not do is fail because others use the machine: then everything takes
longer, and the start of a rank does too.
"""

import functools
import subprocess
import sys
import time

IDLE = 1.5  # seconds that a rank's process takes to start on an idle core of the machines that limits were chosen on


@functools.cache
def start_up() -> float:
    """Seconds that a process needs until it could join a group: measured once a process, when first asked for."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch.distributed"], timeout=240, check=True)
    return time.perf_counter() - begun


def limit(seconds: float) -> float:
    """`seconds`, or as much more as this machine is slower now than an idle one."""
    return seconds * max(1.0, start_up() / IDLE)
