"""`walk_pipeline`: plays Megatron's schedule of pipeline stages over microbatches. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PLAYED = 4  # rounds of all stages that are played; more microbatches repeat the busiest stage's


class Walk(NamedTuple):
    """A step of a pipeline.

    Attributes:
        seconds: the time from the first forward to the last backward.
        held: the most forwards of a chunk of layers that each stage holds for their backwards.
    """

    seconds: float
    held: tuple[int, ...]


def walk_pipeline(seconds: NDArray[np.float64], stages: int, microbatches: int, hop: float) -> Walk:
    """Plays one forward, one backward (1F1B), interleaved where a stage has several chunks of layers.

    Args:
        seconds: `[2, chunks]` the time of a microbatch's forward and backward in each chunk of layers, in the model's
            order; chunk `i` is that of stage `i % stages`.
        stages: number of stages.
        microbatches: number of microbatches; a multiple of the stages where chunks are interleaved.
        hop: seconds of a microbatch's activations, or their gradients, from a stage to the next.
    """
    depth = seconds.shape[1] // stages
    played = min(microbatches, _PLAYED * stages)
    orders = [list(_order(stage, stages, depth, played)) for stage in range(stages)]
    ends: dict[tuple[int, int, int], float] = {}
    now, place = [0.0] * stages, [0] * stages
    last, left = seconds.shape[1] - 1, sum(map(len, orders))
    while left:
        before_round = left
        for stage, order in enumerate(orders):
            while place[stage] < len(order):
                way, chunk, number = order[place[stage]]
                ready = 0.0
                if way == 0 and chunk > 0:
                    before = ends.get((0, chunk - 1, number))
                elif way == 1:
                    before = ends.get((0, chunk, number) if chunk == last else (1, chunk + 1, number))
                else:
                    before = -hop
                if before is None:
                    break
                ready = before + (0.0 if way == 1 and chunk == last else hop)
                now[stage] = max(now[stage], ready) + float(seconds[way, chunk])
                ends[way, chunk, number] = now[stage]
                place[stage] += 1
                left -= 1
        assert left < before_round, "every stage waits for another"
    period = max(float(seconds[:, stage::stages].sum()) for stage in range(stages))
    held = []
    for order in orders:
        running = np.cumsum([1 - 2 * way for way, _, _ in order])
        held.append(int(running.max()))
    return Walk(max(now) + (microbatches - played) * period, tuple(held))


def _order(stage: int, stages: int, depth: int, microbatches: int) -> Iterator[tuple[int, int, int]]:
    """Yields what a stage does as (0 forward or 1 backward, chunk, microbatch), as Megatron orders it."""
    total = microbatches * depth
    warm = stages - stage - 1
    if depth > 1:
        warm = 2 * warm + (depth - 1) * stages
    warm = min(warm, total)

    def item(way: int, number: int) -> tuple[int, int, int]:
        turn, within = divmod(number, stages * depth)
        level, place = divmod(within, stages) if depth > 1 else (0, 0)
        level = depth - 1 - level if way == 1 else level
        microbatch = turn * stages + place if depth > 1 else number
        return way, level * stages + stage, microbatch

    yield from (item(0, number) for number in range(warm))
    for number in range(warm, total):
        yield item(0, number)
        yield item(1, number - warm)
    yield from (item(1, number) for number in range(total - warm, total))
