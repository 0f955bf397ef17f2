"""`python -m tools.nullgpu [--or-gpu] COMMAND...`: runs a command on the emulated device, or ends with 2 without one.

--or-gpu  on a GPU where there is one
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tools.nullgpu.device import UnavailableError, environment


def main() -> int:
    """Becomes the command."""
    may_be_gpu = sys.argv[1:2] == ["--or-gpu"]
    command = sys.argv[2:] if may_be_gpu else sys.argv[1:]
    if command[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if not command or command[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        os.execvpe(command[0], command, dict(os.environ) if may_be_gpu and _has_gpu() else environment())
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
