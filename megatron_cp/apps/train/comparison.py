"""The comparison of a run with one rank: `train --compare`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.apps.train.record import Entry, losses_of
from megatron_cp.testing import CODEC_TOLERANCES

REFERENCE = "one_rank"  # what --compare trains for comparison
GRADIENTS = ".first_gradients"  # while it compares
# Limits of --compare in fp32. Gradients of the first step differ by rounding alone; losses then drift apart.
GRADIENT_TOLERANCE, LOSS_TOLERANCE = 1e-5, 1e-3
CODED_LOSS_TOLERANCE = 2e-2
GRADIENT_DIFF = "first_step_grad_diff"


def compared(folder: Path, ours: Sequence[Entry], theirs: Sequence[Entry]) -> tuple[dict[str, float], str]:
    """Returns the numbers of `--compare`, and the line that describes them."""
    from megatron_cp.apps.train.checkpoint import compare_gradients
    from megatron_cp.apps.train.loop import FIRST_GRADIENTS

    kept = folder / GRADIENTS
    error, worst = compare_gradients(kept / FIRST_GRADIENTS, kept / REFERENCE / FIRST_GRADIENTS)
    losses = losses_of(ours), losses_of(theirs)
    steps = losses[0].keys() & losses[1].keys()
    # No step in common agrees with nothing; np.max is NaN if any is.
    loss_diff = float(np.max([abs(losses[0][step] - losses[1][step]) for step in steps])) if steps else math.nan
    line = f"max_loss_diff {loss_diff:.3g} over {len(steps)} steps, {GRADIENT_DIFF} {error:.3g} in {worst}"
    return {"max_loss_diff": loss_diff, GRADIENT_DIFF: error}, line


def agrees(data: dict[str, Any], options: TrainingOptions) -> bool:
    """Returns True if the two runs of `--compare` are equal up to rounding; a loss of NaN agrees with nothing."""
    return options.bf16 or all(data[name] is None or data[name] <= limit for name, limit in limits(options).items())


def limits(options: TrainingOptions) -> dict[str, float]:
    """Returns the largest differences allowed between the two runs: rounding, or the loss of a codec."""
    if options.cp_codec != "none" and options.context_parallel_size > 1:
        losses, gradients = CODED_LOSS_TOLERANCE, CODEC_TOLERANCES[options.cp_codec]
    else:
        losses, gradients = LOSS_TOLERANCE, GRADIENT_TOLERANCE
    return {"max_loss_diff": losses, GRADIENT_DIFF: gradients}
