"""Compares plans, and the arguments of operations, between ranks.

A plan and a kind of call are compared once, with 16 bytes a rank, on the host; later calls cost a look-up. Without the
comparison, ranks that disagree would wait for each other for ever, or compute results of mixed settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.errors import ArgumentError, CallMismatchError, PlanMismatchError, checked_flag, checked_integer
from megatron_cp.executor.differences import Detail, describe_differences, differing_names, layout_details
from megatron_cp.executor.groups import Group, RankGroup, as_rank_group, rank_group
from megatron_cp.layout import Layout
from megatron_cp.layout.memo import remembered
from megatron_cp.plan.plan import Plan

_BLOCK = 1 << 15  # bytes
MOST_ELEMENTS = 2**22  # of a tensor whose elements an error compares; of larger ones, such as pixels, it shows digests


@runtime_checkable
class Agreeable(Protocol):
    """A value that ranks can compare: a plan, or the plans of a whole batch."""

    @property
    def cp_size(self) -> int: ...
    def fingerprint(self) -> bytes: ...
    def describe(self) -> list[str]: ...


def check_agreement(
    plan: Agreeable, group: Group | None, *, seed: int | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Fails on every rank unless all ranks made the same plan. It exchanges 16 bytes on the host; call it once a plan.

    An operation compares a plan when it is first called with it, unless the plan has been compared before. So a batch's
    plans can be compared together, before its first layer.

    Args:
        plan: a plan, or a `BatchPlan`.
        group: the plan's ranks.
        seed: a number, at least 0, that must be equal on all ranks too, such as a digest of the batch's tokens.
        tensors: tensors on the host, by name, such as labels, that must be equal on all ranks too.

    Raises:
        ArgumentError: the group has another number of ranks than the plan, or the tensors are not on the host.
        PlanMismatchError: ranks differ; the message has the lines in which the first such rank differs from rank 0.
    """
    if not isinstance(plan, Agreeable) or isinstance(plan, type):
        raise ArgumentError("plan", plan, "a plan, or the plans of a batch")
    ranks = as_rank_group(group, plan.cp_size)
    if seed is not None:
        seed = checked_integer("seed", seed, 0)
    tensors = {} if tensors is None else tensors
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and tensor.device.type == "cpu"
        for name, tensor in tensors.items()
    ):
        raise ArgumentError("tensors", tensors, "tensors on the host, by name")
    _agree_on_plans(ranks, plan, [] if seed is None else [f"tokens and seed: {seed}"], tensors, {})


def agree_on_batch(
    ranks: RankGroup, plans: Agreeable, tokens: Tensor, seed: int, digest: int, tensors: Mapping[str, Tensor]
) -> None:
    """Does what `check_agreement` does for a batch whose tokens and seed have a digest already."""
    lines = [f"seed: {seed}", f"tokens: {_describe_shape(tokens)} #{digest:x}"]
    _agree_on_plans(ranks, plans, lines, tensors, {"tokens": tokens})


def _agree_on_plans(
    ranks: RankGroup, plan: Agreeable, lines: list[str], tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> None:
    """Compares plans, `lines`, and `tensors` by their digests; `others` have theirs in `lines`."""
    lines = lines + [f"{name}: {_describe_contents(tensor)}" for name, tensor in sorted(tensors.items())]
    of_plan = plan.describe()

    def what(here: Sequence[str], there: Sequence[str]) -> str:
        names = {name for name, _ in differing_names(here, there)}
        given = {line.partition(": ")[0] for line in lines}
        return _DIFFERENT_BATCHES if names <= given else _DIFFERENT_PLANS

    def details() -> dict[str, Detail]:
        elements = {**others, **tensors}
        return layout_details(plan) | {
            name: Detail("[{}] is {}", tensor.flatten().tolist())
            for name, tensor in elements.items()
            if tensor.numel() <= MOST_ELEMENTS
        }

    _compare(ranks, [*of_plan, *lines], "comparison of plans", PlanMismatchError, what, details)
    _remember(ranks, plan)


def compare_calls(group: Group, compare: bool) -> None:
    """Turns the comparison of calls between the ranks of a group on or off; it is on by default.

    Every rank must call it with the same value. Without the comparison, ranks that call an operation in different ways
    (another scale, type or kernel, gradients on some ranks only) wait for each other, or return wrong numbers.
    """
    checked_flag("compare", compare)
    rank_group(group).agreed.compares_calls = compare


def agree_on_call(
    ranks: RankGroup,
    subjects: Sequence[Plan | Layout],
    operation: str,
    tensors: Mapping[str, Tensor | None],
    options: Mapping[str, Any],
    once: Callable[[], Mapping[str, Any]] = dict,
) -> str:
    """Fails on every rank unless all ranks make the same call. Only a new plan or kind of call costs an exchange.

    Ranks could still mix calls and plans that they have compared. So the messages of a call should carry the result as
    their activity: where the group supports it, messages of different activities are never matched.

    Args:
        subjects: the plan, or the layouts.
        tensors: inputs and parameters, of which types, shapes other than the number of rows, and whether they need
            gradients are compared.
        options: numbers and names.
        once: returns further values that must be equal, such as values that change from call to call or must be read
            from a device. It is called only when ranks compare.

    Returns:
        The operation's name, the marks of this kind of call and of its plan, which are the same on all ranks, and the
        number of the call on this rank. Its backward has the same number, so that backward passes in different orders
        are not matched either.

    Raises:
        CallMismatchError: ranks differ; the message has the lines in which the first such rank differs from rank 0.
    """
    agreed = ranks.agreed
    if ranks.size == 1 or not agreed.compares_calls:
        return operation
    grad = torch.is_grad_enabled()
    tensor_kinds = tuple((name, x if x is None else _kind(x, grad)) for name, x in tensors.items())
    call = (operation, tensor_kinds, tuple(options.items()), grad)
    plans = [_digest_and_lines(subject)[0] for subject in subjects]
    if agreed.call(call) is None or not all(map(agreed.plan, plans)):
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            remedy = "Run the step once, eagerly and with the same plans, before it is captured."
            raise ArgumentError(
                "stream", "one that is being captured", f"a call of {operation} that the ranks have compared", remedy
            )
        _compare_call(ranks, subjects, call, once())
    marks = [agreed.call(call), *map(agreed.plan, plans)]
    agreed.num_calls += 1
    return f"{operation} [{''.join(cast(list[str], marks))}], call {agreed.num_calls}"


def _compare_call(
    ranks: RankGroup, subjects: Sequence[Plan | Layout], call: tuple[Any, ...], once: Mapping[str, Any]
) -> None:
    operation, tensor_kinds, options, grad = call
    kind_of_call = [
        f"operation: {operation}",
        *(f"{name}: {'None' if kind is None else _describe_kind(kind)}" for name, kind in tensor_kinds),
        *(f"{name}: {value!r}" for name, value in options),
        f"gradients: {'on' if grad else 'off'}",
    ]
    lines = [*kind_of_call, *(f"{name}: {value!r}" for name, value in once.items())]
    of_subjects = list(zip(["source, ", "target, "] if len(subjects) > 1 else [""], subjects, strict=False))
    lines += [f"{group}{line}" for group, subject in of_subjects for line in _digest_and_lines(subject)[1]]

    def details() -> dict[str, Detail]:
        return {
            name: each for group, subject in of_subjects for name, each in layout_details(subject, group).items()
        }  # fmt: skip

    what = f"the ranks call {operation} in different ways"
    _compare(ranks, lines, "comparison of calls", CallMismatchError, lambda *_: what, details)
    for subject in subjects:
        _remember(ranks, subject)
    ranks.agreed.add_call(call, _digest(kind_of_call), kind_of_call)


def agree_on_layer(ranks: RankGroup, name: str, settings: Mapping[str, Any]) -> None:
    """Fails on every rank unless all ranks build a layer with the same settings, by one exchange a layer."""
    if ranks.size == 1 or not ranks.agreed.compares_calls:
        return
    lines = [f"layer: {name}", *(f"{setting}: {value!r}" for setting, value in settings.items())]
    _compare(
        ranks, lines, "comparison of layers", CallMismatchError, lambda *_: f"the ranks build {name} in different ways"
    )


def agree_on_inputs(ranks: RankGroup, name: str, inputs: Mapping[str, Any], what: str = "") -> None:
    """Fails on every rank unless all ranks call a model with the same inputs, by one exchange of 16 bytes on the host.

    Tensors are compared by type, shape and the sum of their bits, which is computed where they are and read once.

    Args:
        what: the beginning of the error's message, if these are no inputs of a call.
    """
    if ranks.size == 1 or not ranks.agreed.compares_calls:
        return
    tensors: list[Tensor] = []

    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}, sum {{{len(tensors) - 1}}}"
        if isinstance(value, (list, tuple)):
            return ", ".join(map(described, value))
        if isinstance(value, Mapping):
            return ", ".join(f"{described(key)} {described(each)}" for key, each in value.items())
        plain = value is None or isinstance(value, (bool, int, float, str))  # others may print their address
        return (repr(value) if plain else type(value).__name__).replace("{", "{{").replace("}", "}}")

    templates = [f"{key}: {described(value)}" for key, value in inputs.items()]
    # Moved to one device, so that the host waits once.
    device = max((tensor.device for tensor in tensors), key=lambda each: each.type != "cpu", default=None)
    sums = [_sum_of_bits(tensor).to(device, non_blocking=True) for tensor in tensors]
    numbers = torch.stack(sums).tolist() if sums else []  # once: the host waits for a device
    lines = [template.format(*numbers) for template in templates]
    what = what or f"the ranks call {name} with different inputs"
    _compare(ranks, lines, "comparison of inputs", CallMismatchError, lambda *_: what)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Returns the sum of a tensor's elements as whole numbers of their bits, modulo 2**64, on its device."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[tensor.itemsize]
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(whole).sum(dtype=torch.int64)


_DIFFERENT_PLANS = (
    "the ranks made different plans ({other} differs from rank 0); every rank must plan from the same document "
    "lengths, layout and options"
)
_DIFFERENT_BATCHES = (
    "the ranks were given different batches ({other} differs from rank 0); every rank must be given the same whole "
    "batch and seed, of which it keeps its own rows"
)


def _kind(tensor: Tensor, grad: bool) -> tuple[torch.dtype, torch.Size, bool]:
    return tensor.dtype, tensor.shape[1:], grad and tensor.requires_grad


def _describe_kind(kind: tuple[torch.dtype, torch.Size, bool]) -> str:
    dtype, features, needs_gradient = kind
    shape = ", ".join(["rows", *map(str, features)])
    return f"{str(dtype).removeprefix('torch.')}, shape [{shape}], {'needs a' if needs_gradient else 'no'} gradient"


@remembered
def _digest_and_lines(subject: Plan | Layout) -> tuple[bytes, tuple[str, ...]]:
    """Returns the digest of a plan or a layout, 16 bytes, and the lines that it is made of; both are made once."""
    lines = tuple(subject.describe())
    return _digest(lines), lines


def _remember(ranks: RankGroup, subject: Agreeable | Layout) -> None:
    """Notes that the ranks have compared a plan, and with it its layouts."""
    plans = [subject] if isinstance(subject, Plan) else getattr(subject, "plans", [])
    layouts = [subject] if isinstance(subject, Layout) else []
    for plan in plans:
        ranks.agreed.add_plan(*_digest_and_lines(plan))
        if plan.hidden_layout is not None:
            ranks.agreed.add_plan(*_digest_and_lines(plan.inside))
        layouts += [plan.layout] if plan.hidden_layout is None else [plan.layout, plan.hidden_layout]
    for layout in layouts:
        ranks.agreed.add_plan(*_digest_and_lines(layout))


def _describe_contents(tensor: Tensor) -> str:
    """Describes a tensor on the host, its elements by a digest."""
    elements = tensor.detach()
    if not elements.is_contiguous() or elements.numel() == 1:  # one element is contiguous whatever its stride
        elements = elements.clone(memory_format=torch.contiguous_format)
    octets = elements.flatten().view(torch.uint8).numpy()
    summed = octets.size // _BLOCK * _BLOCK if octets.size > 64 * _BLOCK else 0
    digest = hashlib.blake2b(_sums(octets[:summed]), digest_size=8)
    digest.update(octets[summed:])
    return f"{_describe_shape(tensor)} #{digest.hexdigest()}"


def _sums(octets: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Returns 64-bit sums over blocks, each block times an odd number of its own: an eighth of a digest's time.

    Images have hundreds of megabytes. A block that differs alone changes a sum, since an odd number has an inverse.
    """
    blocks = octets.view(np.int64).reshape(-1, _BLOCK // 8)
    return np.einsum("i,ij->j", np.arange(1, 2 * len(blocks), 2), blocks)


def _describe_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _digest(lines: Sequence[str]) -> bytes:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()


def _compare(
    ranks: RankGroup, lines: list[str], activity: str, error: type[PlanMismatchError],
    what: Callable[[Sequence[str], Sequence[str]], str], details: Callable[[], Mapping[str, Detail]] = dict,
) -> None:  # fmt: skip
    """Raises `error` on every rank unless `lines` are the same on all.

    Args:
        what: returns what the error says of two ranks' lines.
        details: returns elements of which lines have digests; it is called where ranks differ.
    """
    ranks.activity, ranks.details = activity, tuple(lines)
    digests = ranks.all_gather_bytes(_digest(lines))
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        pair = (0, other)
        everyones = ranks.all_gather_object((lines, details()) if ranks.rank in pair else None)
        both, elements = zip(*(everyones[rank] for rank in pair), strict=True)
        shown = describe_differences(pair, both, elements)
        raise error(f"{what(*both).format(other=f'rank {other}')}:\n" + "\n".join(shown))
    ranks.activity, ranks.details = "", ()
