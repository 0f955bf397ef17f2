"""Triton kernels on the CPU, for tests. Exact in float32; in bfloat16 the interpreter's `tl.dot` is wrong.

Triton's interpreter runs a kernel with numpy, one program after another. Triton 3.6 cannot interpret autotuned kernels
such as those of flash-linear-attention, for three reasons that `interpret_triton` removes; and it spends half of its
time on replacing functions that it has already replaced.
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
    """Makes kernels that are imported from now on run on the CPU, until this process ends.

    Raises:
        RuntimeError: Triton was imported before, for a GPU.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton is imported already: call interpret_triton first, or set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, including Triton's own

    from triton.runtime import interpreter  # type: ignore[import-untyped]
    from triton.runtime.autotuner import Autotuner  # type: ignore[import-untyped]

    # The autotuner needs the GPU's driver for timing. With equal times the first configuration wins.
    Autotuner.do_bench = staticmethod(lambda _, quantiles: [0.0 for _ in quantiles])

    # numpy 2.4 converts an array to an int only if it has no dimension; the interpreter's scalars have one.
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        set_attr = scope[0].set_attr if scope else setattr  # Triton 3.5 has no scope, and restores nothing
        set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index

    # A compiled loop's counter is a tensor with `.to`, an interpreted one's an int. In the modules whose kernels it
    # runs, the interpreter's globals, including this one, shadow builtins.
    interpreter.range = lambda *bounds: [_Counter(i) for i in builtins.range(*bounds)]
    _replace_language_once(interpreter)
    _cache_types(interpreter)
    _cache_shape_types()


def _replace_language_once(interpreter: Any) -> None:
    """Lets functions that a kernel calls find the language replaced; without it each call searches all of it again.

    Only the first call in a launch can change anything: replaced functions are no longer builtins of Triton.
    """
    import triton.language as tl  # type: ignore[import-untyped]

    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    scope = getattr(interpreter, "_LangPatchScope", lambda: None)
    used: dict[Any, frozenset[str]] = {}  # by function: the language modules among its globals
    replaced: set[str] = set()  # language modules replaced in this launch

    def replace_once(function: Any) -> Any:
        if function not in used:
            seen = function.__globals__.values()
            used[function] = frozenset(each.__name__ for each in (tl, tl.core) if any(each is value for value in seen))
        if used[function] and used[function] <= replaced:
            return scope()  # nothing to restore
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


def _cache_types(interpreter: Any) -> None:
    """Caches numpy's type for each of Triton's by name: the interpreter makes the table of all types for every
    value.
    """
    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def look_up_once(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = look_up_once


def _cache_shape_types() -> None:
    """Caches the type of a shape, of which every value has two, by its numbers."""
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
    """Makes the interpreter convert floating-point types like a GPU, until this process ends.

    Call `interpret_triton` before. Triton 3.6 truncates to bfloat16 instead of rounding, and errs in subnormal numbers
    of one byte.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    types = {
        tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32, tl.float64: torch.float64,
        tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2,
    }  # fmt: skip

    def convert(values: NDArray, source_type: Any, to: Any, _: object) -> NDArray:
        source = torch.from_numpy(np.array(values, ndmin=1, order="C")).view(torch.uint8).view(types[source_type])
        unsigned = getattr(np, f"uint{to.primitive_bitwidth}")
        return source.to(types[to]).view(torch.uint8).numpy().view(unsigned).reshape(values.shape)

    interpreter._convert_float = convert


class _Counter(int):
    """A loop counter with a tensor's type conversion."""

    def to(self, *_: Any, **__: Any) -> _Counter:
        return self
