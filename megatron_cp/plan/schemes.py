"""`Scheme` and `LinearMode`: strategies for spreading a layer over ranks, a record each. No torch in here.

A new scheme is a row here; if its keys travel in a new way, also a schedule in `attention.SCHEDULES`. Planning,
refusals, `check --all`, Megatron's flags and the capability table read what they need to know of a scheme from its
record.
"""

from __future__ import annotations

from dataclasses import dataclass

AUTO = "auto"


@dataclass(frozen=True)
class Scheme:
    """A strategy for spreading softmax attention: a head exchange, keys that travel, or both.

    Attributes:
        name: a value of `scheme` of `plan_attention` and of `--cp-comm-type`.
        exchanges_heads: neighbouring ranks exchange heads (DeepSpeed Ulysses, arXiv 2309.14509).
        exchanges_keys: keys travel between ranks, or between groups of such neighbours.
        kv_schedule: the transfer of keys, one of `attention.SCHEDULES`.
        chunks_keys: True if head chunks are the parts in which keys travel; else they are parts of the head exchange.
    """

    name: str
    remark: str
    exchanges_heads: bool
    exchanges_keys: bool
    kv_schedule: str
    chunks_keys: bool

    @property
    def is_product(self) -> bool:
        """True if it has a degree of its own: the number of ranks that exchange heads."""
        return self.exchanges_heads and self.exchanges_keys

    @property
    def assigns_tiles(self) -> bool:
        """True if a planner assigns tiles to ranks."""
        return self.kv_schedule == "tiled"

    @property
    def goes_by_host(self) -> bool:
        """True if its keys' route depends on the hosts of the ranks."""
        return self.kv_schedule == "exact_by_host"

    @property
    def takes_chunks(self) -> bool:
        """True if heads travel in parts; a ring alone passes on all heads of a key at once."""
        return self.chunks_keys or self.exchanges_heads

    @property
    def brings_all_keys(self) -> bool:
        """True if a rank has all keys of its queries at once, so that these can choose among them."""
        return self.chunks_keys and not self.exchanges_heads and not self.assigns_tiles

    @property
    def sends_alike(self) -> bool:
        """True if two packs with equal row counts, and equal shares of documents, send equal amounts, so that one
        graph serves both.
        """
        return not self.assigns_tiles and not self.goes_by_host


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
    Scheme(
        "exact_by_host", "as exact, but a key crosses to each other host once, and goes on from there",
        False, True, "exact_by_host", True,
    ),
    Scheme("a2a+tiled", "likewise, and tiles of the mask are assigned to groups", True, True, "tiled", True),
)  # fmt: skip

SCHEMES = {scheme.name: scheme for scheme in _ALL}
DEFAULT = SCHEMES["a2a"]  # the choice of "auto" where no candidates are compared


def scheme_named(name: str, *, selects: bool = False) -> Scheme:
    """Returns the record of a scheme, or of the one that "auto" takes; where queries select keys, another one."""
    if name == AUTO and selects:
        return next(scheme for scheme in _ALL if scheme.brings_all_keys)
    return DEFAULT if name == AUTO else SCHEMES[name]


def alternatives(scheme: Scheme) -> list[Scheme]:
    """Returns the other schemes that fetch keys and exchange as many heads as this one."""
    fetching = (other for other in _ALL if other.chunks_keys and not other.assigns_tiles and not other.goes_by_host)
    return [other for other in fetching if other != scheme and other.exchanges_heads == scheme.exchanges_heads]


@dataclass(frozen=True)
class LinearMode:
    """A strategy for spreading a linear layer.

    Attributes:
        name: a value of `mode` of `plan_linear` and of `--linear-cp-mode`.
        exchanges_heads: True if a rank computes whole documents for a share of the heads; else all heads of its own
            tokens.
        redistributes: True if hidden states move to contiguous ranges around a run of layers.
    """

    name: str
    remark: str
    exchanges_heads: bool
    redistributes: bool

    @property
    def sends_alike(self) -> bool:
        """True under the same condition as `Scheme.sends_alike`; states and halos of chunkwise layers always travel."""
        return not self.redistributes


HEADWISE = LinearMode("headwise", "whole documents on a share of the heads: an exchange in, one out", True, False)
CHUNKWISE = LinearMode("chunkwise", "all heads on own tokens: a halo and one exchange of state maps", False, False)
REDISTRIBUTE = LinearMode(
    "redistribute", "chunkwise on contiguous ranges, to which hidden states are redistributed", False, True
)
MODES = {mode.name: mode for mode in (HEADWISE, CHUNKWISE, REDISTRIBUTE)}


def may_exchange_heads(name: str) -> bool:
    """Returns True if a scheme or mode of this name exchanges heads, or "auto" may take one that does."""
    return name == AUTO or (SCHEMES.get(name) or MODES[name]).exchanges_heads


def may_assign_tiles(name: str) -> bool:
    """Returns True if a scheme or mode of this name assigns tiles to ranks, or "auto" may take one that does."""
    return name == AUTO or (name in SCHEMES and SCHEMES[name].assigns_tiles)
