"""`reduce_gradients`: sums each rank's share of the parameters' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from megatron_cp.batch.ranks import ranks_of
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.agreement import agree_on_call, agree_on_inputs
from megatron_cp.executor.arguments import DTYPES, accumulation_dtype, check_dense
from megatron_cp.executor.groups import Group, RankGroup
from megatron_cp.executor.no_compile import no_compile

_BUCKET_BYTES = 64 * 2**20  # of one message, which takes memory twice, to send and to receive


@no_compile
def reduce_gradients(parameters: nn.Module | Iterable[Tensor], group: Group | None = None) -> None:
    """Sums the gradients of parameters over ranks, in place: for a plain loop, once a step, after its last backward.

    It is for a loop without DistributedDataParallel or FSDP, which reduce gradients themselves. Every rank calls it,
    with the same parameters in the same order. A gradient that this rank lacks counts as zeros, and exists afterwards,
    unless every rank lacks it. Sums run in rank order, in at least float32: they are the same bits on every rank and in
    every run. Calling it twice sums twice.

    The first call with parameters of these types and shapes compares their values between ranks, those included that
    need no gradient: one pass over them, and 16 bytes a rank. Ranks that begin with other weights would train another
    model each. `compare_calls(group, False)` turns it off, with the comparison of calls.

    Args:
        parameters: a module, or some of its parameters; those that need no gradient are only compared.
        group: the ranks: the context-parallel group or, with data parallelism too, all ranks of both. None for one
            rank, which is refused in a world of several.

    Raises:
        ArgumentError: no parameters, sparse gradients, or parameters whose gradients something else reduces.
        CallMismatchError: another rank has other parameters, or other values of them at the first call.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> (3 * weight).sum().backward()
        >>> reduce_gradients([weight])
        >>> weight.grad.tolist()
        [3.0, 3.0]
    """
    named, ranks = _checked(parameters), ranks_of(group)
    chosen = [parameter for parameter in named.values() if parameter.requires_grad]
    kinds = {f"parameter {number}": f"{list(p.shape)} {p.dtype} on {p.device.type}" for number, p in enumerate(chosen)}
    compared: list[bool] = []

    def compare() -> dict[str, bool]:  # it is called only where ranks compare
        compared.append(True)
        return {}

    mark = agree_on_call(ranks, [], "reduce_gradients", {}, kinds, compare)
    if compared:  # for the first time, now that all ranks have as many parameters
        agree_on_inputs(ranks, "reduce_gradients", named, _OTHER_WEIGHTS)
    if ranks.size > 1:
        for number, bucket in enumerate(_buckets(chosen)):
            ranks.activity = f"{mark}, bucket {number}"
            _reduce(bucket, ranks)


_OTHER_WEIGHTS = (
    "the ranks' parameters differ ({other} from rank 0); build the model after the same torch.manual_seed on every "
    "rank, load the same checkpoint, or broadcast the first rank's parameters before the first step"
)


def _reduce(parameters: list[Tensor], ranks: RankGroup) -> None:
    """Sums the gradients of one bucket: each rank sums a share of it, and gathers the other shares.

    The bucket ends in a number for each parameter, 1 if this rank has a gradient: their sum tells whether any rank has.
    """
    like, sizes = parameters[0], [parameter.numel() for parameter in parameters]
    share = -(-(sum(sizes) + len(sizes)) // ranks.size)
    acc_dtype = accumulation_dtype(like.dtype)
    with torch.no_grad():
        size = ranks.size * share
        # A bucket of one large parameter is not taken from the group's buffers, which would keep the memory.
        fits = size * like.itemsize <= 2 * _BUCKET_BYTES
        sent, received = (ranks.buffers.acquire_like(like, size) if fits else like.new_empty(size) for _ in range(2))
        *pieces, present, rest = sent.split([*sizes, len(sizes), len(sent) - sum(sizes) - len(sizes)])
        rest.zero_()  # no uninitialised memory is sent
        for parameter, piece, here in zip(parameters, pieces, present, strict=True):
            here.fill_(parameter.grad is not None)
            if parameter.grad is None:
                piece.zero_()
            else:
                piece.view(parameter.shape).copy_(parameter.grad)
        ranks.all_to_all(received, sent, [share] * ranks.size, [share] * ranks.size)
        local = received.view(ranks.size, share).sum(0, dtype=acc_dtype).to(like.dtype)
        ranks.all_gather(sent, local)
        for parameter, piece, exists in zip(parameters, pieces, present, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(piece.view(parameter.shape))
            elif exists:  # read only if this rank lacks it, since reading waits for the device
                parameter.grad = piece.view(parameter.shape).clone()
        ranks.buffers.release(sent, received)


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the parameters of each type and device, in order, in buckets of at most `_BUCKET_BYTES` or of one
    parameter.
    """
    kinds: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for alike in kinds.values():
        bucket: list[Tensor] = []
        for parameter in alike:
            if bucket and sum(other.nbytes for other in bucket) + parameter.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket


def _checked(parameters: nn.Module | Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns the parameters by name, after checking them; tied ones once."""
    for module in parameters.modules() if isinstance(parameters, nn.Module) else ():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            remedy = "DDP and FSDP average gradients in backward: pass token_loss(averaged_gradients=True) instead."
            given, allowed = f"a {type(module).__name__} module", "a module whose gradients nothing else reduces"
            raise ArgumentError("parameters", given, allowed, remedy)
    unordered = isinstance(parameters, Set | Mapping | str | bytes)
    if isinstance(parameters, Tensor) or unordered or not isinstance(parameters, nn.Module | Iterable):
        raise ArgumentError("parameters", parameters, "a module, or a list of parameters")
    if isinstance(parameters, nn.Module):
        listed: list[tuple[str, Tensor]] = list(parameters.named_parameters())
    else:
        listed = [(f"parameters[{number}]", parameter) for number, parameter in enumerate(parameters)]
    for number, (_, parameter) in enumerate(listed):
        _check_parameter(f"parameters[{number}]", parameter)
    if not listed:
        raise ArgumentError("parameters", "none", "at least one parameter")
    once: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in listed:
        once.setdefault(id(parameter), (name, parameter))
    return dict(once.values())


def _check_parameter(name: str, parameter: Tensor) -> None:
    check_dense(name, parameter)
    if hasattr(parameter, "placements"):
        remedy = "FSDP averages gradients in backward: pass token_loss(averaged_gradients=True) instead."
        raise ArgumentError(name, "a DTensor", "a parameter whose gradient nothing else reduces", remedy)
    if parameter.dtype not in DTYPES and parameter.requires_grad:
        raise ArgumentError(name, f"{parameter.dtype}", "float64, float32, bfloat16 or float16")
    if not parameter.is_leaf:
        raise ArgumentError(name, "the result of an operation", "a parameter, which has a gradient")
    if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
        given = f"a gradient of {parameter.grad.dtype} of a parameter of {parameter.dtype}"
        raise ArgumentError(
            name, given, "gradients of their parameters' types", "A rank without a gradient would send another type."
        )
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        raise ArgumentError(
            name, f"a gradient that is {parameter.grad.layout}", "a dense gradient", "Use Embedding(sparse=False)."
        )
