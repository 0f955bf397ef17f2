"""Draws attention cases for as long as one asks, and checks each against dense attention: `make fuzz SECONDS=600`.

A failing case is shrunk and printed with what it takes to run it again.
"""

from __future__ import annotations

import argparse
import time

import torch
from hypothesis import HealthCheck, given, seed, settings

from tests.scheme_cases import cases, check

BATCH = 200  # cases between looks at the clock


def main() -> None:
    """Runs batches from rising seeds until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, batches = time.monotonic(), 0
    while time.monotonic() - started < args.seconds:
        number = args.seed + batches
        try:
            _batch(number)
        except BaseException:
            print(f"failed with --seed {number}")
            raise
        batches += 1
        print(f"{batches * BATCH} cases in {time.monotonic() - started:.0f} s", flush=True)
    print(f"passed: {batches * BATCH} cases from seed {args.seed}")


def _batch(number: int) -> None:
    @seed(number)
    @settings(max_examples=BATCH, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def equal(case) -> None:  # type: ignore[no-untyped-def]
        check(case)

    equal()


if __name__ == "__main__":
    main()
