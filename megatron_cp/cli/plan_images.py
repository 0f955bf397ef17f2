"""Describes the vision tower of a model for `megatron-cp plan --images`; its rows are a packing of their own."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from megatron_cp.cli.applications import application
from megatron_cp.cli.plan_table import BOTH
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Packing
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.route import rows_between
from megatron_cp.plan.describe import counted, plural, size
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.images import Tower, TowerPlan, layouts_of_rows, plan_tower
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.price import there_and_back
from megatron_cp.planner.predict.simulate import simulate


def check_images(args: argparse.Namespace) -> None:
    """Refuses `--images` beside options with which no tower is priced, and for models whose tower is not known."""
    if args.images is None:
        return
    refused = {
        "only with --model": args.model is None, "only without --parents": args.parents is not None,
        "only without --whole": args.whole, "only with one --cp": len(args.cp) > 1,
    }  # fmt: skip
    for allowed in (words for words, holds in refused.items() if holds):
        raise ArgumentError("--images", _typed(args), allowed)
    if tower_of(args) is None:
        known = ", ".join(application("estimate").TOWERS)
        raise ArgumentError("--images", _typed(args), f"only with the config.json of a --model of the types {known}")


def tower_of(args: argparse.Namespace) -> Tower | None:
    """Returns the vision tower of `--model`; None without one that is known."""
    found: Tower | None = application("estimate").read_model(args.model).tower if args.model else None
    return found


def images_of(args: argparse.Namespace, plan: Plan, item_size: int) -> tuple[list[str], dict[str, Any] | None]:
    """Returns lines on the vision tower of `--model`, and its numbers; no numbers without `--images`.

    Args:
        args: the command line.
        plan: the plan of a layer of text.
        item_size: bytes of an activation.
    """
    tower = tower_of(args)
    if tower is None:
        return [], None
    if args.images is None:
        return ["tower: the model's vision tower is not priced; --images names the images of the batch"], None
    text, on = plan.hidden_layout or plan.layout, machine(args.gpu)
    frames = tower.frames(args.images, text.packing.total)
    found = plan_tower(tower, frames, plan.cp_size, on, hosts=args.hosts, item_size=item_size)
    alone = plan_tower(tower, frames, 1, on, item_size=item_size)
    places = _spread(np.array(tower.rows_of(args.images)), text.packing.total)
    packing, row = Packing(frames.prod(1)), tower.features * item_size
    counts = rows_between(*layouts_of_rows(packing, found.pieces, found.order, places, text))
    moved = simulate(
        there_and_back(counts, row, on.hardware, "rows of images"), on.topology(plan.cp_size, args.hosts),
        cores=on.hardware.cores,
    )  # fmt: skip
    data = {
        "rows_per_rank": found.rows.tolist(), "operations_per_rank": found.operations.tolist(),
        "work_imbalance": float(found.operations.max() / found.operations.mean()),
        "predicted_ms": dict(zip(BOTH, found.milliseconds, strict=True)),
        "images": len(frames), "images_split": found.num_split,
        "attention": [{"layers": layers, "scheme": each.strategy} for each, layers in found.attention],
        "exchange_bytes_sent_per_rank": ((counts.sum(1) - np.diag(counts)) * row).tolist(),
        "exchange_predicted_ms": 1e3 * moved.seconds,
        "all_images_on_each_rank": {
            "operations": int(alone.operations[0]), "predicted_ms": dict(zip(BOTH, alone.milliseconds, strict=True)),
        },
    }  # fmt: skip
    return _lines(tower, found, alone, data), data


def _lines(tower: Tower, found: TowerPlan, alone: TowerPlan, data: dict[str, Any]) -> list[str]:
    rows, number = found.rows, data["images"]
    images = f"{counted(number, 'image')} or {plural('frame', number)}"
    by = " and ".join(f"{each.strategy} in {counted(layers, 'layer')}" for each, layers in found.attention)
    split = f"{found.num_split} will be split over ranks, with attention by {by}"
    whole = "each will stay whole on a rank"
    whole += "" if rows.min() else "; ranks without one will run the cheapest beside the others"
    return [
        f"tower: {counted(tower.layers, 'layer')} will make {rows.sum():,} of the batch's tokens from {images}",
        f"  images: {split if found.num_split else whole}",
        f"  rows: a rank will make at least {rows.min():,}, in the mean {rows.mean():,.0f}, at most {rows.max():,}",
        f"  work: the busiest rank will have {found.operations.max():.4g} floating-point operations forward, "
        f"{data['work_imbalance']:.3f} x the mean",
        f"  time: {_times(found)}, of matrix products and attention",
        f"  rows to the text: the busiest rank will send {size(max(data['exchange_bytes_sent_per_rank']))} forward; "
        f"{data['exchange_predicted_ms']:.3f} ms forward and backward. Images are taken to be spread evenly over the "
        "batch",
        f"  if every rank ran all images: {alone.operations[0]:.4g} operations on each, {_times(alone)}, no exchange",
    ]


def _times(plan: TowerPlan) -> str:
    forward, backward = plan.milliseconds
    return f"{forward:.3f} ms forward and {backward:.3f} ms backward predicted"


def _spread(rows: IntArray, total: int) -> IntArray:
    """Returns the places of images' rows in a batch of so many tokens, with as much text between any two images."""
    text = np.arange(1, rows.size + 1) * (total - rows.sum()) // (rows.size + 1)  # before each image
    return np.repeat(text, rows) + np.arange(rows.sum())


def _typed(args: argparse.Namespace) -> str:
    return ",".join("x".join(map(str, grid)) for grid in args.images)
