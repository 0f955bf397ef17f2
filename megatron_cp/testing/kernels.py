"""`check_kernel`: compares a kernel of softmax attention with the equations, on calls that the library makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megatron_cp.executor.arguments import DTYPES, accumulation_dtype
from megatron_cp.executor.partials import merge, output_with_row_sums, row_sums
from megatron_cp.layout import Mask, Packing
from megatron_cp.layout import bands as band
from megatron_cp.layout.bands import UNBOUNDED
from megatron_cp.layout.packing import IntArray
from megatron_cp.softmax.kernels import AttentionCall, AttentionKernel, Tiles
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from megatron_cp.testing.parity import TOLERANCES
from megatron_cp.testing.poison import poisoned

_FIRST_HEAD, _SHOWN = 3, 20
_GRADIENTS = ("dq", "dk", "dv")


def check_kernel(kernel: AttentionKernel, device: str | None = None) -> dict[str, str]:
    """Compares a kernel's outputs, log-sum-exps and gradients with the equations in float64.

    Its calls have all kinds of bands (full, causal, inverse causal, both), ragged documents, queries that see nothing,
    grouped heads, values of another size than keys, soft caps, dropout, other scales, all four types, and the keys in
    two parts whose results are added up. Nothing but what the kernel is given can be read: memory around its tensors,
    its results before they are written and what it allocates itself are NaN. A call that its `refusal` refuses is left
    out.

    Args:
        kernel: the kernel.
        device: device of the tensors; the first of the kernel's `devices` if None.

    Returns:
        the reason of each refused call, by the call's name.

    Raises:
        AssertionError: a call went wrong, or all are refused: one line for each fault with the call, the tensor and by
            how much it is wrong.

    Example:
        >>> from megatron_cp.softmax.kernels.cpu import CpuFlashAttention
        >>> sorted(check_kernel(CpuFlashAttention()))
        ['dropout, float64', 'scale -0.5, float64', 'softcap, float64']
    """
    faults, refused, ran = list[str](), dict[str, str](), 0
    for named in _calls(torch.device(kernel.devices[0] if device is None else device), kernel):
        refusal = kernel.refusal(named.call)
        if refusal is not None:
            refused[named.name] = refusal
            continue
        faults += [f"{named.name}: {fault}" for fault in _Run(kernel, named).faults()]
        ran += 1
    if not ran:
        faults = [f"every call is refused: {next(iter(refused.values()))}"]
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise AssertionError("\n".join([f"kernel {kernel.name!r}", *faults[:_SHOWN], *more]))
    return refused


@dataclass(frozen=True)
class _Problem:
    """A kernel call's inputs, which every type represents exactly, and its results in float64."""

    tiles: Tiles
    call: AttentionCall
    heads: int = 4
    groups: int = 2

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns q, k, v and the output's gradient."""
        random, call = torch.Generator().manual_seed(0), self.call
        queries, keys = len(self.tiles.q_tokens), len(self.tiles.k_tokens)
        sizes = (
            (queries, self.heads, call.head_dim), (keys, self.groups, call.head_dim),
            (keys, self.groups, call.value_head_dim), (queries, self.heads, call.value_head_dim),
        )  # fmt: skip
        q, k, v, dout = (torch.randn(size, generator=random).mul(8).round().double() / 8 for size in sizes)
        return q, k, v, dout

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """Returns all results by name."""
        q, k, v, dout = self.tensors
        out, lse = torch.empty_like(dout), q.new_empty(self.heads, len(q))
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        shared = self.tiles, replace(self.call, dtype=q.dtype, device=q.device), _FIRST_HEAD
        ReferenceAttention().forward(out, lse, q, k, v, *shared)
        ReferenceAttention().backward(dq, dk, dv, dout, q, k, v, out, lse, *shared)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@dataclass(frozen=True)
class _NamedCall:
    """A call by its name."""

    name: str
    problem: _Problem
    call: AttentionCall

    @property
    def tensors(self) -> list[Tensor]:
        """The problem's tensors in the type and on the device of the call."""
        return [x.to(self.call.device, self.call.dtype) for x in self.problem.tensors]


def _tiles(bands: IntArray | list[tuple[int, ...]], queries: int, keys: int) -> Tiles:
    found = band.shrink(np.array(bands, dtype=np.int64))
    # Rows stand at other places of the stream than in their tensors, with gaps, which dropout has to tell apart.
    q_tokens, k_tokens = (
        100 + np.arange(count) + gap * (np.arange(count) >= count // 2) for count, gap in ((queries, 7), (keys, 5))
    )
    return Tiles(found[np.lexsort((found[:, 2], found[:, 0]))], q_tokens, k_tokens)


def _masks() -> Iterator[tuple[str, Tiles]]:
    ragged, everything = Packing([7, 1, 0, 30, 12]), (-UNBOUNDED, UNBOUNDED)
    for name, mask in {
        "full": Mask.full(ragged),
        "causal": Mask.causal(ragged),
        "inverse causal": Mask.from_slices(ragged, [(a, b, a, b, "inverse_causal") for a, b in ragged.spans()]),
        "both": Mask.window(Packing([7, 150, 1]), 40, 9),
        "other keys": Mask.full(Packing([7, 1, 30]), Packing([2, 11, 5])),
    }.items():
        yield name, _tiles(mask.bands, mask.packing.total, mask.kv_packing.total)
    yield "queries that see nothing", _tiles([(3, 8, 2, 30, -UNBOUNDED, 10), (15, 20, 4, 9, *everything)], 23, 33)
    yield (
        "several bands",
        _tiles([(0, 40, 0, 9, *everything), (9, 40, 9, 40, -12, 0), (0, 9, 20, 40, *everything)], 40, 40),
    )
    yield "one pair", _tiles([(2, 3, 4, 5, *everything)], 5, 6)


def _calls(device: torch.device, kernel: AttentionKernel) -> Iterator[_NamedCall]:
    """Yields every mask in every type, and what is special in the first type that the kernel takes."""
    masks = dict(_masks())
    some = AttentionCall(0.3, 16, 16, torch.float64, device)
    calls = [replace(some, dtype=dtype) for dtype in DTYPES]
    problems = {name: _Problem(tiles, some) for name, tiles in masks.items()}
    for call in calls:
        yield from (_NamedCall(f"{name}, {_type_name(call)}", problem, call) for name, problem in problems.items())
    usual = next((call for call in calls if kernel.refusal(call) is None), calls[0])
    special = {
        "values of 8 features": replace(usual, value_head_dim=8),
        "values of 17 features (a gradient of the log-sum-exp)": replace(usual, value_head_dim=17),
        "heads of 64": replace(usual, head_dim=64, value_head_dim=64),
        "softcap": replace(usual, softcap=1.5),
        "dropout": replace(usual, dropout=0.3, seed=11),
        "scale -0.5": replace(usual, scale=-0.5),
    }
    for name, call in special.items():
        yield _NamedCall(f"{name}, {_type_name(call)}", _Problem(masks["causal"], call), call)
    for heads, groups in ((2, 2), (3, 1), (1, 1)):
        problem = _Problem(masks["several bands"], usual, heads, groups)
        yield _NamedCall(f"{heads} heads over {groups}, {_type_name(usual)}", problem, usual)


def _type_name(call: AttentionCall) -> str:
    return str(call.dtype).removeprefix("torch.")


class _Run:
    """A kernel's run of one call: of the call itself, and of its keys in two parts."""

    def __init__(self, kernel: AttentionKernel, named: _NamedCall) -> None:
        self.kernel, self.named, self.found = kernel, named, list[str]()

    def faults(self) -> list[str]:
        """Runs the call and returns what is wrong, in words."""
        tiles, dtype = self.named.problem.tiles, self.named.call.dtype
        exact, (q, _, _, dout) = self.named.problem.exact, self.named.tensors
        out, lse = (exact[name].to(q.device, accumulation_dtype(dtype)) for name in ("out", "lse"))
        self._compare(self._both(tiles, dtype, out.to(dtype), lse), TOLERANCES[dtype], "")
        parts = _in_two(tiles)
        if len(parts) < 2 or self.found:
            return self.found
        # As the schemes do whose keys arrive in parts: merged and added up, and only the row sums of `out` are right.
        unrounded = self.kernel.unrounded_partials
        out = output_with_row_sums(dout, row_sums(dout, out), wide=unrounded)
        first, second = (self._both(part, lse.dtype, out, lse) for part in parts)
        merge(first["out"], first["lse"], second["out"], second["lse"])
        added = {name: x + second[name] if name in _GRADIENTS else x for name, x in first.items()}
        self._compare(added, TOLERANCES[lse.dtype if unrounded else dtype], ", of two parts of the keys")
        return self.found

    def _both(self, tiles: Tiles, dtype: torch.dtype, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
        """Calls forward, and backward with the output and lse of the whole softmax; results are of `dtype`."""
        q, k, v, dout = self.named.tensors
        inputs = {name: _Guarded.of(x) for name, x in zip("qkv", (q, k, v), strict=True)}
        results = {"out": _Guarded(dout.shape, dtype, q.device), "lse": _Guarded(lse.shape, lse.dtype, q.device)}
        self._call("forward", inputs, results, tiles)
        inputs = {"dout": _Guarded.of(dout), **inputs, "out": _Guarded.of(out), "lse": _Guarded.of(lse)}
        gradients = {name: _Guarded(x.shape, dtype, x.device) for name, x in zip(_GRADIENTS, (q, k, v), strict=True)}
        self._call("backward", inputs, gradients, tiles)
        return {name: x.rows for name, x in (results | gradients).items()}

    def _call(self, direction: str, inputs: dict[str, _Guarded], results: dict[str, _Guarded], tiles: Tiles) -> None:
        before = {name: x.rows.clone() for name, x in inputs.items()}
        tensors = [x.rows for x in (*results.values(), *inputs.values())]
        try:
            with poisoned():
                getattr(self.kernel, direction)(*tensors, tiles, self.named.call, _FIRST_HEAD)
        except Exception as error:
            self.found.append(f"{direction} raised {type(error).__name__}: {error}")
        self.found += [
            f"{direction} changes its input {name}"
            for name, x in inputs.items()
            if not torch.equal(x.rows, before[name])
        ]
        self.found += [
            f"{direction} writes outside of {name}" for name, x in (inputs | results).items() if not x.is_intact()
        ]

    def _compare(self, results: dict[str, Tensor], tolerance: float, where: str) -> None:
        if self.found:  # what follows from a fault is none of its own
            return
        for name, result in results.items():
            right, ours = self.named.problem.exact[name], result.cpu()
            if unwritten := int(_is_unwritten(ours).sum()):
                self.found.append(f"{name}{where} is not written in {unwritten} of {ours.numel()} elements")
            elif broken := int(ours.isnan().sum()):
                self.found.append(
                    f"{name}{where} is NaN in {broken} of {ours.numel()} elements: of memory that nothing has written?"
                )
            elif not torch.equal(ours == -torch.inf, nothing := right == -torch.inf):
                self.found.append(f"{name}{where} is -inf in other places than where a query sees nothing")
            else:
                error = (ours.double() - right).masked_fill(nothing, 0).abs().max()
                allowed = tolerance * right.masked_fill(nothing, 0).abs().max().clamp(min=1)
                if not error <= allowed:
                    self.found.append(f"{name}{where} differs by {error:.1e}, allowed are {allowed:.1e}")


def _in_two(tiles: Tiles) -> list[Tiles]:
    """Returns the pairs of the first keys and those of the others, if both have any."""
    keys = len(tiles.k_tokens)
    cut = keys // 2
    if not cut:
        return []
    pieces, number = band.cut(tiles.bands, np.array([0, cut]), np.array([cut, keys]), queries=False)
    found = [pieces[number == part] for part in (0, 1)]
    return [
        Tiles(part[np.lexsort((part[:, 2], part[:, 0]))], tiles.q_tokens, tiles.k_tokens) for part in found if len(part)
    ]


_MARKS = {torch.float64: (torch.int64, 0x7FF8_0000_0000_0BAD), torch.float32: (torch.int32, 0x7FC0_0BAD)}
_MARKS |= {torch.bfloat16: (torch.int16, 0x7FCB), torch.float16: (torch.int16, 0x7ECB)}


class _Guarded:
    """A tensor inside a larger one, with a dense last axis. All of both are NaNs that no operator makes."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        integers, mark = _MARKS[dtype]
        # Rows stay at multiples of 16 bytes, as some kernels require.
        around = [size + 2 if axis < len(shape) - 1 else -(-size // 8) * 8 + 8 for axis, size in enumerate(shape)]
        self._whole = torch.full(around, mark, dtype=integers, device=device).view(dtype)
        self._inside = tuple(
            slice(axis < len(shape) - 1, (axis < len(shape) - 1) + size) for axis, size in enumerate(shape)
        )
        self.rows = self._whole[self._inside]

    @classmethod
    def of(cls, tensor: Tensor) -> _Guarded:
        """Returns a copy of a tensor with NaN around it."""
        made = cls(tensor.shape, tensor.dtype, tensor.device)
        made.rows.copy_(tensor)
        return made

    def is_intact(self) -> bool:
        """Returns True if nothing was written around the tensor."""
        outside = _is_unwritten(self._whole)
        outside[self._inside] = True
        return bool(outside.all())


def _is_unwritten(x: Tensor) -> Tensor:
    integers, mark = _MARKS[x.dtype]
    return x.contiguous().view(integers) == mark
