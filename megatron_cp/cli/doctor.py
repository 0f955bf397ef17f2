"""`megatron-cp doctor`: versions, kernels, devices, and what works here."""

from __future__ import annotations

import argparse
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from megatron_cp import __version__
from megatron_cp.cli.installed import INSTALL_MEGATRON, megatron_is_installed
from megatron_cp.cli.report import Report
from megatron_cp.layout import Packing
from megatron_cp.plan.kinds import KINDS
from megatron_cp.planner.capabilities import CAPABILITIES

HELP = "versions, kernels found, devices, and what works here"

_PACKAGES = (
    "torch", "numpy", "megatron-core", "fla-core", "flash-attn", "transformer-engine", "mamba-ssm", "causal-conv1d",
    "triton",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One row of the capability table: what it is, whether it works on this machine, and what it does or needs."""

    feature: str
    works: bool
    remark: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options of its own."""


def run(_args: argparse.Namespace) -> Report:
    """Looks around and reports."""
    import torch

    versions = {name: _version(name) for name in _PACKAGES}
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    findings = [*_kernels(), *_backends(), *_plans()]
    lines = [
        f"megatron-cp {__version__}, Python {platform.python_version()} on {platform.machine()}",
        "  ".join(f"{name} {found or '-'}" for name, found in versions.items()),
        f"devices: {', '.join(devices) if devices else 'the CPU only'}",
        "",
    ]
    width = max(len(finding.feature) for finding in findings)
    lines += [f"{'yes' if f.works else 'no ':<4}{f.feature:<{width + 2}}{f.remark}" for f in findings]
    data = {
        "version": __version__,
        "python": platform.python_version(),
        "versions": versions,
        "devices": devices,
        "capabilities": [asdict(finding) for finding in findings],
    }
    return Report("\n".join(lines), data)


def _kernels() -> list[Finding]:
    """Each kernel on the device that it would be used on, with the type that it would see there."""
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
    """How ranks can talk here."""
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
    """What can be planned, whatever is installed, and Megatron's models where it is."""
    is_installed = megatron_is_installed()
    return [
        Finding(f"{entry.argument} {entry.value}", entry.works, entry.remark)
        if is_installed or entry.argument != "megatron" or not entry.works
        else Finding(f"{entry.argument} {entry.value}", False, f"megatron-core is not installed: {INSTALL_MEGATRON}")
        for entry in CAPABILITIES
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
