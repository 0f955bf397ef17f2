"""A rank's own tokens of a linear layer: as segments of documents, as whole documents, and by megatron-core's rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_cp.apps.bench.peer_limits import MEGATRON
from megatron_cp.apps.bench.work import Work
from megatron_cp.executor import Message, Pending, RankGroup, ThreadGroup
from megatron_cp.linear import Delta, Inputs, LinearOnRank, StateSpace, l2_normalised, softplus
from megatron_cp.plan import GDN, KINDS, MAMBA
from megatron_cp.testing import TOLERANCES, Case, draw, relative_error

PLACES = ("first", "middle", "last", "few")
RANKS, NUM_PIECES = 3, 32  # ranks that share a document, and at most so many pieces of it


def segments(case: Case, tokens: int) -> dict[str, Work]:
    """Returns a rank's own part of the rule, or of a convolution alone, for every place of its tokens in documents.

    Since other ranks send zeros, segments compute the same as whole documents.
    """
    values = _drawn(case, tokens)
    pieces = piece_lengths(tokens)
    # The first piece continues a document of the rank before, the last one goes on on the rank after.
    begun, continued = min(pieces[0], tokens - 1), min(pieces[-1], tokens - 1)
    cut = [tokens - begun, begun + pieces[0], *pieces[1:-1], pieces[-1] + continued, tokens - continued]
    if len(pieces) == 1:
        cut = [RANKS * tokens]
    alone = {"plain": [tokens], "few plain": pieces}
    spread_out = {name: (rank, [RANKS * tokens]) for rank, name in enumerate(PLACES[:RANKS])} | {"few": (1, cut)}
    works = {
        name: _own_part(case, lengths, 1, ThreadGroup.create(1)[0], "headwise", values)
        for name, lengths in alone.items()
    }
    for name, (rank, lengths) in spread_out.items():
        works[name] = _own_part(case, lengths, RANKS, _NoWire(rank, RANKS), "chunkwise", values)
    return works


def piece_lengths(tokens: int) -> list[int]:
    """Returns up to `NUM_PIECES` documents of very different lengths, `tokens` in all; always the same."""
    draws = np.random.default_rng(0).lognormal(mean=3.0, sigma=1.2, size=NUM_PIECES)
    edges = np.unique(np.round(np.cumsum(draws) / draws.sum() * tokens).astype(int))
    lengths: list[int] = np.diff(edges, prepend=0).tolist()
    return [length for length in lengths if length]


def _own_part(
    case: Case, lengths: Sequence[int], ranks: int, group: RankGroup, mode: str, values: list[Tensor]
) -> Work:
    case = replace(case, cp=ranks, lengths=tuple(lengths), layout="contiguous", align=1, scheme=mode)
    plan = case.plan()
    inputs = [x.detach().clone().requires_grad_() for x in values]
    random = torch.Generator().manual_seed(case.seed)

    def conv(group: RankGroup) -> Tensor:
        share = LinearOnRank(plan, group, case.kernel, "values", inputs[0])
        x = inputs[0] if share.is_chunkwise else inputs[0][..., None]
        return share.convolved([x], *inputs[1:], count=1)[0].flatten(1)

    def rule(group: RankGroup) -> Tensor:
        share = LinearOnRank(plan, group, case.kernel, "values", inputs[0])
        named = _named(case, inputs)
        return share.recurrence(named, case.head_dim**-0.5 if isinstance(named, Delta) else 1.0)

    has_state = KINDS[case.layer].has_state
    values_of = _named(case, inputs).values if has_state else inputs[0]
    gradient = torch.randn(values_of.shape, generator=random, dtype=torch.float64).to(values_of)
    return Work(rule if has_state else conv, inputs, gradient, group)


def _named(case: Case, inputs: list[Tensor]) -> Inputs:
    return StateSpace(*inputs) if KINDS[case.layer] is MAMBA else Delta(*inputs)


def _drawn(case: Case, tokens: int) -> list[Tensor]:
    """Draws the rule's arguments as the mixers of `draw` would pass them; for conv1d, the layer's."""
    random = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    heads, groups, dk, dv = case.heads, case.groups, case.head_dim, case.value_head_dim
    if not KINDS[case.layer].has_state:
        problem = draw(replace(case, lengths=(tokens,)))
        return [*problem.inputs.values(), *problem.parameters.values()]
    rates = (0.3 * normal(heads) - 1).exp()
    steps = softplus(normal(tokens, heads) - 1)
    inputs: Inputs
    if KINDS[case.layer] is MAMBA:
        inputs = StateSpace(
            normal(tokens, heads, dv), steps, -rates, normal(tokens, groups, dk), normal(tokens, groups, dk)
        )
    else:
        decay = (
            -rates * steps if KINDS[case.layer] is GDN else -rates[:, None] * softplus(normal(tokens, heads, dk) - 1)
        )
        q, k = (l2_normalised(normal(tokens, groups, dk)) for _ in "qk")
        inputs = Delta(q, k, normal(tokens, heads, dv), decay, normal(tokens, heads).sigmoid())
    return [x.to(case.dtype).to(case.device) for x in inputs]


def megatron_rule(case: Case, plain: Work) -> dict[str, Work]:
    """Returns megatron-core's own function for the same work as `plain`, in plain torch."""
    if KINDS[case.layer] is not GDN:
        raise ImportError(f"it has nothing of its own in plain torch for {case.layer}")
    from megatron_cp.apps.bench.peers.delta_rule import gated_delta_rule

    inputs = [x.detach().clone().requires_grad_() for x in plain.inputs]
    theirs = Work(lambda _: gated_delta_rule(*inputs), inputs, plain.gradient, plain.group)
    tolerance = 10 * max(TOLERANCES[case.dtype], TOLERANCES[torch.float32])  # they compute in float32
    with torch.no_grad():
        error = relative_error(theirs.forward(plain.group), plain.forward(plain.group), 1e-3)
    if not error <= tolerance:
        raise RuntimeError(f"megatron-core's rule differs from ours by {error:.2g}, more than {tolerance:.0e}")
    return {MEGATRON: theirs}


class _NoWire(RankGroup):
    """A rank of a group whose other ranks send zeros at once."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.agreed.compares_calls = False  # there is no other rank to compare with

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        received.detach().zero_()
        return _Done()

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        received.detach().zero_()
        return _Done()

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for message in receives:
            message.tensor.detach().zero_()
        return _Done()

    def barrier(self) -> None:
        pass


class _Done(Pending):
    def wait(self) -> None:
        pass
