"""`best_rounds`: predicts the best number of rounds for the rows of assigned tiles. No torch in here."""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.plan.assignment import ScheduleQuality
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.predict.bound import bounds_of_directions
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.price import described
from megatron_cp.planner.predict.simulate import simulate
from megatron_cp.planner.predict.walk import program_of

_COUNTS = (1, 2)  # three and four were never 1 % faster in the simulator, and often slower: see docs/tiles.md
# A schedule within this factor of its bound needs no further simulation, and a smaller gain does not justify another
# round: every message has costs of the host, which predictions for a GPU do not count.
_NEAR = 1.005

Rounds = tuple[tuple[int, int], tuple[ScheduleQuality, ScheduleQuality]]


def best_rounds(plan: Plan, on: Machine, topology: Topology, item_size: int) -> Rounds:
    """Returns the number of rounds for each direction, and the predicted time with its bound.

    Equal arguments give equal results on every rank: nothing is sent, and no clock is read.

    Args:
        plan: a plan with assigned tiles.
        on, topology: the machine, and the hosts of the ranks.
        item_size: bytes of an activation.
    """
    bounds = bounds_of_directions(plan, on, topology, item_size)
    tried = {rounds: plan_in_rounds(plan, (rounds, rounds)) for rounds in _COUNTS}
    chosen, known = [], []
    for forward, bound in zip((True, False), bounds, strict=True):
        best, fastest, stages = _COUNTS[0], float("inf"), 0
        for rounds, made in tried.items():
            step = made.attend
            assert step is not None
            if len(step.stages_in(forward=forward)) == stages:  # all keys come in the first round
                break
            stages = len(step.stages_in(forward=forward))
            program = program_of(made, on.hardware, item_size, forward=forward, hosts=topology.hosts)
            milliseconds = 1e3 * simulate(program, topology, cores=on.hardware.cores).seconds
            if milliseconds * _NEAR < fastest:
                best, fastest = rounds, milliseconds
            if fastest <= bound * _NEAR:
                break
        chosen.append(best)
        known.append(ScheduleQuality(fastest, bound, described(on, topology)))
    return (chosen[0], chosen[1]), (known[0], known[1])


def plan_in_rounds(plan: Plan, rounds: tuple[int, int], schedules: tuple[ScheduleQuality, ...] = ()) -> Plan:
    """Returns the plan with so many rounds of the tiles' rows, forward and backward."""
    steps = tuple(_step_in_rounds(step, rounds, schedules) if isinstance(step, Attend) else step for step in plan.steps)
    return replace(plan, steps=steps)


def _step_in_rounds(step: Attend, rounds: tuple[int, int], schedules: tuple[ScheduleQuality, ...]) -> Attend:
    assert step.tiled is not None
    return step.with_tiles(replace(step.tiled, rounds=rounds, schedules=schedules))
