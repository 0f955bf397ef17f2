"""Features of drawn cases, to count those that `make fuzz` met, and the pairs of features that no case had."""

import collections
import itertools

from tests.fuzz_cases import ATTENTIONS, KINDS, layout_named

# Pairs are of calls of one family: a convolution has no mask.
FAMILIES = dict.fromkeys(ATTENTIONS, "attention") | dict.fromkeys(KINDS, "linear")
_FIELDS = {
    "attention": (
        "operation", "scheme", "codec", "transport", "kernel", "dtype", "whole", "checkpoint", "twice", "strides",
        "ones", "shared", "batch", "sink", "kv_layout", "latent_mode",
    ),
    "linear": (
        "operation", "scheme", "codec", "transport", "kernel", "dtype", "checkpoint", "twice", "strides", "ones",
        "shared", "width",
    ),
    "moved": ("operation", "scheme", "dtype", "checkpoint", "twice", "strides", "ones", "batch", "kv_layout"),
}  # fmt: skip


def features_of(case, call):
    """`{name: value}` of a call of a case, without values that its family does not have."""
    family = FAMILIES.get(call.operation, "moved")
    found = {name: getattr(call, name) for name in _FIELDS[family]}
    found |= {"cp_size": case.cp_size, "layout": call.layout, "pads": call.align > 1, **orders_of(case, call)}
    found |= {"calls": len(case.calls), "poison": case.poison, "own_plans": case.own_plans, "frozen": bool(call.frozen)}
    found |= {"documents": _documents(call)}
    if family != "moved":
        found |= {"forest": call.packing.branches is not None, "levels": _levels(call)}
    if family == "attention":
        found |= {"mask": call.mask[0], "cross": bool(call.kv_lengths), "dropout": bool(call.dropout)}
        found |= {"softcap": bool(call.softcap), "head chunks": (call.head_chunks or 1) > 1}
        found["kv_layout"] = call.kv_layout if call.kv_lengths else None
        found["blocks of keys"] = call.block > 0 if call.operation == "sparse_attention" else None
        found["latent_mode"] = call.latent_mode if call.latent else None
    if family == "linear":
        found |= {"head chunks": (call.head_chunks or 1) > 1}
        found |= {f"with {option}": True for option in call.options}
    return {name: value for name, value in found.items() if value is not None}


def orders_of(case, call):
    """Returns the orders of the ranks' tokens in the stream."""
    layout = layout_named(call.layout, call.packing, case.cp_size, align=call.align, seed=call.seed)
    held = [layout.fragments_of(rank) for rank in range(case.cp_size)]
    of_ranks = [sorted(fragments) for fragments in held if fragments]
    are_blocks = all(one[-1].end - one[0].start == sum(end - start for start, end in one) for one in of_ranks)
    counts = layout.token_counts.tolist()
    return {
        "ranks hold": "a block each" if are_blocks else "several",
        "ranks": "in order" if of_ranks == sorted(of_ranks) else "turned",
        "within ranks": "in order" if held == [sorted(fragments) for fragments in held] else "turned",
        "shares": "equal" if len(set(counts)) == 1 else "some empty" if not all(counts) else "uneven",
        "one token a rank": max(counts) == 1,
    }


def _documents(call):
    total = call.packing.total
    return "no token" if not total else "one token" if total == 1 else "one" if len(call.lengths) == 1 else "several"


def _levels(call):
    """The segments of the longest path, of documents that branch."""
    levels = []
    for parent in call.parents:
        levels.append(1 if parent < 0 else levels[parent] + 1)
    return max(levels, default=None)


class Seen:
    """Counts of features, and of pairs of them, over the cases that are added."""

    def __init__(self):
        self.values = collections.defaultdict(collections.Counter)  # by family
        self.pairs = collections.defaultdict(collections.Counter)

    def add(self, case):
        for call in case.calls:
            family = FAMILIES.get(call.operation, "moved")
            features = sorted(features_of(case, call).items())
            self.values[family].update(features)
            self.pairs[family].update(itertools.combinations(features, 2))

    def never(self, family):
        """Pairs of values, of two features each, that some call had one by one and no call had together."""
        values = sorted(self.values[family], key=str)
        return [
            (one, other) for one, other in itertools.combinations(values, 2)
            if one[0] != other[0] and not self.pairs[family][tuple(sorted((one, other)))]
        ]  # fmt: skip

    def lines(self):
        """The counts, then the pairs that no call had."""
        for family, values in self.values.items():
            by_name = collections.defaultdict(list)
            for (name, value), count in sorted(values.items(), key=str):
                by_name[name].append(f"{value} {count}")
            yield f"{family}:"
            yield from (f"  {name}: {', '.join(counts)}" for name, counts in by_name.items())
        for family in self.values:
            never, found = self.never(family), collections.defaultdict(list)
            for one, other in never:
                found[f"{one[0]} {one[1]} with {other[0]}"].append(str(other[1]))
            yield f"{family}: {len(self.pairs[family])} pairs met, {len(never)} never:"
            yield from (f"  {what}: {', '.join(values)}" for what, values in sorted(found.items()))
