"""`layer_program`: one direction of a layer, local work and head exchanges, in the order of every rank.

The executor runs the forward program and autograd the backward one. Prices, buffers and the peak of memory are walks
over both. No torch in here.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_cp.plan.steps import LocalStep, Step, ToHeads, ToTokens


class Project(NamedTuple):
    """Makes the tensors of one chunk of heads."""

    chunk: int


class Local(NamedTuple):
    """Runs steps that exchange no heads, in order; `chunk` is None for all heads of own tokens."""

    steps: tuple[LocalStep, ...]
    chunk: int | None


class Move(NamedTuple):
    """Packs and starts parts of a head exchange, or waits for them and unpacks them together.

    Attributes:
        step: the step that has the exchange; backward goes in the other direction.
        starts: False for the wait.
        parts: numbers of the parts, a single one on the head side.
    """

    step: ToHeads | ToTokens
    to_heads: bool
    starts: bool
    parts: tuple[int, ...]


LayerInstruction = Project | Local | Move
LayerProgram = tuple[LayerInstruction, ...]


def layer_program(steps: tuple[Step, ...], head_chunks: int, *, forward: bool, projected: bool = False) -> LayerProgram:
    """Returns the instructions of one direction. Backward has the adjoints of forward's in reverse.

    The steps up to the last exchange to the head side work on own tokens, and each exchange starts as soon as the steps
    before it are done. The other steps are run for one chunk of heads after another, while the next one arrives and the
    previous one is sent. If `projected`, the tensors of each chunk are made separately, while earlier chunks are under
    way.
    """
    if not forward:
        mirrored = layer_program(steps, head_chunks, forward=True, projected=projected)
        return tuple([_adjoint(do) for do in reversed(mirrored)])
    count = max((number for number, step in enumerate(steps, 1) if isinstance(step, ToHeads)), default=0)
    local = tuple([step for step in steps[count:] if not isinstance(step, ToHeads | ToTokens)])
    back = [step for step in steps if isinstance(step, ToTokens)]
    program, chunks = list[LayerInstruction](), tuple(range(head_chunks))
    for chunk in chunks if projected else [None]:
        program += [] if chunk is None else [Project(chunk)]
        for step in steps[:count]:
            if isinstance(step, ToHeads):
                program.append(Move(step, True, True, chunks if chunk is None else (chunk,)))
            elif not isinstance(step, ToTokens):
                program.append(Local((step,), chunk))
    for chunk in chunks:
        program += [Move(step, True, False, (chunk,)) for step in steps if isinstance(step, ToHeads)]
        program.append(Local(local, chunk))
        program += [Move(step, False, True, (chunk,)) for step in back]
    return (*program, *[Move(step, False, False, chunks) for step in back])


def _adjoint(do: LayerInstruction) -> LayerInstruction:
    match do:
        case Local(steps, chunk):
            return Local(steps[::-1], chunk)
        case Move(step, to_heads, starts, parts):
            return Move(step, not to_heads, not starts, parts[::-1])
    return do
