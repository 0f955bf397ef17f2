"""Decides which keys each query sees, token by token: every `Mask` must agree.

Written from the sentence that defines each kind, one (query, key) pair at a time, and knows nothing of bands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_cp.layout import Packing
from megatron_cp.testing.parity import Case

Pairs = NDArray[np.bool_]  # [queries, keys]


def pairs_of(bands: NDArray[np.int64], queries: int, keys: int) -> NDArray[np.int64]:
    """`[queries, keys]` how many of the bands have each pair: 0 or 1 where they are disjoint."""
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    count = np.zeros((queries, keys), dtype=np.int64)
    for q0, q1, k0, k1, lo, hi in np.asarray(bands).tolist():
        count += (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (lo <= j - i) & (j - i <= hi)
    return count


def causal(packing: Packing, kv_packing: Packing | None = None) -> Pairs:
    """Returns the pairs up to the own position, the last query of a document seeing its last key."""
    return _in_documents(packing, kv_packing, lambda _, i, j, queries, keys: j <= i + keys - queries)


def full(packing: Packing, kv_packing: Packing | None = None) -> Pairs:
    """Returns all pairs of each document."""
    return _in_documents(packing, kv_packing, lambda *_: True)


def window(packing: Packing, left: int, right: int = 0, *, first: int = 0, kv_packing: Packing | None = None) -> Pairs:
    """`left` keys back and `right` ahead, and the first ones of the document, but none further ahead.

    The last query of a document stands at its last key.
    """

    def sees(_: int, i: int, j: int, queries: int, keys: int) -> bool:
        own = i + keys - queries
        return (right < 0 or j <= own + right) and (left < 0 or j >= own - left or j < first)

    return _in_documents(packing, kv_packing, sees)


def prefix(packing: Packing, n: int | Sequence[int]) -> Pairs:
    """Causal, and the first n tokens of the document for everyone."""
    numbers = [n] * packing.num_documents if isinstance(n, int) else list(n)
    return _in_documents(packing, None, lambda document, i, j, *_: j <= i or j < numbers[document])


def chunk(packing: Packing, size: int) -> Pairs:
    """Causal, and in the same chunk of the document."""
    return _in_documents(packing, None, lambda _, i, j, *lengths: j <= i and i // size == j // size)


def shared_question(packing: Packing, parts: Sequence[Sequence[int]]) -> Pairs:
    """Causal, the key in the question or in the same answer."""
    part = [[number for number, size in enumerate(sizes) for _ in range(size)] for sizes in parts]

    def sees(document: int, i: int, j: int, *lengths: int) -> bool:
        return j <= i and part[document][j] in (0, part[document][i])

    return _in_documents(packing, None, sees)


def slices(
    packing: Packing, given: Sequence[tuple[int, int, int, int, str]], kv_packing: Packing | None = None
) -> Pairs:
    """Returns the pairs in any of the slices, in the same document."""
    in_document = full(packing, kv_packing)
    seen = np.zeros_like(in_document)
    for q0, q1, k0, k1, kind in given:
        for i in range(q0, q1):
            for j in range(k0, k1):
                up_to_last = (q1 - 1) - i <= (k1 - 1) - j  # as far from its last key as the query from its last one
                from_first = j - k0 >= i - q0
                needed = {"full": [], "causal": [up_to_last], "inverse_causal": [from_first]}
                seen[i, j] |= all(needed.get(kind, [up_to_last, from_first]))
    return seen & in_document


def blocks(packing: Packing, table: Pairs, block_size: int, *, causal: bool = False) -> Pairs:
    """Returns the pairs in a block of the table, in the same document."""
    seen = full(packing)
    for i, j in np.argwhere(seen):
        seen[i, j] = table[i // block_size, j // block_size] and (j <= i or not causal)
    return seen


def table(packing: Packing, name: str, num_blocks: int | None = None) -> Pairs:
    """A table of blocks of that name in each document."""
    num_blocks = num_blocks or {"strided": 16, "global_local": 16, "star": 4, "streaming": 8}[name]

    rules: dict[str, Callable[[int, int], bool]] = {
        "strided": lambda q, k: abs(q - k) in (0, num_blocks // 4, num_blocks // 2),
        "global_local": lambda q, k: q == 0 or k == 0 or q == k,
        "star": lambda q, k: k in (0, q),
        "streaming": lambda q, k: k == 0 or q - 2 <= k <= q,
    }
    blocks = []  # of each document's tokens
    for length in packing.lengths.tolist():
        sizes = [length // num_blocks + (number < length % num_blocks) for number in range(num_blocks)]
        blocks.append([number for number, size in enumerate(sizes) for _ in range(size)])

    def sees(document: int, i: int, j: int, *lengths: int) -> bool:
        block = blocks[document]
        return rules[name](block[i], block[j]) and (j <= i or name not in ("star", "streaming"))

    return _in_documents(packing, None, sees)


def _in_documents(packing: Packing, kv_packing: Packing | None, sees: Callable[..., bool]) -> Pairs:
    """The pairs of one document for which `sees(document, i, j, queries, keys)`, places counted in the document."""
    kv_packing = kv_packing or packing
    seen = np.zeros((packing.total, kv_packing.total), dtype=bool)
    q0 = k0 = 0
    for document, lengths in enumerate(zip(packing.lengths.tolist(), kv_packing.lengths.tolist(), strict=True)):
        for i in range(lengths[0]):
            for j in range(lengths[1]):
                seen[q0 + i, k0 + j] = sees(document, i, j, *lengths)
        q0, k0 = q0 + lengths[0], k0 + lengths[1]
    return seen


def pairs_of_case(case: Case) -> Pairs:
    """Returns the visible pairs of a parity case."""
    if not isinstance(case.mask, str):
        name, *arguments = case.mask
        return _MADE_BY[name](case.packing, *arguments)
    spec, cross = case.mask, {"kv_packing": case.kv_packing} if case.kv_lengths else {}
    first, _, rest = spec.partition("+") if spec.startswith("first:") else ("first:0", "", spec)
    name, _, numbers = rest.partition(":")
    arguments = [int(number) for number in numbers.split(",") if number]
    if name in ("strided", "global_local", "star", "streaming"):
        return table(case.packing, name, *arguments)
    if name == "window":
        return window(case.packing, *arguments, first=int(first.removeprefix("first:")), **cross)
    return _MADE_BY[name](case.packing, *arguments, **cross)


_MADE_BY: dict[str, Callable[..., Pairs]] = {
    "causal": causal, "full": full, "prefix": prefix, "chunk": chunk, "shared_question": shared_question,
    "from_slices": slices, "from_blocks": blocks,
}  # fmt: skip
