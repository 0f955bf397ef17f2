"""The cells of the table: a way, a model, lengths and ranks; and how one is compared."""

import dataclasses
import importlib
import importlib.metadata

import torch
from torch.distributed.device_mesh import init_device_mesh

from tools.conformance import models
from tools.conformance.judge import ABSENT, UNABLE, Outcome, in_order, over_ranks, relative, run_cell
from tools.conformance.ways import DIFFUSION_WAYS, LANGUAGE_WAYS, Way


@dataclasses.dataclass(frozen=True)
class Cell:
    """A way of context parallelism on a model, lengths of documents (or rows of image and text) and ranks."""

    way: str
    model: str
    lengths: str
    ranks: int

    @property
    def kind(self) -> Way:
        """The way."""
        return (DIFFUSION_WAYS if self.model in models.DIFFUSION else LANGUAGE_WAYS)[self.way]


def all_cells(only: str = "") -> list[Cell]:
    """Returns the cells whose way or model has `only` in its name."""
    tables = ((LANGUAGE_WAYS, models.LANGUAGE, models.LENGTHS), (DIFFUSION_WAYS, models.DIFFUSION, models.ROWS))
    cells = [
        Cell(name, model, lengths, ranks)
        for ways, kinds, sizes in tables
        for name, way in ways.items()
        for model in kinds
        for ranks in way.ranks
        for lengths in sizes
    ]
    found = [cell for cell in cells if only in f"{cell.way} {cell.model}"]
    return sorted(found, key=lambda cell: cell.ranks)


def unavailable(way: Way) -> Outcome | None:
    """Imports what a way needs, so that forked ranks have it. Returns why it cannot be used, or None."""
    try:
        importlib.metadata.version(way.package)
    except importlib.metadata.PackageNotFoundError:
        return Outcome(ABSENT, words=way.package)
    try:
        importlib.import_module(way.module)
    except Exception as error:
        return Outcome(UNABLE, words=f"import {way.module}: {type(error).__name__}: {str(error).splitlines()[0]}")
    return None


def run(cell: Cell, seconds: float) -> Outcome:
    """Runs a cell."""
    reason = unavailable(cell.kind)
    if reason is not None:
        return reason
    compare = _diffusion if cell.model in models.DIFFUSION else _language
    return run_cell(lambda _rank, ranks: compare(cell, ranks), cell.ranks, seconds)


def _language(cell, ranks):
    problem = models.language(cell.model, models.LENGTHS[cell.lengths])
    total, errors = len(problem.logits), []

    def finish(rows, places):
        weight = problem.weight
        if places is not None:
            real = (places < total)[:, None]
            weight = torch.where(real, weight[places.clamp(max=total - 1)], 0.0)
        (rows * weight).sum().backward()
        errors.append(relative(rows.detach() if places is None else in_order(rows, places, total), problem.logits))

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)) if ranks > 1 else None
    cell.kind.run(problem, mesh, finish)
    return errors[0], relative(_summed(problem.model.get_input_embeddings().weight), problem.gradient)


def _summed(parameter):
    return over_ranks(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _diffusion(cell, ranks):
    heads, (image, text) = models.DIFFUSION[cell.model], models.ROWS[cell.lengths]
    model, inputs, weight, expected, gradient = models.flux(heads, image, text)
    trains = cell.kind.run(model, ranks)
    with torch.set_grad_enabled(trains):
        out = model(**inputs, return_dict=False)[0][0]
    if not trains:
        return relative(out, expected), None
    (out * weight).sum().backward()
    return relative(out.detach(), expected), relative(_summed(model.get_parameter(models.FLUX_EARLY)), gradient)
