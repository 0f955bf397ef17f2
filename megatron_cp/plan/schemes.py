"""`Scheme` and `LinearMode`: the ways to spread a layer over ranks, a record each. No torch in here.

A new scheme is a row here; if its keys travel in a new way, also a schedule in `attention.SCHEDULES`. What planning,
refusals, `check --all`, `bench`, Megatron's flags and the capability table need to know of a scheme they read from its
record.
"""

from __future__ import annotations

from dataclasses import dataclass

AUTO = "auto"


@dataclass(frozen=True)
class Scheme:
    """A way to spread softmax attention: a head exchange, keys that travel, or both.

    Attributes:
        name: a value of `scheme` of `plan_attention` and of `--cp-comm-type`.
        remark: what it does, for `megatron-cp doctor`.
        exchanges_heads: neighbouring ranks exchange heads (DeepSpeed Ulysses, arXiv 2309.14509).
        exchanges_keys: keys travel between ranks, or between groups of such neighbours.
        kv_schedule: how they travel: one of `attention.SCHEDULES`.
        chunks_keys: head chunks are parts in which keys travel; otherwise of the heads that are exchanged.
    """

    name: str
    remark: str
    exchanges_heads: bool
    exchanges_keys: bool
    kv_schedule: str
    chunks_keys: bool

    @property
    def is_product(self) -> bool:
        """Whether it has a degree of its own: how many ranks exchange heads."""
        return self.exchanges_heads and self.exchanges_keys

    @property
    def assigns_tiles(self) -> bool:
        """Whether a planner says which rank computes which tile."""
        return self.kv_schedule == "tiled"

    @property
    def takes_chunks(self) -> bool:
        """Whether heads travel in parts: a ring alone passes on all heads of a key at once."""
        return self.chunks_keys or self.exchanges_heads

    @property
    def takes_codec(self) -> bool:
        """Whether anything can be coded on its way: heads that are exchanged."""
        return self.exchanges_heads

    @property
    def sends_alike(self) -> bool:
        """Whether ranks with as many rows of two packs send as much of both, so that a graph serves both."""
        return not self.chunks_keys and not self.is_product


_ALL = (
    Scheme("a2a", "softmax attention by a full head exchange", True, False, "exact", False),
    Scheme("p2p", "keys and values pass round a ring", False, True, "p2p", False),
    Scheme("all_gather", "every rank gathers all keys and values, in head chunks", False, True, "all_gather", True),
    Scheme(
        "exact", "every rank receives the keys that its queries see, in head chunks", False, True, "exact", True
    ),
    Scheme(
        "tiled", "tiles of the mask are assigned to ranks: keys travel, and queries where that sends less",
        False, True, "tiled", True,
    ),
    Scheme(
        "a2a+p2p", "heads change places within groups of ranks, keys pass round a ring of such groups",
        True, True, "p2p", False,
    ),
    Scheme("a2a+all_gather", "likewise, and keys are gathered from all groups", True, True, "all_gather", True),
    Scheme("a2a+exact", "likewise, and a group receives the keys that its queries see", True, True, "exact", True),
    Scheme("a2a+tiled", "likewise, and tiles of the mask are assigned to groups", True, True, "tiled", True),
)  # fmt: skip

SCHEMES = {scheme.name: scheme for scheme in _ALL}
DEFAULT = SCHEMES["a2a"]  # what "auto" takes where nothing is to be chosen


def scheme_named(name: str) -> Scheme:
    """The record of a scheme, or of the one that "auto" takes."""
    return DEFAULT if name == AUTO else SCHEMES[name]


def alternatives(scheme: Scheme) -> list[Scheme]:
    """Other schemes that fetch keys, with as much exchange of heads as this one."""
    fetching = (other for other in _ALL if other.exchanges_keys and other.chunks_keys and not other.assigns_tiles)
    return [other for other in fetching if other != scheme and other.exchanges_heads == scheme.exchanges_heads]


@dataclass(frozen=True)
class LinearMode:
    """A way to spread a linear layer.

    Attributes:
        name: a value of `mode` of `plan_linear` and of `--linear-cp-mode`.
        remark: what it does, for `megatron-cp doctor`.
        exchanges_heads: whole documents on a share of the heads; else all heads on own tokens.
        redistributes: hidden states move to contiguous ranges around a run of layers.
    """

    name: str
    remark: str
    exchanges_heads: bool
    redistributes: bool

    @property
    def sends_alike(self) -> bool:
        """As of `Scheme`."""
        return self.exchanges_heads


HEADWISE = LinearMode("headwise", "whole documents on a share of the heads: an exchange in, one out", True, False)
CHUNKWISE = LinearMode("chunkwise", "all heads on own tokens: a halo and one exchange of state maps", False, False)
REDISTRIBUTE = LinearMode(
    "redistribute", "chunkwise on contiguous ranges, to which hidden states are redistributed", False, True
)
MODES = {mode.name: mode for mode in (HEADWISE, CHUNKWISE, REDISTRIBUTE)}


def may_exchange_heads(way: str) -> bool:
    """Whether a scheme or a mode of this name exchanges heads, or "auto" may take one that does."""
    return way == AUTO or (SCHEMES.get(way) or MODES[way]).exchanges_heads


def may_assign_tiles(way: str) -> bool:
    """Whether a scheme or a mode of this name assigns tiles to ranks, or "auto" may take one that does."""
    return way == AUTO or (way in SCHEMES and SCHEMES[way].assigns_tiles)
