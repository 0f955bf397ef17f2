"""`Codec`: which one-byte formats activations cross the wire in. Pure data; `coding.py` has the arithmetic.

Each token and head has a scale of its own, a float32 that travels in the same message, so that a head's largest element
becomes the format's largest number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_cp.exchange.sections import SCALE_SIZE, Section


class Format(NamedTuple):
    """A one-byte type, as torch calls it, and the largest number in it."""

    dtype: str
    largest: float


E4M3 = Format("float8_e4m3fn", 448.0)
E5M2 = Format("float8_e5m2", 57344.0)
INT8 = Format("int8", 127.0)


@dataclass(frozen=True)
class Codec:
    """How activations and their gradients are coded.

    Attributes:
        name: a value of `--cp-codec`.
        forward, backward: the formats.
    """

    name: str
    forward: Format
    backward: Format

    def applies(self, block: Section, item_size: int) -> bool:
        """Whether a section travels coded: where that is shorter, and nothing in it must be exact."""
        return not block.exact and block.head_dim + SCALE_SIZE < block.head_dim * item_size


CODECS: dict[str, Codec | None] = {
    "none": None,
    "fp8": Codec("fp8", E4M3, E4M3),
    "fp8_e5m2": Codec("fp8_e5m2", E4M3, E5M2),
    "int8": Codec("int8", INT8, INT8),
}
