"""Hashes of outputs and gradients of some 220 small cases: whether a change to the code changes a bit of any result.

    python tools/bits.py --write before.json      at the commit before
    python tools/bits.py --compare before.json    at the commit after: exits 1 and names each case that differs

Every scheme and mode, layout and transport, in float32 and bfloat16, over ranks as threads. Hashes are those of one
machine: torch's kernels for other processors round otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.testing.parity import Case, run_layer

LAYOUTS = ("contiguous", "zigzag", "balanced", "random")
TRANSPORTS = ("collective", "pairwise", "hierarchical")
LENGTHS = ((7, 1, 40, 13, 2), (64,), (5, 5, 30, 1, 1), (33, 20))
MASKS = ("causal", "window:5,0", "first:2+window:4,0", "full")
HEADS = ((6, 2), (8, 4), (7, 1), (4, 4))
FIRST = ("a2a", "p2p", "all_gather", "exact", "a2a+p2p", "a2a+all_gather")  # whose cases keep their numbers


def cases() -> Iterator[Case]:
    """Yields the cases; options that the loops do not cover alternate with the case's number."""
    number = 0
    for dtype in (torch.float32, torch.bfloat16):
        for transport in TRANSPORTS:
            for scheme in FIRST:
                for layout in LAYOUTS:
                    chunked = number % 3 == 0 and "p2p" not in scheme
                    heads, groups = (8, 8) if chunked else HEADS[number % 4]
                    yield Case(
                        "attention", 4 if "+" in scheme else 3 + number % 2, LENGTHS[number // 3 % 4], layout, heads,
                        groups, value_head_dim=8 if number % 5 == 0 else 16, mask=MASKS[number % 5 % 4], scheme=scheme,
                        head_chunks=2 if chunked else None, transport=transport, learned_sink=number % 2 == 1,
                        align=1 + number % 3, dtype=dtype, seed=number,
                    )  # fmt: skip
                    number += 1
            for layer in ("gdn", "kda", "mamba", "conv1d"):
                for mode in ("headwise", "chunkwise", "redistribute"):
                    yield Case(
                        layer, 3 + number % 2, LENGTHS[number % 4], LAYOUTS[number // 2 % 4], 6, 3, head_dim=8,
                        value_head_dim=8, scheme=mode, transport=transport, hidden_size=32, align=1 + number % 3,
                        dtype=dtype, seed=number,
                    )  # fmt: skip
                    number += 1


def later_cases() -> Iterator[Case]:
    """Yields the cases of schemes that were added after the first ones."""
    later = [scheme for scheme in SCHEMES if scheme not in FIRST]
    choices = list(enumerate(itertools.product(LAYOUTS, (torch.float32, torch.bfloat16))))
    for scheme, (number, (layout, dtype)) in itertools.product(later, choices):
        yield Case(
            "attention", 4, LENGTHS[number % 4], layout, 8, 4, mask=MASKS[number % 4], scheme=scheme,
            head_chunks=1 + number % 2 if SCHEMES[scheme].takes_chunks else None,
            transport=TRANSPORTS[number % 3], learned_sink=number % 2 == 1, align=1 + number % 3, dtype=dtype,
            seed=number,
        )  # fmt: skip


def bits_of(case: Case) -> str:
    """Returns a hash of every rank's results, pad rows included."""
    digest = hashlib.sha256()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ranks without heads
        ranks = run_ranks(run_layer, case.cp, case, timeout=120.0)
    for results in ranks:
        for name in sorted(results):
            digest.update(name.encode() + results[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", type=Path, metavar="FILE")
    way.add_argument("--compare", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        str(case) + f" align {case.align} seed {case.seed}": bits_of(case)
        for case in itertools.chain(cases(), later_cases())
    }
    if options.write:
        options.write.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} cases written to {options.write}")
        return 0
    before = json.loads(options.compare.read_text())
    differ = [name for name in before if before[name] != found.get(name)]
    for name in differ:
        print(f"differs: {name}")
    print(f"{len(before) - len(differ)} of {len(before)} cases are the same bits; {len(found.keys() - before)} are new")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
