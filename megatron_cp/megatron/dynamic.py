"""`--dynamic-context-parallel`: deals the documents of a step to groups of ranks, each to as few as are fast.

Without the flag, every pack of a data-parallel rank is spread over the model's context-parallel ranks. With it, all
data- and context-parallel ranks share the documents of the step: `group_microbatches` deals them, and the documents
travel once a step, on the host. Every rank still runs as many microbatches as Megatron counts, so that Megatron's own
schedules, pipelines and experts run them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch import Tensor

from megatron_cp.batch.pack import Pack as HostPack
from megatron_cp.data.group_schedule import group_microbatches
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import RankGroup
from megatron_cp.layout import Packing
from megatron_cp.megatron.groups import BatchGroups
from megatron_cp.megatron.pack import Pack
from megatron_cp.planner.predict.machine_files import machine
from megatron_cp.planner.predict.pack_cost import PackCost

_NO_LABEL = -1


def grouped_packs(packs: Iterator[HostPack], groups: BatchGroups, args: argparse.Namespace) -> Iterator[HostPack]:
    """Yields a data-parallel rank's packs; with `--dynamic-context-parallel`, those of its groups instead.

    Then it reads the packs of a whole step when the first of a step is asked for, and yields as many, each with its
    `ranks`. It is for training: evaluation in Megatron means ranks' means, which groups of different sizes change.

    Args:
        packs: this data-parallel rank's packs, in the order of Megatron's data-parallel ranks and microbatches, the
            same on its context-parallel ranks and pipeline stages. Documents do not branch.
        groups: from `BatchGroups.make()`. `groups.of(pack)` are the ranks of a pack, also after `broadcast_pack`.
        args: Megatron's arguments, parsed with `add_arguments` and checked by `with_options`.

    Raises:
        ArgumentError: on every rank, for packs whose documents branch, or that are longer than `--seq-length`, and for
            ranks that read other numbers of packs, or other documents than their context-parallel ranks.
    """
    if not args.cp_dynamic:
        yield from packs
        return
    cost, exchange = step_cost(args)
    while step := _read(list(itertools.islice(packs, get_num_microbatches())), groups, args):
        yield from _grouped(step, groups, args, cost, exchange)


def tokens_per_rank(args: argparse.Namespace) -> int:
    """Returns the most tokens of a microbatch on a rank: `--max-seqlen-per-dp-cp-rank`, or a pack's over its ranks."""
    given: int | None = args.max_seqlen_per_dp_cp_rank
    return -(-args.seq_length // args.context_parallel_size) if given is None else given


def step_cost(args: argparse.Namespace) -> tuple[PackCost, float]:
    """Returns the seconds of documents, and of a token that a rank exchanges, on `--cp-hardware`, by a job's flags.

    Documents cost the flops that Megatron counts. A token's exchange is that of its heads in every layer, there and
    back, over the slowest link among the job's data- and context-parallel ranks. Both are estimates, from which the
    number of ranks of a document is chosen.
    """
    from megatron.training.training import num_floating_point_operations

    token = num_floating_point_operations(args, 1, seqlen_squared_sum_in_batch=0, total_real_tokens_in_batch=1)
    pair = num_floating_point_operations(args, 1, seqlen_squared_sum_in_batch=1, total_real_tokens_in_batch=0)
    hardware = machine(args.cp_hardware)
    topology = hardware.topology(args.data_parallel_size * args.context_parallel_size)
    link = topology.within if topology.num_hosts == 1 else topology.between
    pattern = args.hybrid_layer_pattern
    layers = args.num_layers if not pattern else sum(pattern.count(letter) for letter in "GMD*+")
    keys = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    # Bytes in bf16 of q, k, v and the output, forward and backward.
    sent = layers * 2 * 2 * (args.num_attention_heads + keys) * args.kv_channels * 2
    return PackCost(0.0, token, pair).at_rates_of(hardware.hardware, args.kv_channels), sent / link.bandwidth


@dataclass(frozen=True)
class _Said:
    """A rank's message to all others about the packs of a step that it reads."""

    replica: int
    packs: int
    lengths: tuple[int, ...]
    refusal: tuple[str, object, str, str] | None


@dataclass(frozen=True)
class _Step:
    """The packs of a step.

    Attributes:
        packs: those of this data-parallel rank.
        rows: of each of their documents that has a token `[3 * length]` 8-byte words: its tokens, labels, and weights,
            which are float64.
        said: what each rank has said.
    """

    packs: Sequence[HostPack]
    rows: Sequence[Tensor]
    said: Sequence[_Said]


def _read(packs: Sequence[HostPack], groups: BatchGroups, args: argparse.Namespace) -> _Step | None:
    """Returns this rank's packs of a step, as all ranks know them; None if no rank has any."""
    lengths, rows = list[int](), list[Tensor]()
    refusal: tuple[str, object, str, str] | None = None
    for pack in packs:
        if pack.packing.branches is not None:
            remedy = "Trees are spread over the ranks as they are: leave the flag out."
            refusal = ("--dynamic-context-parallel", "documents that branch", "documents in a row", remedy)
            continue
        if pack.packing.total > args.seq_length:
            refusal = ("--seq-length", args.seq_length, f"at least {pack.packing.total}, the tokens of a pack", "")
        given = {"tokens": pack.tokens, "labels": pack.labels, "loss_mask": pack.loss_mask}
        rows_of = {name: x.numel() for name, x in given.items() if x is not None and x.numel() != pack.packing.total}
        if rows_of:  # others would wait for the documents of a rank that alone fails
            name, number = next(iter(rows_of.items()))
            refusal = (name, number, f"{pack.packing.total}, the tokens of the pack's documents", "")
            continue
        ends = pack.packing.cu_seqlens[1:]
        labels = _next_tokens(pack.tokens, ends) if pack.labels is None else pack.labels
        weights = torch.ones(len(pack.tokens)) if pack.loss_mask is None else pack.loss_mask
        words = torch.stack([pack.tokens.long(), labels.long(), weights.double().view(torch.int64)])
        for end, length in zip(ends.tolist(), pack.packing.lengths.tolist(), strict=True):
            if length:
                lengths.append(length)
                rows.append(words[:, end - length : end].flatten())
    own = _Said(parallel_state.get_data_parallel_rank(), len(packs), tuple(lengths), refusal)
    everyone, host_group = _everyone(groups)
    said = [own] * everyone.size
    dist.all_gather_object(said, own, group=host_group)
    refused = next((each.refusal for each in said if each.refusal is not None), None)
    if refused is not None:
        raise ArgumentError(*refused)
    counts = sorted({each.packs for each in said})
    if len(counts) > 1:
        raise ArgumentError("packs", f"{counts} in a step", "the same number on every data-parallel rank")
    if len({each.replica for each in said}) != len({(each.replica, each.lengths) for each in said}):
        raise ArgumentError("packs", "other documents", "the same on all context-parallel ranks of a replica")
    return _Step(packs, rows, said) if packs else None


def _grouped(
    step: _Step, groups: BatchGroups, args: argparse.Namespace, cost: PackCost, exchange: float
) -> Iterator[HostPack]:
    """Yields the packs of this rank's groups, from those of its data-parallel rank."""
    everyone, host_group = _everyone(groups)
    holders: dict[int, list[int]] = {}
    for rank, each in enumerate(step.said):
        holders.setdefault(each.replica, []).append(rank)
    # Each document by its number in the step, with the data-parallel rank that read it and its place there.
    lengths_of = {of: step.said[ranks[0]].lengths for of, ranks in sorted(holders.items())}
    read = [(of, place) for of, own in lengths_of.items() for place in range(len(own))]
    lengths = [lengths_of[of][place] for of, place in read]
    try:
        schedule = group_microbatches(
            lengths, ranks=everyone.size, microbatches=len(step.packs), tokens_per_rank=tokens_per_rank(args),
            cost=cost, exchange=exchange, smallest=args.min_dynamic_context_parallel_size, barrier=_waits(args),
        )  # fmt: skip
    except ArgumentError as error:
        if error.argument != "tokens_per_rank":
            raise
        yield from step.packs  # packs so full that no other arrangement was found, on any rank
        return
    # Of the ranks that hold a document each sends some.
    sender = [holders[of][number % len(holders[of])] for number, (of, _) in enumerate(read)]
    needed = [
        [number for batch in schedule.of_rank(rank) for number in batch.documents] for rank in range(everyone.size)
    ]
    sent = [[number for number in needed[rank] if sender[number] == everyone.rank] for rank in range(everyone.size)]
    mine = [[number for number in needed[everyone.rank] if sender[number] == rank] for rank in range(everyone.size)]
    outgoing = [step.rows[read[number][1]] for numbers in sent for number in numbers]
    message = torch.cat(outgoing) if outgoing else torch.empty(0, dtype=torch.int64)
    sent_words, words = ([3 * sum(lengths[number] for number in numbers) for numbers in each] for each in (sent, mine))
    received = torch.empty(sum(words), dtype=torch.int64)
    dist.all_to_all_single(received, message, words, sent_words, group=host_group)
    order = [number for numbers in mine for number in numbers]
    rows = dict(zip(order, received.split([3 * lengths[number] for number in order]), strict=True))
    for batch in schedule.of_rank(everyone.rank):
        held = torch.cat([rows[number].view(3, -1) for number in batch.documents], 1)
        packing = Packing([lengths[number] for number in batch.documents])
        yield Pack(packing, held[0], held[1], held[2].view(torch.float64).float(), ranks=batch.ranks)


def _next_tokens(tokens: Tensor, ends: np.ndarray[Any, Any]) -> Tensor:
    """Returns each token's label `[total]`: the next one of its document, which the last one does not have."""
    labels = tokens.long().roll(-1)
    labels[torch.from_numpy(np.unique(ends[ends > 0]) - 1)] = _NO_LABEL
    return labels


def _waits(args: argparse.Namespace) -> bool:
    """True if all ranks wait for each other in every microbatch."""
    return bool(args.pipeline_model_parallel_size > 1 or args.expert_model_parallel_size > 1)


def _everyone(groups: BatchGroups) -> tuple[RankGroup, dist.ProcessGroup]:
    """Returns all data- and context-parallel ranks, and a group of them that moves host memory."""
    size = parallel_state.get_data_parallel_group(with_context_parallel=True).size()
    found: Any = groups.part(range(size))
    return found, found.host_group or found.group
