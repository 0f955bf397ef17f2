"""`megatron-cp doctor`: lists versions, kernels, devices, and the features that work on this machine."""

from __future__ import annotations

import argparse
import platform
import warnings
from dataclasses import asdict, dataclass

from megatron_cp import __version__
from megatron_cp.cli import megatron_job
from megatron_cp.cli.environment import INSTALL_MEGATRON, megatron_is_installed, version_of
from megatron_cp.cli.environment import PACKAGES as INSTALLABLE
from megatron_cp.cli.report import Report
from megatron_cp.layout import Packing
from megatron_cp.plan.kinds import KINDS
from megatron_cp.planner.capabilities import CAPABILITIES
from megatron_cp.versions import ADAPTERS, PACKAGES, adapter_tested, outside, table, tested

EXAMPLES = (
    "doctor",
    "doctor --megatron --context-parallel-size 4 --calculate-per-token-loss --num-layers 8"
    " --spec megatron_cp.megatron.specs gpt_layer_spec",
)


@dataclass(frozen=True)
class Finding:
    """A row of the capability table: a feature, and the requirement that is missing or a remark."""

    feature: str
    works: bool
    remark: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--all`, and `--megatron`, which judges a job's flags and does not inspect the machine."""
    parser.add_argument(
        "--all",
        action="store_true",
        help="list every kernel, every feature and the tested versions",
    )
    parser.add_argument("--megatron", nargs=argparse.REMAINDER, metavar="FLAGS", help=megatron_job.HELP)


def run(args: argparse.Namespace) -> Report:
    """Inspects the machine, or judges the flags of a Megatron job, and reports."""
    if args.megatron is not None:
        # Ours wherever it stands: Megatron has no such flag, and all words that follow --megatron are in this list.
        args.json = args.json or "--json" in args.megatron
        return megatron_job.judged([word for word in args.megatron if word != "--json"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other packages as they are imported
        return _machine(args)


def _machine(args: argparse.Namespace) -> Report:
    import torch

    from megatron_cp.torch_private import lacking

    versions = {name: version_of(name) for name in INSTALLABLE}
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    findings = [*_kernels(), *_backends(), *_plans()]
    adapters = {name: version_of(name) for name in ADAPTERS}
    lines = _here(versions, devices, findings, adapters)
    if args.all:
        width = max(len(finding.feature) for finding in findings)
        lines += ["", *_tested(versions), ""]
        lines += [f"{'yes' if f.works else 'no ':<4}{f.feature:<{width + 2}}{f.remark}" for f in findings]
    data = {
        "version": __version__,
        "python": platform.python_version(),
        "versions": versions,
        "devices": devices,
        "adapters": {name: [found, adapter_tested(name, found)] for name, found in adapters.items() if found},
        "tested_versions": tested()["rows"],
        "untested": outside(_of_table(versions)),
        "private_names_lacking": lacking(),
        "capabilities": [asdict(finding) for finding in findings],
    }
    return Report("\n".join(lines), data)


def _here(
    versions: dict[str, str | None], devices: list[str], findings: list[Finding], adapters: dict[str, str | None]
) -> list[str]:
    """Returns what this machine can run, in eight lines, the verdict first."""
    kernels = [finding for finding in findings if finding.feature.startswith("kernel ")]
    best: dict[str, str] = {}
    for finding in kernels:
        name, _, layer = finding.feature.removeprefix("kernel ").partition(" of ")
        if finding.works:
            best.setdefault(layer, name)
    by_kernel = {name: [layer for layer in best if best[layer] == name] for name in best.values()}
    runs = "; ".join(f"{', '.join(layers)} by kernel {name}" for name, layers in by_kernel.items())
    lacking = dict.fromkeys(f.feature.split()[1] for f in kernels if not f.works and "not installed" in f.remark)
    ranks = {f.feature.rpartition(" ")[2]: f.works for f in findings if f.feature.startswith("ranks ")}
    megatron = versions["megatron-core"]
    untested = outside(_of_table(versions))
    here = [f"{name} {found} ({adapter_tested(name, found)})" for name, found in adapters.items() if found]
    absent = [name for name, found in adapters.items() if not found]
    numbers = [f"{name} {versions[name]}" for name in ("torch", "numpy", "triton") if versions.get(name)]
    works = sum(finding.works for finding in findings)
    return [
        f"ready: {runs}",
        f"device: {', '.join(devices) if devices else 'the CPU only; kernels of CUDA are not tried'}",
        f"ranks: {', '.join(name for name, is_there in ranks.items() if is_there)}"
        + "".join(f"; {name} needs CUDA devices" for name, is_there in ranks.items() if not is_there),
        f"versions: megatron-cp {__version__}, Python {platform.python_version()}, {', '.join(numbers)}: "
        + (f"untested: {'; '.join(untested)}" if untested else "as tested"),
        f"Megatron: {f'megatron-core {megatron}' if megatron_is_installed() else 'not installed: ' + INSTALL_MEGATRON}",
        f"adapters: {', '.join(here) or 'none'}; not installed: {', '.join(absent) or 'none'}",
        f"kernels not installed: {', '.join(lacking) or 'none'}",
        f"features: {works} of {len(findings)} work here; doctor --all lists them, and what the others need",
    ]


def _of_table(versions: dict[str, str | None]) -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: versions[name] for name in PACKAGES if name in versions}}


def _tested(versions: dict[str, str | None]) -> list[str]:
    """Returns the table of tested versions as text, what is outside of it here, and what this torch does not have."""
    from megatron_cp.torch_private import lacking

    found = outside(_of_table(versions))
    lines = ["Versions with which the unit tests have run:", *table().splitlines()]
    lines.append(f"Here untested: {'; '.join(found)}" if found else "This machine's versions are within that range.")
    missing = lacking()
    return [*lines, f"Private names that this torch does not have: {', '.join(missing)}"] if missing else lines


def _kernels() -> list[Finding]:
    """Tries every kernel for the device and type with which it would be used here."""
    import torch

    from megatron_cp.linear.kernels import CONVS, RULES, LinearCall
    from megatron_cp.softmax.kernels import KERNELS, AttentionCall

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    packing = Packing([1])
    call = AttentionCall(1.0, 128, 128, dtype, device)
    rows = [("attention", kernel.name, kernel.refusal(call), kernel.package) for kernel in KERNELS]
    for kind in (kind for kind in KINDS.values() if kind.has_state):
        linear_call = LinearCall(kind.rule, packing, dtype, device, 128, conv_width=4, channels=(128,))
        rules = [kernel for kernel in RULES if kind.rule in kernel.kinds]
        rows += [(kind.name, kernel.name, kernel.refusal(linear_call), kernel.package) for kernel in rules]
    rows += [("conv1d", kernel.name, kernel.refusal(linear_call), kernel.package) for kernel in CONVS]
    return [
        Finding(f"kernel {name} of {layer}", refusal is None, refusal or f"from {package}")
        for layer, name, refusal, package in rows
    ]


def _backends() -> list[Finding]:
    import torch
    import torch.distributed as dist

    return [
        Finding("ranks as threads", True, "for checks and tests"),
        Finding("ranks over gloo", dist.is_gloo_available(), "on the CPU; comes with torch"),
        Finding(
            "ranks over nccl",
            dist.is_nccl_available() and torch.cuda.is_available(),
            "one CUDA device a rank, under torchrun",
        ),
    ]


def _plans() -> list[Finding]:
    """Lists the options that planning supports; Megatron's models work only if megatron-core is installed."""
    is_installed = megatron_is_installed()
    return [
        Finding(f"{entry.argument} {entry.value}", entry.works, entry.remark)
        if is_installed or entry.argument != "megatron" or not entry.works
        else Finding(f"{entry.argument} {entry.value}", False, f"megatron-core is not installed: {INSTALL_MEGATRON}")
        for entry in CAPABILITIES
    ]
