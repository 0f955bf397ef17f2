"""`python -m tools.nullgpu [OPTIONS] COMMAND...`: runs a command on the emulated device, or ends with 2 without one.

--or-gpu  on a GPU where there is one
--note    notes which CUDA-only code runs: see `python -m tools.nullgpu.coverage`
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tools.nullgpu.device import UnavailableError, environment, noting


def main() -> int:
    """Becomes the command."""
    command, options = sys.argv[1:], set()
    while command and command[0] in ("--or-gpu", "--note"):
        options.add(command.pop(0))
    if command[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if not command or command[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        how = "gpu" if "--or-gpu" in options and _has_gpu() else "emulated"
        given = environment() if how == "emulated" else dict(os.environ)
        os.execvpe(command[0], command, noting(given, how) if "--note" in options else given)
    except UnavailableError as reason:
        print(f"nullgpu: {reason}", file=sys.stderr)
    except OSError as error:
        print(f"nullgpu: {command[0]}: {error.strerror}", file=sys.stderr)
    return 2


def _has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


if __name__ == "__main__":
    sys.exit(main())
