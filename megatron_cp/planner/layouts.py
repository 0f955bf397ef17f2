"""Makes layouts by name, and chooses the one in which a model's layers are predicted to be fastest."""

from __future__ import annotations

import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.mask import MaskLike, mask_of_queries
from megatron_cp.layout.packing import checked_packing
from megatron_cp.planner.batch import Slot, checked_slot
from megatron_cp.planner.capabilities import require
from megatron_cp.planner.checks import checked_setting
from megatron_cp.planner.choose import VERY_MANY
from megatron_cp.planner.predict.price import priced

# The candidates of "auto"; among equally fast ones it takes the first.
CHOICES = ("contiguous", "zigzag", "balanced")
# Predictions with a smaller ratio count as equal. The ratio is far below the error of predictions, and far above the
# last bits in which processors of two ranks may differ.
_EQUAL = 1.001
_REMEMBERED = 128  # choices that are kept; a few kilobytes each


def layout_by_name(
    name: str, packing: Packing, cp_size: int, *, align: int = 1, min_rows: int = 0, seed: int = 0,
    mask: MaskLike | None = None, slots: Iterable[Slot] = (),
) -> Layout:  # fmt: skip
    """Makes the layout of that name.

    Args:
        name: `contiguous`, `zigzag`, `balanced` for `mask`, `random` fragments drawn from `seed`, or `auto`.
        packing: the documents.
        cp_size: the number of ranks.
        align, min_rows: see `Layout`.
        seed: the seed of random fragments.
        mask: the mask that balanced is made for, as in `plan_attention`; causal if None.
        slots: the spec of every layer of the model, for `auto`; see `choose_layout`.

    Raises:
        ArgumentError: an unknown name, or `auto` without layers.
    """
    match require("layout", name):
        case "auto":
            return choose_layout(packing, cp_size, slots, align=align, min_rows=min_rows, mask=mask).layout
        case "contiguous":
            layout = Layout.contiguous(packing, cp_size, align=align)
        case "zigzag":
            layout = Layout.zigzag(packing, cp_size, align=align)
        case "balanced":
            layout = Layout.balanced(packing, cp_size, mask=mask, align=align)
        case _:
            layout = random_layout(packing, cp_size, align=align, seed=seed)
    return layout.padded(align=align, min_rows=min_rows)


def random_layout(packing: Packing, cp_size: int, *, align: int = 1, seed: int = 0) -> Layout:
    """Makes a layout of random fragments in random order on random ranks, some of which may be empty."""
    random = np.random.default_rng(seed)
    cuts = random.integers(0, packing.total + 1, size=3 * cp_size)
    edges = np.unique(np.concatenate([[0], cuts, [packing.total]]))
    fragments: list[list[tuple[int, int]]] = [[] for _ in range(cp_size)]
    for piece in random.permutation(edges.size - 1).tolist():
        fragments[random.integers(cp_size)].append((int(edges[piece]), int(edges[piece + 1])))
    return Layout.from_fragments(packing, fragments, align=align)


# -- the cheapest ----------------------------------------------------------------------------------------------------


class KindPrice(NamedTuple):
    """The predicted time of the layers of one kind in a layout.

    Attributes:
        kind: the kind of the layers.
        scheme: their scheme or mode.
        layers: the number of layers.
        milliseconds: the time of a layer, forward and backward, including its share of a redistribution.
    """

    kind: str
    scheme: str
    layers: int
    milliseconds: float


class LayoutPrice(NamedTuple):
    """The predicted time of all layers in a layout.

    Attributes:
        name: the name of the layout.
        kinds: the price of each kind of layer.
    """

    name: str
    kinds: tuple[KindPrice, ...]

    @property
    def milliseconds(self) -> float:
        """The time of all layers, forward and backward."""
        return sum(kind.layers * kind.milliseconds for kind in self.kinds)

    def describe(self, which: str) -> str:
        """Returns a line of text about the layout and its price."""
        kinds = ", ".join(f"{n} x {kind} by {scheme} {each:.3f} ms" for kind, scheme, n, each in self.kinds)
        return f"{which} layout {self.name:<10} predicted {self.milliseconds:.3f} ms of all layers: {kinds}"


@dataclass(frozen=True)
class LayoutChoice:
    """The layout of a batch, and why.

    Attributes:
        name: the name of the layout.
        layout: the assignment of tokens to ranks.
        prices: the prices of the layouts that were compared, the chosen one first; empty if there was no choice.
        notes: the reasons why a layout was not compared.
    """

    name: str
    layout: Layout
    prices: tuple[LayoutPrice, ...] = ()
    notes: tuple[str, ...] = ()

    def explain(self) -> str:
        """Returns a line for each layout that was compared."""
        if not self.prices:
            return f"chosen layout {self.name}: {'; '.join(self.notes) or 'nothing to choose'}"
        lines = [price.describe("other " if number else "chosen") for number, price in enumerate(self.prices)]
        best = min(price.milliseconds for price in self.prices)
        if best < self.prices[0].milliseconds:
            lines.append(f"layouts within {_EQUAL - 1:.1%} of each other count as equal: the first one is taken")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def choose_layout(
    packing: Packing, cp_size: int, slots: Iterable[Slot], *, align: int = 1, min_rows: int = 0,
    mask: MaskLike | None = None,
) -> LayoutChoice:  # fmt: skip
    """Chooses the layout in which all layers of a model are predicted to be fastest: contiguous, zigzag or balanced.

    Each layer runs by the scheme or mode of its spec; "auto" means the cheapest candidate in the layout.
    Redistributions of runs of linear layers are counted. Products of weights are not: all these layouts give a rank as
    many tokens. The choice depends on the arguments alone, so all ranks make the same. Choices for the last 128 batches
    are kept by the value of the arguments, unless a mask is given.

    Args:
        packing: the documents.
        cp_size: the number of ranks.
        slots: the spec of every layer of the model, as often as it occurs; a part of the model may get another layout.
        align, min_rows: see `Layout`.
        mask: the mask that balanced is made for; causal in each document if None. The masks of layers are in `slots`.

    Raises:
        ArgumentError: no layers, or layers that cannot be planned in any of these layouts.

    Example:
        >>> layer = AttentionSpec(heads=8, kv_heads=2, head_dim=64, scheme="exact")
        >>> choose_layout(Packing([16000, 300, 9000, 4000, 1, 3000] * 2), 4, [layer] * 12).name
        'balanced'
    """
    cp_size, packing = checked_integer("cp_size", cp_size, 1), checked_packing(packing)
    align, min_rows = checked_integer("align", align, 1), checked_integer("min_rows", min_rows, 0)
    if mask is not None:
        mask = mask_of_queries(packing, mask)
    layers = _counted(slots)
    made: dict[str, Layout] = {}

    def make(name: str) -> Layout:
        if name not in made:
            made[name] = layout_by_name(name, packing, cp_size, align=align, min_rows=min_rows, mask=mask)
        return made[name]

    if cp_size == 1:
        return LayoutChoice(CHOICES[0], make(CHOICES[0]), notes=("one rank holds all tokens",))
    if mask is not None:
        prices, notes = _priced_layouts(layers, make, packing, cp_size)
    else:
        key = (packing.value, cp_size, align, min_rows, tuple(layers.items()))
        prices, notes = _CHOSEN.recall(key, lambda: _priced_layouts(layers, make, packing, cp_size))
    return LayoutChoice(prices[0].name, make(prices[0].name), prices, notes)


def _counted(slots: Iterable[Slot]) -> Counter[Slot]:
    if not isinstance(slots, Iterable) or isinstance(slots, str | bytes):
        raise ArgumentError("slots", slots, "several of AttentionSpec and LinearSpec, one for each layer")
    given = [checked_slot(f"slots[{number}]", slot) for number, slot in enumerate(slots)]
    if not given:
        remedy = "auto chooses a layout for layers; without slots, use contiguous, zigzag or balanced."
        raise ArgumentError("slots", given, "the slot of each layer of the model", remedy)
    return Counter(given)


_PricedLayouts = tuple[tuple[LayoutPrice, ...], tuple[str, ...]]


def _priced_layouts(
    layers: Counter[Slot], make: Callable[[str], Layout], packing: Packing, cp_size: int
) -> _PricedLayouts:
    """Returns the prices of layouts, the chosen one first, and the reasons why others have none."""
    prices, notes, refused = list[LayoutPrice](), list[str](), None
    for name in CHOICES:
        # Only zigzag cuts every document; where its tables take a second to make, no layer gains as much.
        if name == "zigzag" and 2 * cp_size * packing.num_documents > VERY_MANY:
            notes.append(f"layout {name} was not compared: it would have more than {VERY_MANY} fragments")
            continue
        try:
            prices.append(LayoutPrice(name, tuple(_kind_price(slot, n, make(name)) for slot, n in layers.items())))
        except ArgumentError as error:
            refused = refused or error
            notes.append(f"layout {name} was left out: {error}")
    if not prices:
        assert refused is not None
        raise refused
    best = min(price.milliseconds for price in prices)
    first = next(price for price in prices if price.milliseconds <= best * _EQUAL)
    others = sorted((price for price in prices if price is not first), key=lambda price: price.milliseconds)
    return (first, *others), tuple(notes)


def _kind_price(slot: Slot, layers: int, layout: Layout) -> KindPrice:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # repeated when the chosen layout is planned
        plan = slot.plan(layout)
    if plan.prices:
        return KindPrice(plan.kind, plan.strategy, layers, plan.prices[0].total)
    on, topology, item_size = checked_setting(
        plan.transport, slot.hardware, slot.topology, slot.item_size, layout.cp_size
    )
    return KindPrice(plan.kind, plan.strategy, layers, priced(plan, on, topology, item_size=item_size).total)


class _RecentChoices:
    """A cache of the results for the last keys, by value."""

    def __init__(self, most: int) -> None:
        self._most, self._made, self._lock = most, OrderedDict[Hashable, _PricedLayouts](), threading.Lock()

    def recall(self, key: Hashable, make: Callable[[], _PricedLayouts]) -> _PricedLayouts:
        """Returns the cached result for the key, or calls `make` and caches its result."""
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        found = make()
        with self._lock:
            self._made[key] = found
            while len(self._made) > self._most:
                self._made.popitem(last=False)
        return found

    def __len__(self) -> int:
        return len(self._made)


_CHOSEN = _RecentChoices(_REMEMBERED)
