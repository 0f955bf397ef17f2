"""`with_levers`: a job with the levers of memory that context parallelism does not replace. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_cp.apps.estimate.job import Job
from megatron_cp.apps.estimate.model_layers import FULL, OPS
from megatron_cp.apps.estimate.models import ModelSpec

_ROWS = 1024  # rows of a chunk, as `linear_cross_entropy` has them
_PRODUCTS = 3  # of a step with each weight: one forward, two backward


def with_levers(model: ModelSpec, job: Job) -> Iterator[tuple[str, Job]]:
    """Yields the job as it is and with one lever more at a time, the cheapest first, each with a name."""
    yield "as given", job
    if job.logit_rows is None:
        job = replace(job, logit_rows=_ROWS)
        yield f"--logit-rows {_ROWS}", job
    takes_rows = not model.from_megatron and any(block.mlp for block in model.blocks)
    if job.mlp_rows is None and job.recompute != OPS and takes_rows:
        job = replace(job, mlp_rows=_ROWS)
        yield f"--mlp-rows {_ROWS}", job
    if job.recompute != FULL:
        job = replace(job, recompute=FULL)
        yield f"--recompute {FULL}", job
    if not job.saved_on_host:
        yield "--saved-on-host", replace(job, saved_on_host=True)


def repeated_products(model: ModelSpec, job: Job) -> float:
    """Returns the products with weights that backward repeats, as a part of those of a step without recomputation.

    Full recomputation runs all layers again, an MLP in chunks runs once more, and so does Megatron's head for logits of
    a few rows at a time. Products that "ops" recomputes are not counted.
    """
    each = [(block.weights(model.hidden_size), block.mlp) for block in model.blocks]
    layers, head = sum(weights for weights, _ in each), model.hidden_size * model.vocab_size
    repeated = layers if job.recompute == FULL else 0
    if job.mlp_rows is not None:
        repeated += sum(mlp.weights(model.hidden_size) for _, mlp in each if mlp is not None)
    if job.logit_rows is not None and model.from_megatron:
        repeated += head
    return repeated / (_PRODUCTS * (layers + head))
