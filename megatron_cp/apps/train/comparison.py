"""The comparison of a run with one rank: `train --compare`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.apps.train.curves import Entry, losses_of, validation_of
from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.testing import CODEC_TOLERANCES

REFERENCE = "one_rank"  # what --compare trains for comparison
GRADIENTS = ".first_gradients"  # while it compares
# Limits of --compare in fp32. Gradients of the first step differ by rounding alone; losses then drift apart.
GRADIENT_TOLERANCE, LOSS_TOLERANCE = 1e-5, 1e-3
CODED_LOSS_TOLERANCE = 2e-2
GRADIENT_DIFF = "first_step_grad_diff"


def compared(
    folder: Path, options: TrainingOptions, ours: Sequence[Entry], theirs: Sequence[Entry]
) -> tuple[dict[str, float | None], list[str]]:
    """Returns the numbers of `--compare`, and the lines that describe them."""
    from megatron_cp.apps.train.checkpoint import compare_gradients
    from megatron_cp.apps.train.loop import FIRST_GRADIENTS

    names = [f"{FIRST_GRADIENTS}.{rank}.pt" for rank in range(options.tensor_model_parallel_size)]
    kept = folder / GRADIENTS
    gradients = compare_gradients([kept / name for name in names], [kept / REFERENCE / name for name in names])
    losses, held_out = ((of(ours), of(theirs)) for of in (losses_of, validation_of))
    loss_diff, validation_diff = _furthest(*losses), _furthest(*held_out)
    loss_diff = math.nan if loss_diff is None else loss_diff  # no step in common agrees with nothing
    lines = [
        f"max_loss_diff {loss_diff:.3g} over {len(losses[0].keys() & losses[1].keys())} steps, first_step_grad_diff "
        f"{gradients.error:.3g}",
        f"(largest share of a gradient itself: {gradients.worst_error:.3g} in {gradients.worst}, whose gradient is "
        f"{gradients.worst_share:.2g} of the largest)",
    ]
    if validation_diff is not None:
        lines.append(f"max_validation_diff {validation_diff:.3g}")
    found = {"max_loss_diff": loss_diff, "max_validation_diff": validation_diff, GRADIENT_DIFF: gradients.error}
    return found, lines


def _furthest(ours: dict[int, float], theirs: dict[int, float]) -> float | None:
    """Returns the largest difference at the steps that both have, NaN if any is; None if there is no such step."""
    steps = ours.keys() & theirs.keys()
    return float(np.max([abs(ours[step] - theirs[step]) for step in steps])) if steps else None


def agrees(data: dict[str, Any], options: TrainingOptions) -> bool:
    """Returns True if the two runs of `--compare` are equal up to rounding; a loss of NaN agrees with nothing."""
    return options.bf16 or all(data[name] is None or data[name] <= limit for name, limit in limits(options).items())


def limits(options: TrainingOptions) -> dict[str, float]:
    """Returns the largest differences allowed between the two runs: rounding, or the loss of a codec."""
    if options.cp_codec != "none" and options.context_parallel_size > 1:
        losses, gradients = CODED_LOSS_TOLERANCE, CODEC_TOLERANCES[options.cp_codec]
    else:
        losses, gradients = LOSS_TOLERANCE, GRADIENT_TOLERANCE
    return {"max_loss_diff": losses, "max_validation_diff": losses, GRADIENT_DIFF: gradients}
