"""`Codec`: the one-byte formats of activations in messages. Pure data; `coding.py` has the arithmetic.

Each token and head has its own scale, a float32 that travels in the same message, so that a head's largest element
becomes the format's largest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_cp.exchange.sections import SCALE_SIZE, Section


class Format(NamedTuple):
    """A one-byte type, by its name in torch, and its largest number."""

    dtype: str
    largest: float


E4M3 = Format("float8_e4m3fn", 448.0)
E5M2 = Format("float8_e5m2", 57344.0)
INT8 = Format("int8", 127.0)


@dataclass(frozen=True)
class Codec:
    """The formats for activations and their gradients; `name` is a value of `--cp-codec`."""

    name: str
    forward: Format
    backward: Format

    def applies(self, block: Section, item_size: int) -> bool:
        """Returns True if a section is coded: coding makes it shorter, and nothing in it must be exact."""
        return not block.exact and block.head_dim + SCALE_SIZE < block.head_dim * item_size

    def row_bytes(self, sizes: Sequence[int], item_size: int) -> int:
        """Returns the bytes of coded vectors of these sizes, one after another; 0 if coding does not make them shorter.

        The scales come first. The row is filled up to a multiple of a scale.
        """
        coded = -(-(sum(sizes) + len(sizes) * SCALE_SIZE) // SCALE_SIZE) * SCALE_SIZE
        return coded if coded < sum(sizes) * item_size else 0


CODECS: dict[str, Codec | None] = {
    "none": None,
    "fp8": Codec("fp8", E4M3, E4M3),
    "fp8_e5m2": Codec("fp8_e5m2", E4M3, E5M2),
    "int8": Codec("int8", INT8, INT8),
}
