"""`Selection`: the choice of keys of each query, and what travels for it. Pure data; no torch in here."""

from __future__ import annotations

from typing import NamedTuple

from megatron_cp.errors import ArgumentError, checked_integer, checked_size
from megatron_cp.plan.schemes import AUTO, SCHEMES


class Selection(NamedTuple):
    """The choice of keys that each query attends to, and the sizes of what travels for it.

    Attributes:
        topk: the most keys of a query, or blocks of keys of a query and head.
        kv_heads: key/value heads, which travel as one group; 1 for latents.
        heads, head_dim: of the indexer that chooses; 0 where there is none.
        block: the keys of a block, counted from the start of a document, if every query head chooses blocks for itself;
            0 if keys are chosen, for all heads.
    """

    topk: int
    kv_heads: int
    heads: int
    head_dim: int
    block: int = 0

    def shape(self, rows: int, heads: int) -> tuple[int, ...]:
        """Returns the shape of a choice: of places of keys, or of blocks' first keys for each query head."""
        return (rows, heads, self.topk) if self.block else (rows, self.topk)

    def describe(self) -> str:
        key_heads = f"{self.kv_heads} key head{'s' * (self.kv_heads != 1)}"
        if self.block:
            return f"at most {self.topk} blocks of {self.block} keys a query and head, of {key_heads}"
        heads = f"{self.heads} index head{'s' * (self.heads != 1)}"
        by = f"by {heads} of {self.head_dim}" if self.heads else "that the caller chooses"
        return f"at most {self.topk} keys a query, {by}, of {key_heads}"


def travelling_features(
    head_dim: int, value_head_dim: int, latent: tuple[int, int] | None, selection: Selection | None
) -> tuple[int, int]:
    """Returns the features of a key and of a value head as they travel, the latter with the index key."""
    key, value = latent or (head_dim, value_head_dim)
    if selection is None:
        return key, value
    return key * selection.kv_heads, value * selection.kv_heads + selection.head_dim


def checked_selection(topk: object, indexer: object, block: object, kv_heads: int, scheme: str) -> Selection | None:
    """Returns the choice of keys after checking its sizes; None where queries attend to all that the mask shows.

    Raises:
        ArgumentError: other than a number of keys and two sizes of an indexer, or than numbers of blocks and of their
            keys; an indexer or blocks without `topk`; both; or a scheme that brings a query's keys in parts.
    """
    if topk is None:
        if block is not None:
            raise ArgumentError("block", block, "None without topk", "Say how many blocks a query attends to.")
        if indexer is not None:
            raise ArgumentError("indexer", indexer, "None without topk", "Say how many keys a query attends to.")
        return None
    names = [each.name for each in SCHEMES.values() if each.brings_all_keys]
    if scheme not in (AUTO, *names):
        remedy = "All keys of a query must be on its rank before the query chooses among them."
        raise ArgumentError("scheme", scheme, f"{', '.join(names)} or auto with topk", remedy)
    topk, heads, head_dim = checked_integer("topk", topk, 1), 0, 0
    if block is not None:
        block = checked_integer("block", block, 1)
        if indexer is not None:
            raise ArgumentError("indexer", indexer, "None with block", "An indexer chooses keys, not blocks of them.")
    if indexer is not None:
        if not isinstance(indexer, tuple | list) or len(indexer) != 2:
            raise ArgumentError("indexer", indexer, "heads and features of the indexer, such as (64, 128)")
        heads, head_dim = (checked_size(f"indexer[{at}]", size) for at, size in enumerate(indexer))
    return Selection(topk, kv_heads, heads, head_dim, block or 0)
