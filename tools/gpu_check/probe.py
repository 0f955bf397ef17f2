"""`python -m tools.gpu_check.probe [FOLDER]`: doctor's text, and in a line of JSON the device, kernels and packages.

Packages of the folder that cannot be used with this torch or on this GPU are removed from it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from importlib import import_module
from importlib.metadata import Distribution, distributions
from pathlib import Path

import torch

from megatron_cp.cli import doctor
from tools.gpu_check.refusals import listing_of, other_gpu


def main() -> None:
    """The command."""
    broken = {}
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    for package in distributions(path=sys.argv[1:2]) if sys.argv[1:] else ():
        why = unusable(package, capability)
        if why is not None:
            broken[f"{package.name} {package.version}"] = why
            for name in {file.parts[0] for file in package.files or () if ".." not in file.parts}:
                place = Path(sys.argv[1], name)
                shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    report = doctor.run(argparse.Namespace(megatron=None, all=True))
    print(report.text, flush=True)
    lines = {line["feature"]: line for line in report.data["capabilities"]}
    kernels = {name.removeprefix("kernel "): line for name, line in lines.items() if name.startswith("kernel ")}
    found = {
        "devices": report.data["devices"], "versions": report.data["versions"], "broken": broken,
        "kernels": {name: "" if line["works"] else line["remark"] for name, line in kernels.items()},
        "bytes": torch.cuda.get_device_properties(0).total_memory if report.data["devices"] else 0,
    }  # fmt: skip
    print(json.dumps({"probe": found}), flush=True)


def unusable(package: Distribution, capability: tuple[int, int]) -> str | None:
    """Returns why a package's extension does not load, or for which GPU it was built; None if it can be used."""
    for file in package.files or ():
        if file.suffix == ".so" and ".cpython-" in file.name and len(file.parts) == 1:
            try:
                import_module(file.name.partition(".")[0])
            except ImportError as error:
                first = str(error).splitlines()[0]
                return f"does not load beside torch {torch.__version__}: {first}"
            why = other_gpu(listing_of(Path(str(package.locate_file(file)))), capability)
            if why is not None:
                return why
    return None


if __name__ == "__main__":
    main()
