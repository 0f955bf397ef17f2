"""A machine for tests of choices, which stays as it is when tables and presets change."""

import dataclasses

from megatron_cp.planner.predict import Link, machine

_NEAR, _FAR = Link(1.5e-5, 1e-6, 3.6e11), Link(2.5e-5, 4e-6, 4.5e10)
FIXED = dataclasses.replace(
    machine("h100"), within=_NEAR, between=_FAR,
    hardware=dataclasses.replace(
        machine("h100").hardware, name="fixed", matrix=6.5e14, matrix_rows=512.0, copy=1.3e12, tile=128, units=28.0,
        attention=((128, 4.1e14, 3.4e14),), row=(), call=1e-5, launch=4e-6, convolution=(6.5e11, 2.2e11), chain=(),
        rule=tuple((kind, 128, 3.6e13, 3.2e13, 0.0) for kind in ("gdn", "kda", "mamba")), rule_floor=4e-4,
        ring=(1.0, 1.0), host=(0.0, 0.0, 0.0),
    ),
)  # fmt: skip
