"""Predicts the bytes (`memory`) and the time (`price`) that a plan takes on the machines of `hardware`."""

from megatron_cp.planner.predict.hardware import Hardware, Link, Machine, Topology
from megatron_cp.planner.predict.machine_files import machine, presets

__all__ = ["Hardware", "Link", "Machine", "Topology", "machine", "presets"]
