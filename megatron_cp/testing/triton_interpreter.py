"""Triton kernels on the CPU, for tests. Exact in float32; in bfloat16 the interpreter's `tl.dot` is wrong.

Triton's interpreter runs a kernel with numpy, one program after another. As it comes (Triton 3.6), it cannot run
autotuned kernels such as those of flash-linear-attention, for three reasons that `interpret_triton` removes; and it
spends half of its time on replacing what it has replaced.
"""

from __future__ import annotations

import builtins
import os
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def interpret_triton() -> None:
    """Makes the kernels that are imported from now on run on the CPU, for as long as this process lives.

    Raises:
        RuntimeError: Triton was imported before, for a GPU.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton is imported already: call interpret_triton first, or set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, Triton's own among them

    from triton.runtime import interpreter  # type: ignore[import-untyped]
    from triton.runtime.autotuner import Autotuner  # type: ignore[import-untyped]

    # The autotuner asks the GPU's driver for a stopwatch. Where all times are equal, the first configuration wins.
    Autotuner.do_bench = staticmethod(lambda _, quantiles: [0.0 for _ in quantiles])

    # numpy 2.4 turns an array into an int only if it has no dimension; the interpreter's scalars have one.
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index

    # A compiled loop's counter is a tensor with `.to`, an interpreted one's an int. The interpreter puts its own
    # globals, and so this, before builtins in the modules whose kernels it runs.
    interpreter.range = _counters
    _replace_language_once(interpreter)
    _look_types_up_once(interpreter)
    _type_shapes_once()


def _replace_language_once(interpreter: Any) -> None:
    """Functions that a kernel calls find the language replaced, where each call would look through all of it again.

    Only the first call in a launch can change anything: replaced functions are no builtins of Triton's any more.
    """
    import triton.language as tl  # type: ignore[import-untyped]

    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    used: dict[Any, frozenset[str]] = {}  # by function: the languages that it sees
    replaced: set[str] = set()  # in this launch

    def replace_once(function: Any) -> Any:
        if function not in used:
            seen = function.__globals__.values()
            used[function] = frozenset(each.__name__ for each in (tl, tl.core) if any(each is value for value in seen))
        if used[function] and used[function] <= replaced:
            return interpreter._LangPatchScope()  # nothing to restore
        replaced.update(used[function])
        return replace(function)

    def launch_alone(executor: Any, *arguments: Any, **options: Any) -> Any:
        replaced.clear()
        try:
            return launch(executor, *arguments, **options)
        finally:
            replaced.clear()

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_alone


def _look_types_up_once(interpreter: Any) -> None:
    """numpy's type of each of Triton's is kept by its name: the interpreter makes the table of all for every value."""
    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def look_up_once(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = look_up_once


def _type_shapes_once() -> None:
    """The type of a shape, which every value has two of, is kept by its numbers."""
    from triton.language import core

    type_of = core._type_for_tuple_values
    known: dict[tuple[Any, ...], Any] = {}

    def type_of_shape(values: Any, fields: Any = None) -> Any:
        numbers = tuple([x.value if type(x) is core.constexpr else x for x in values])
        if fields is not None or any(type(x) is not int for x in numbers):
            return type_of(values, fields)
        if numbers not in known:
            known[numbers] = type_of(values)
        return known[numbers]

    core._type_for_tuple_values = type_of_shape


def round_as_hardware_does() -> None:
    """Makes the interpreter's conversions of floating-point types those of a GPU, for as long as this process lives.

    Call `interpret_triton` before. Triton 3.6 cuts off what bfloat16 lacks, and errs in subnormal numbers of one byte.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    types = {
        tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32, tl.float64: torch.float64,
        tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2,
    }  # fmt: skip

    def convert(values: NDArray, come_from: Any, to: Any, _: object) -> NDArray:
        source = torch.from_numpy(np.array(values, ndmin=1, order="C")).view(torch.uint8).view(types[come_from])
        unsigned = getattr(np, f"uint{to.primitive_bitwidth}")
        return source.to(types[to]).view(torch.uint8).numpy().view(unsigned).reshape(values.shape)

    interpreter._convert_float = convert


class _Counter(int):
    """A loop counter with a tensor's type conversion."""

    def to(self, *_: Any, **__: Any) -> _Counter:
        return self


def _counters(*bounds: Any) -> list[_Counter]:
    return [_Counter(i) for i in builtins.range(*bounds)]
