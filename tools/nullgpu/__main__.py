"""`python -m tools.nullgpu [--or-gpu] COMMAND...`: runs a command on the emulated device, or ends with 2 without one.

With --or-gpu it runs on a GPU where there is one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tools.nullgpu.device import UnavailableError, environment


def main() -> int:
    """Becomes the command."""
    command = sys.argv[1:]
    or_gpu = command[:1] == ["--or-gpu"]
    command = command[or_gpu:]
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        os.execvpe(command[0], command, dict(os.environ) if or_gpu and _has_gpu() else environment())
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
