"""What a plan will take: `memory` in bytes, `price` in time, on machines that `hardware` names."""

from megatron_cp.planner.predict.hardware import Hardware, Link, Machine, Topology, machine, presets

__all__ = ["Hardware", "Link", "Machine", "Topology", "machine", "presets"]
